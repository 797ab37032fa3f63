"""What the suite needs to know of a connector: how to configure a store of its own, and how to damage one.

A connector's author subclasses ConnectorHarness; see contract.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock
from connectors.contract.peer import Peer
from connectors.registry import create_connector
from core.errors import ConfigError
from core.kv.connector import KVConnector
from core.kv.layout import FLOAT_DTYPES, KVLayout


class ConnectorHarness(ABC):
    """One test's view of a connector. Nodes and peers that it opened are ended by close().

    A hook that a store cannot offer keeps its default, which skips the test.
    """

    connector_name: str
    is_persistent = False  # blocks outlive the last user of a store
    is_shared = True  # other processes see a saved block
    is_one_place = True  # a block outlives the node that saved it while others use the store, and is kept once
    max_file_bytes = 0  # a process that may write files of this size cannot hold 512 blocks; 0: the store has no files
    takes_floats_only = False  # a layout of 8-bit numbers is refused with a ConfigError
    min_usable_fraction = 0.8  # of what is stored after evictions, the part that some prefix still reaches

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._nodes: list[Node] = []
        self._peers: list[Peer] = []

    @abstractmethod
    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        """Options for a store of its own by that name, with room for num_blocks blocks of LAYOUT, a little more or less."""

    def create(self, options: dict[str, Any], clock: SteppedClock) -> KVConnector:
        """A connector; by name, as engines do."""
        return create_connector(self.connector_name, options, clock)

    def leftovers(self) -> list[str]:
        """What of the stores remains on this host, now that nobody uses them, and should not. What only a start cleans up after
        a killed process does not count: open and close a node first."""
        return []

    # -- damage: with `store` open or not, nothing in flight ---------------------------------------------------------------
    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        """Change one bit of a stored block: where is "header", "payload" or "end" (the payload's last byte)."""
        pytest.skip("this store's bytes cannot be reached")

    def truncate(self, store: str, block_hash: bytes) -> None:
        """Cut the store's bytes in the middle of this block."""
        pytest.skip("this store's bytes cannot be reached")

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        """Exchange all bytes of two stored blocks."""
        pytest.skip("this store's bytes cannot be reached")

    def delete(self, store: str, block_hash: bytes) -> None:
        """Remove one block's bytes behind the connector's back."""
        pytest.skip("this store's bytes cannot be reached")

    def wipe(self, store: str) -> None:
        """Remove everything that the store keeps, behind the connector's back."""
        pytest.skip("this store cannot be removed under a connector")

    def damage_index(self, store: str) -> None:
        """Make what the store knows of its blocks unreadable; nobody has it open."""
        pytest.skip("this store has no index")

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        """Options for a store of 512 blocks on a medium that is really full before that, and a function that makes room."""
        pytest.skip("this store's medium cannot be made full")
        yield {}, lambda: None

    # -- used by the suite -------------------------------------------------------------------------------------------------
    def open_node(self, store: str = "store", num_blocks: int = 256, layout: KVLayout = LAYOUT) -> Node:
        """A node of this process on a store."""
        return self.open_node_with(self.options(store, num_blocks), layout)

    def open_node_with(self, options: dict[str, Any], layout: KVLayout = LAYOUT) -> Node:
        """A node of this process with these options."""
        clock = SteppedClock()
        connector = self.create(options, clock)
        try:
            node = Node(connector, clock, layout)
        except BaseException:
            connector.close()
            raise
        self._nodes.append(node)
        return node

    def takes(self, layout: KVLayout) -> bool:
        """Whether the store is for this layout; where it is not, it must say so when a node opens it."""
        if not self.takes_floats_only or layout.dtype in FLOAT_DTYPES:
            return True
        with pytest.raises(ConfigError):
            self.open_node(layout=layout)
        return False

    def open_peer(self, store: str = "store", num_blocks: int = 256, max_file_bytes: int = 0) -> Peer:
        """A node in a process of its own."""
        if not self.is_shared:
            pytest.skip("this store belongs to one process")
        peer = Peer(self.connector_name, self.options(store, num_blocks), max_file_bytes)
        self._peers.append(peer)
        return peer

    def close_nodes(self) -> list[Node]:
        """End all peers by SIGKILL and all nodes by close(); the nodes, for a last look."""
        for peer in self._peers:
            peer.kill()
        for node in self._nodes:
            node.connector.close()
        nodes = list(self._nodes)
        self._peers.clear()
        self._nodes.clear()
        return nodes

    def close(self) -> None:
        """End what is open and remove what the harness itself made. Safe to repeat."""
        self.close_nodes()
