"""The contract, for tcp: each node has a memory of its own, and nodes of one store are each other's peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, Node
from connectors.contract.peer import Peer
from connectors.tcp.block_memory import BlockMemory, slot_bytes
from connectors.tcp.connector import TcpConnector
from deploy.topology import find_free_ports

HOST = "127.0.0.1"
_NUM_PORTS = 4  # the most users that a test has on one store at a time


class TcpHarness(ConnectorHarness):
    """A store is a set of ports. Whoever opens it listens at one that nobody uses now, and has all others for peers."""

    connector_name = "tcp"
    is_one_place = False

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._ports: dict[str, list[int]] = {}
        self._users: dict[int, Node | Peer] = {}

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        ports = self._ports.setdefault(store, find_free_ports(HOST, _NUM_PORTS))
        own = next(port for port in ports if not self._is_used(port))
        return {
            "port": own,
            "peers": [f"{HOST}:{port}" for port in ports if port != own],
            "capacity_bytes": num_blocks * slot_bytes(LAYOUT),
        }

    def open_node_with(self, options: dict[str, Any], layout: Any = LAYOUT) -> Node:
        node = super().open_node_with(options, layout)
        self._users[options["port"]] = node
        return node

    def open_peer(self, store: str = "store", num_blocks: int = 256, max_file_bytes: int = 0) -> Peer:
        port = self.options(store, num_blocks)["port"]
        peer = super().open_peer(store, num_blocks, max_file_bytes)
        self._users[port] = peer
        return peer

    def _is_used(self, port: int) -> bool:
        user = self._users.get(port)
        if isinstance(user, Peer):
            return user.is_running
        return user is not None and not _connector(user)._is_closed

    # -- damage: to the memory of the node that has the block --------------------------------------------------------------
    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        memory, slot = self._find(block_hash)
        if where == "header":
            header = bytearray(memory._header_by_slot[slot])
            header[20] ^= 0x10
            memory._header_by_slot[slot] = bytes(header)
        else:
            memory._payload(slot)[0 if where == "payload" else LAYOUT.block_bytes - 1] ^= 0x10

    def truncate(self, store: str, block_hash: bytes) -> None:
        memory, slot = self._find(block_hash)
        memory._payload(slot)[100:] = 0

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        (memory, first), (_, second) = self._find(first_hash), self._find(second_hash)
        payloads = [memory._payload(slot).copy() for slot in (first, second)]
        headers = memory._header_by_slot
        memory._payload(first)[:], memory._payload(second)[:] = payloads[1], payloads[0]
        headers[first], headers[second] = headers[second], headers[first]

    def delete(self, store: str, block_hash: bytes) -> None:
        memory, _slot = self._find(block_hash)
        memory.forget(block_hash)

    def _find(self, block_hash: bytes) -> tuple[BlockMemory, int]:
        memories = [_connector(node)._memory for node in self._nodes]
        return next((memory, memory._slot_by_hash[block_hash]) for memory in memories if block_hash in memory.stored)


def _connector(node: Node) -> TcpConnector:
    assert isinstance(node.connector, TcpConnector)
    return node.connector


class TestTcp(ConnectorContract):
    harness_type = TcpHarness
