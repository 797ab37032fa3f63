"""Looks into the memory of running nodes with the tcp connector, at their kv_address: as a puller that has no layout.

The options are a connector's: `peers`, and `host` and `port` where a port is given, say which nodes. Nobody but a node writes to
its memory, so a browser only reads.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from connectors.store_browser import MAX_BLOCK_BYTES, BlockEntry, RawBlock, StoreBrowser, WriteOutcome, in_batches
from connectors.stored_block import BLOCK_HEADER_BYTES
from connectors.tcp.frames import (
    ANY_LAYOUT,
    ITEM_BYTES,
    MAX_ITEMS,
    MAX_PULLED,
    NO_LEASE,
    REFUSAL_TEXTS,
    EndPoint,
    Kind,
    Refusal,
    pack_head,
    pack_question,
)
from connectors.tcp.options import TcpOptions, advertised_address, tcp_options
from connectors.tcp.options import read_secret as read_key_file
from connectors.tcp.stream import BlockStream, greet_source
from connectors.tcp.visits import DESCRIPTION_BYTES, PRESENT, unpack_description
from core.addresses import host_of, is_loopback
from core.errors import ConfigError, ConnectorError

_MAX_SLOTS = 2**32


class _Node:
    """A connection to one node. Every method raises ConnectorError where the node does not answer as it should."""

    def __init__(self, address: str, secret: bytes, options: TcpOptions) -> None:
        self.address = address
        with contextlib.ExitStack() as undo, self._translated():
            if not secret and not is_loopback(host_of(address)):
                raise ConnectionError("is on another machine, and there is no secret (--keys, or the option key_file)")
            place = (host_of(address), int(address.rpartition(":")[2]))
            connected = socket.create_connection(place, options.connect_timeout_s)
            undo.callback(connected.close)
            self._stream = BlockStream(connected, options.op_timeout_s)
            greet_source(self._stream, EndPoint(secret, ANY_LAYOUT, 0, os.urandom(16)))
            self._stream.send([pack_head(Kind.DESCRIBE)])
            self._stream.receive_head(Kind.MEMORY)
            self.memory = unpack_description(self._stream.receive(DESCRIPTION_BYTES))
            if self.memory.block_bytes > MAX_BLOCK_BYTES or self.memory.num_slots > _MAX_SLOTS:
                raise ConnectionError("says that its blocks are larger, or more, than they can be")
            undo.pop_all()

    def names(self) -> list[bytes]:
        """All blocks, the next to be evicted first."""
        with self._translated():
            self._stream.send([pack_head(Kind.LIST)])
            _kind, count = self._stream.receive_head(Kind.NAMES)
            if count > self.memory.num_slots:
                raise ConnectionError("lists more blocks than it has room for")
            names = self._stream.receive(count * ITEM_BYTES)
        return [names[start : start + ITEM_BYTES] for start in range(0, len(names), ITEM_BYTES)]

    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these it has."""
        found: list[bool] = []
        for start in range(0, len(names), MAX_ITEMS - 1):
            part = names[start : start + MAX_ITEMS - 1]
            with self._translated():
                self._stream.send([pack_question(Kind.LOOKUP, [NO_LEASE, *part])])
                self._expect(Kind.FOUND, len(part))
                found += map(bool, self._stream.receive(len(part)))
        return found

    def read(self, names: Sequence[bytes]) -> Iterator[RawBlock | None]:
        """At most MAX_PULLED; all must be taken before anything else is asked."""
        with self._translated():
            self._stream.send([pack_question(Kind.READ, names)])
            self._expect(Kind.COPIES, len(names))
        for _ in names:
            block = None
            with self._translated():
                if self._stream.receive(len(PRESENT)) == PRESENT:
                    header = self._stream.receive(BLOCK_HEADER_BYTES)
                    block = RawBlock(header, self._stream.receive(self.memory.block_bytes))
            yield block

    def drop_damaged(self, names: Sequence[bytes]) -> None:
        """Have it check these, and drop those that are damaged."""
        for start in range(0, len(names), MAX_PULLED):
            with self._translated():
                self._stream.send([pack_question(Kind.SUSPECT, names[start : start + MAX_PULLED])])
                self._stream.receive_head(Kind.DONE)

    def close(self) -> None:
        """Safe to repeat."""
        self._stream.close()

    def _expect(self, kind: Kind, count: int) -> None:
        if self._stream.receive_head(kind)[1] != count:
            raise ConnectionError("answers another question")

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = str(error)
            if reason == REFUSAL_TEXTS[Refusal.LAYOUT]:  # to one that has none
                reason = "it is of an earlier version, which nobody can look into"
            raise ConnectorError(f"the node at {self.address}: {reason}") from error


