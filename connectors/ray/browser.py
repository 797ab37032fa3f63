"""Looks into the stores of a Ray node's directory, over its socket: neither Ray nor an engine is needed, but the directory is.

Only what is on this host is listed; whether a block is there for an engine, other nodes are asked as well.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from connectors.byte_sizes import with_parsed_sizes
from connectors.ray.client import DirectoryConnection, DirectoryDoor
from connectors.ray.connector import RayOptions
from connectors.ray.messages import (
    ABSENT,
    LOCATED_BLOCK,
    STATUS_BYTES,
    FrameStream,
    Operation,
    check_peer,
    pack_names,
    pack_put,
    socket_address,
)
from connectors.ray.visits import LISTED_BLOCK, PAGE_HEAD, pack_first, pack_numbered
from connectors.store_browser import (
    BATCH_BYTES,
    MAX_BATCH_BLOCKS,
    MAX_BLOCK_BYTES,
    BlockEntry,
    RawBlock,
    StoreBrowser,
    WriteOutcome,
    in_batches,
)
from connectors.stored_block import BLOCK_HEADER_BYTES, PLAIN_VERSION, read_block_header
from core.config import options_from_mapping
from core.errors import ConnectorError

_NAMES_AT_A_TIME = 4096
_OUTCOMES = (WriteOutcome.NO_ROOM, WriteOutcome.PRESENT, WriteOutcome.WRITTEN)  # by what PUT is answered with


class _Writer:
    """A connection for writing blocks of one size, and memory that the directory copies them out of."""

    def __init__(self, door: DirectoryDoor, descriptor: int, block_bytes: int, num_blocks: int) -> None:
        self._pool = mmap.mmap(descriptor, num_blocks * block_bytes)
        self._block_bytes = block_bytes
        self.num_blocks = num_blocks
        self.connection = door.open(descriptor)

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """At most num_blocks. Raises OSError or ConnectorError."""
        names = []
        for position, block in enumerate(blocks):
            header = read_block_header(block.header)
            assert header is not None, "only verified blocks are written"
            names.append(header.block_hash)
            self._pool[position * self._block_bytes : (position + 1) * self._block_bytes] = block.payload
        flags, _status = self.connection.stream.ask(Operation.PUT, pack_put(names, range(len(names)), []), len(names))
        return [_OUTCOMES[flag] if flag < len(_OUTCOMES) else WriteOutcome.NO_ROOM for flag in flags]


class RayBrowser(StoreBrowser):
    """All layouts of a namespace on this node. An entry's handle is the number of the block's place."""

    def __init__(self, options: RayOptions) -> None:
        """Raises ConnectorError where there is no directory, or none that answers."""
        super().__init__()
        self._options = options
        self._block_bytes: dict[bytes, int] = {}
        self._connections: dict[bytes, DirectoryConnection] = {}
        self._writers: dict[bytes, _Writer] = {}
        with self._translated():
            for fingerprint, block_bytes in self._stores():
                self._connect(fingerprint, block_bytes)

    @property
    def capacity_bytes(self) -> int:
        """Of all layouts together."""
        return sum(connection.status.capacity_bytes for connection in self._connections.values())

    def entries(self) -> Iterator[BlockEntry]:
        """In pages of some thousands."""
        for fingerprint, connection in self._connections.items():
            num_bytes = self._block_bytes[fingerprint] + BLOCK_HEADER_BYTES
            first = 0
            while True:
                with self._translated():
                    first, listed = self._list(connection, first)
                for name, number, offset, order, used_s in LISTED_BLOCK.iter_unpack(listed):
                    yield BlockEntry(fingerprint, name, num_bytes, order, f"byte {offset}", used_s, handle=number)
                if not first:
                    break

    def _list(self, connection: DirectoryConnection, first: int) -> tuple[int, bytes]:
        """Where the next page begins, and this one's entries."""
        connection.stream.begin()
        connection.stream.send(Operation.LIST, pack_first(first))
        page = connection.stream.receive_any_answer()[:-STATUS_BYTES]
        if len(page) < PAGE_HEAD.size:
            raise ConnectorError("a page of a wrong length")
        following, count = PAGE_HEAD.unpack_from(page)
        if len(page) != PAGE_HEAD.size + count * LISTED_BLOCK.size or 0 < following <= first:
            raise ConnectorError("a page of a wrong length")
        return following, page[PAGE_HEAD.size :]

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """On this node, or on another one."""
        connection = self._connections.get(layout_fingerprint)
        if connection is None:
            return [False] * len(block_hashes)
        found: list[bool] = []
        for start in range(0, len(block_hashes), _NAMES_AT_A_TIME):
            part = block_hashes[start : start + _NAMES_AT_A_TIME]
            with self._translated():
                found += map(bool, connection.stream.ask(Operation.LOOKUP, pack_names(part), len(part))[0])
        return found

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """What a batch holds stays where it is while it is copied."""
        for batch in in_batches(entries):
            fingerprint = batch[0].layout_fingerprint
            stream = self._connections[fingerprint].stream
            with self._translated():
                names = [entry.block_hash for entry in batch]
                answer, _status = stream.ask(Operation.INSPECT, pack_names(names), len(names) * LOCATED_BLOCK.size)
                blocks = [self._copy(fingerprint, offset, header) for offset, header in LOCATED_BLOCK.iter_unpack(answer)]
                stream.send(Operation.RELEASE, b"")
            yield from zip(batch, blocks, strict=True)

    def _copy(self, fingerprint: bytes, offset: int, header: bytes) -> RawBlock | None:
        if offset == ABSENT:
            return None
        end = offset + self._block_bytes[fingerprint]
        return RawBlock(header, self._connections[fingerprint].store[offset:end].tobytes())

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Makes the store of a layout that is not there. What was used last is sent first, as prefixes begin."""
        outcomes = dict.fromkeys(range(len(blocks)), WriteOutcome.OTHER_SIZE)
        by_layout: dict[bytes, list[int]] = {}
        for position, block in enumerate(blocks):
            header = read_block_header(block.header)
            assert header is not None, "only verified blocks are written"
            if header.version == PLAIN_VERSION:
                by_layout.setdefault(header.layout_fingerprint, []).append(position)
            else:  # the directory would call its bytes a plain block's
                outcomes[position] = WriteOutcome.OTHER_FORM
        for fingerprint, positions in by_layout.items():
            with self._translated():
                num_bytes = self._block_bytes.get(fingerprint, len(blocks[positions[0]].payload))
                writer = self._writer(fingerprint, num_bytes)
                fitting = [position for position in positions if len(blocks[position].payload) == num_bytes]
                for start in range(0, len(fitting), writer.num_blocks):
                    part = fitting[start : start + writer.num_blocks][::-1]
                    outcomes.update(zip(part, writer.write([blocks[position] for position in part]), strict=True))
        return list(outcomes.values())

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """A block that has gone and come again stays."""
        num_removed = 0
        for batch in in_batches(entries):
            connection = self._connections[batch[0].layout_fingerprint]
            names = b"".join(pack_numbered(entry.block_hash, entry.handle) for entry in batch)
            with self._translated():
                num_removed += sum(connection.stream.ask(Operation.REMOVE, names, len(batch))[0])
        return num_removed

    def close(self) -> None:
        """End all connections."""
        for writer in self._writers.values():
            writer.connection.stream.close()
        for connection in self._connections.values():
            connection.stream.close()

    # -- connections ---------------------------------------------------------------------------------------------------
    def _stores(self) -> list[tuple[bytes, int]]:
        """Layout and block size of each store of the namespace. Raises OSError or ConnectorError."""
        options = self._options
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connected:
            connected.settimeout(options.op_timeout_s)
            connected.connect(socket_address(options.address, options.node_ip))
            check_peer(connected)
            stream = FrameStream(connected, options.op_timeout_s)
            stream.begin()
            stream.send(Operation.STORES, options.namespace.encode())
            operation, body, _descriptor = stream.receive()
        try:
            stores = [(bytes.fromhex(store["layout"]), int(store["block_bytes"])) for store in json.loads(body)]
        except (ValueError, KeyError, TypeError) as error:
            raise ConnectorError(f"its list of stores is not understood: {error!r}") from error
        if operation is not Operation.OK or not all(0 < num_bytes <= MAX_BLOCK_BYTES for _, num_bytes in stores):
            raise ConnectorError("its list of stores is not understood")
        return stores

    def _connect(self, fingerprint: bytes, block_bytes: int) -> None:
        self._connections[fingerprint] = self._door(fingerprint, block_bytes, 0).open()
        self._block_bytes[fingerprint] = block_bytes

    def _writer(self, fingerprint: bytes, block_bytes: int) -> _Writer:
        writer = self._writers.get(fingerprint)
        if writer is None:
            num_blocks = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes))
            descriptor = os.memfd_create("kvrelay-visitor", os.MFD_CLOEXEC)
            try:
                os.ftruncate(descriptor, num_blocks * block_bytes)
                door = self._door(fingerprint, block_bytes, num_blocks)
                self._writers[fingerprint] = writer = _Writer(door, descriptor, block_bytes, num_blocks)
            finally:
                os.close(descriptor)
            if fingerprint not in self._connections:
                self._connect(fingerprint, block_bytes)
                self.notes.append(
                    f"no engine uses namespace {self._options.namespace} with layout {fingerprint.hex()} here: what is written"
                    f" goes {self._options.linger_s:g} s after this command (linger_s), unless one comes"
                )
        return writer

    def _door(self, fingerprint: bytes, block_bytes: int, num_blocks: int) -> DirectoryDoor:
        options = self._options
        hello = {
            "namespace": options.namespace,
            "layout": fingerprint.hex(),
            "block_bytes": block_bytes,
            "stride_bytes": block_bytes,
            "num_blocks": num_blocks,
            "capacity_bytes": options.capacity_bytes,
            "object_bytes": options.object_bytes,
            "linger_s": options.linger_s,
            "op_timeout_s": options.op_timeout_s,
            "visitor": True,
        }
        return DirectoryDoor(options.address, options.node_ip, hello, options.op_timeout_s)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except ConnectionRefusedError as error:
            options = self._options
            node = f" ({options.node_ip})" if options.node_ip else ""
            raise ConnectorError(
                f"no directory for the Ray at {options.address} runs on this host{node}: no engine here uses that Ray now, or it"
                " names it in another way (options address and node_ip)"
            ) from error
        except ConnectionResetError as error:
            reason = "it ended the connection, as one of an earlier version does, which nobody can look into"
            raise ConnectorError(f"the directory for the Ray at {self._options.address}: {reason}") from error
        except (OSError, ConnectorError) as error:
            raise ConnectorError(f"the directory for the Ray at {self._options.address}: {error}") from error


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """The stores of a namespace on this host. Raises ConfigError, or ConnectorError where there is no directory."""
    sized = with_parsed_sizes(options, ("capacity_bytes", "object_bytes"), "connector.options")
    return RayBrowser(options_from_mapping(RayOptions, sized, "connector.options"))
