"""How a block is laid out in Redis: its keys, and where a value is cut so that the server's allocator wastes little.

<namespace>:<version>:<layout>:<hash>      header and payload, or their greater part
<namespace>:<version>:<layout>:<hash>:1    the rest, where the whole would lie just above one of the allocator's size classes

In a cluster the hash is in braces, which make it the key's hash tag.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors.coding.coded_payload import read_prefix
from connectors.redis.resp_stream import pack_command
from connectors.stored_block import BLOCK_HEADER_BYTES, CODED_VERSION, read_block_header
from core.kv.layout import KVLayout

# Of keys and values. Another version has other keys, so that old and new processes can share a server.
KEY_VERSION = 1
MAX_PARTS = 2
HASH_TAG = (b"{", b"}")
_SERVER_OVERHEAD_BYTES = 32  # string header, terminator, and what the server receives along with a value
_MAX_WASTE = 0.1


def size_class(num_bytes: int) -> int:
    """What jemalloc allocates for num_bytes, of 16 KiB or more: four classes to each power of two."""
    step = _class_step(num_bytes)
    return -(-num_bytes // step) * step


def _class_step(num_bytes: int) -> int:
    return 1 << max(0, (num_bytes - 1).bit_length() - 3)


def split_payload(block_bytes: int) -> tuple[slice, ...]:
    """The payload's part of each value of a block.

    An exact 2 MiB block with its header would occupy 2.5 MiB; cut, it wastes next to nothing.
    """
    overhead = BLOCK_HEADER_BYTES + _SERVER_OVERHEAD_BYTES
    whole = block_bytes + overhead
    if block_bytes < 64 * 1024 or size_class(whole) - whole <= _MAX_WASTE * whole:
        return (slice(0, block_bytes),)
    first = size_class(whole) - _class_step(whole) - overhead  # fills the next smaller class
    return (slice(0, first), slice(first, block_bytes))


def cut_payload(header: bytes, payload: bytes) -> tuple[slice, ...]:
    """Where a block at rest is cut into values. An encoded block has as many as it would have as it is in the pool."""
    found = read_block_header(header)
    prefix = read_prefix(payload) if found is not None and found.version == CODED_VERSION else None
    return split_payload(len(payload)) if prefix is None else cut_encoded(len(payload), split_payload(prefix.raw_bytes))


def cut_encoded(num_bytes: int, parts: tuple[slice, ...]) -> tuple[slice, ...]:
    """The same cuts in a payload of another length, as far as it goes; the last part has the rest."""
    cuts = [min(part.start, num_bytes) for part in parts]
    return tuple(slice(start, end) for start, end in zip(cuts, [*cuts[1:], num_bytes], strict=True))


@dataclass(frozen=True, slots=True)
class BlockValues:
    """Keys and commands of one layout's blocks."""

    key_prefix: bytes
    parts: tuple[slice, ...]
    key_suffix: bytes = b""

    @classmethod
    def of(cls, namespace: str, layout: KVLayout, fingerprint_at_rest: bytes = b"", *, is_cluster: bool = False) -> BlockValues:
        """For a layout, under a namespace that separates stores on one server."""
        prefix = f"{namespace}:{KEY_VERSION}:{(fingerprint_at_rest or layout.fingerprint).hex()}:".encode()
        before, after = HASH_TAG if is_cluster else (b"", b"")
        return cls(prefix + before, split_payload(layout.block_bytes), after)

    @property
    def block_bytes(self) -> int:
        """Of a block as it is in the pool."""
        num_bytes: int = self.parts[-1].stop
        return num_bytes

    @property
    def num_parts(self) -> int:
        """Values per block."""
        return len(self.parts)

    def keys(self, block_hash: bytes) -> list[bytes]:
        """A block's keys, one per part."""
        key = self.key_prefix + block_hash.hex().encode() + self.key_suffix
        return [key] if len(self.parts) == 1 else [key, *(b"%b:%d" % (key, number) for number in range(1, len(self.parts)))]

    def exists(self, block_hash: bytes) -> bytes:
        """A command whose reply is num_parts when the block is there."""
        return pack_command(b"EXISTS", *self.keys(block_hash))

    def expire(self, block_hash: bytes, expiry_ms: int) -> bytes:
        """num_parts commands that move a block's expiry; a reply of 0 means that this part is not there."""
        moment = b"%d" % expiry_ms
        command = b"*3\r\n$9\r\nPEXPIREAT\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n"  # pack_command takes four times as long
        return b"".join(command % (len(key), key, len(moment), moment) for key in self.keys(block_hash))

    def get(self, block_hash: bytes) -> bytes:
        """num_parts commands that get a block's values."""
        return b"".join(pack_command(b"GET", key) for key in self.keys(block_hash))

    def delete(self, block_hash: bytes) -> bytes:
        """A command that removes a block, whatever its keys hold; its reply is the number of parts that were there."""
        return pack_command(b"UNLINK", *self.keys(block_hash))

    def set(self, block_hash: bytes, header: bytes, payload: memoryview, lifetime_ms: int) -> list[bytes | memoryview]:
        """num_parts commands that store a block, as it is at rest, as pieces to be sent one after the other.

        The value is the last argument: what follows one costs the server another read (a quarter more CPU in all, measured).
        """
        lifetime = b"%d" % lifetime_ms
        pieces: list[bytes | memoryview] = []
        parts = self.parts if len(payload) == self.block_bytes else cut_encoded(len(payload), self.parts)
        for key, part in zip(self.keys(block_hash), parts, strict=True):
            view = payload[part]
            command = b"*4\r\n$6\r\nPSETEX\r\n$%d\r\n%b\r\n$%d\r\n%b\r\n" % (len(key), key, len(lifetime), lifetime)
            pieces += [b"%b$%d\r\n%b" % (command, len(header) + len(view), header), view, b"\r\n"]
            header = b""
        return pieces