class TcpBrowser(StoreBrowser):
    """One node or several. A block that several have is listed once for each; an entry's handle is its node's number."""

    why_read_only = (
        "a node's own memory is written and evicted by that node alone, and goes with it; blocks for a node to find belong into a"
        " store that nodes share"
    )
    why_no_pins = "a node's own memory has no pins: it keeps what was used last"

    def __init__(self, nodes: Sequence[_Node], problems: Sequence[str]) -> None:
        super().__init__()
        self._nodes = nodes
        self.problems += problems

    @property
    def capacity_bytes(self) -> int:
        """Of all nodes together."""
        return sum(node.memory.slot_bytes * node.memory.num_slots for node in self._nodes)

    def entries(self) -> Iterator[BlockEntry]:
        """A node's blocks are listed at once. When they were used, nodes do not know: only in which order."""
        for number, node in enumerate(self._nodes):
            fingerprint, num_bytes, place = node.memory.layout_fingerprint, node.memory.slot_bytes, f"node {node.address}"
            for order, name in enumerate(node.names()):
                yield BlockEntry(fingerprint, name, num_bytes, order, place, handle=number)

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """Whether any node has them."""
        nodes = [node for node in self._nodes if node.memory.layout_fingerprint == layout_fingerprint]
        answers = [node.find(block_hashes) for node in nodes] or [[False] * len(block_hashes)]
        return [any(in_nodes) for in_nodes in zip(*answers, strict=True)]

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """A node's copies, which it does not count as a use."""
        for number, of_node in itertools.groupby(entries, key=lambda entry: int(entry.handle)):
            for batch in in_batches(of_node):
                yield from zip(batch, list(self._nodes[number].read([entry.block_hash for entry in batch])), strict=True)

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Raises ConnectorError: see why_read_only."""
        raise ConnectorError(self.why_read_only)

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """What a node finds to be damaged, when it is told to look."""
        num_removed = 0
        for number, of_node in itertools.groupby(entries, key=lambda entry: int(entry.handle)):
            node, names = self._nodes[number], [entry.block_hash for entry in of_node]
            node.drop_damaged(names)
            num_removed += node.find(names).count(False)
        return num_removed

    def close(self) -> None:
        """End the connections."""
        for node in self._nodes:
            node.close()


def open_browser(options: Mapping[str, Any], read_secret: Callable[[], bytes] = bytes) -> StoreBrowser:
    """The nodes that these options name and that answer; the others are problems. Raises ConfigError where they name none, and
    ConnectorError where none answers."""
    parsed = tcp_options(options)
    addresses = dict.fromkeys([*([advertised_address(parsed, parsed.port)] if parsed.port else []), *parsed.peers])
    if not addresses:
        allowed = "HOST:PORT of running nodes, whose memory is to be looked into: the kv_address that `kvrelay nodes` shows"
        raise ConfigError("connector.options.peers", "", allowed)
    secret = read_key_file(parsed.key_file) if parsed.key_file else read_secret()
    nodes: list[_Node] = []
    problems: list[str] = []
    for address in addresses:
        try:
            nodes.append(_Node(address, secret, parsed))
        except ConnectorError as error:
            problems.append(str(error))
    if not nodes:
        raise ConnectorError("; ".join(problems))
    return TcpBrowser(nodes, problems)
