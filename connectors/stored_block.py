"""A block at rest or on the wire: a 64-byte header, then the payload.

Every store that keeps bytes uses these two functions, so that what one reader calls intact is intact for all. Bad bytes are
an outcome here, never an exception: they cost a recompute.
"""

from __future__ import annotations

import enum
import struct

import xxhash

Payload = bytes | bytearray | memoryview

# | magic 4 | version 2 | header bytes 2 | layout fingerprint 16 | block hash 16 | payload bytes 8 | payload xxh3_64 8 |
# and then the xxh3_64 of these 56 bytes.
_FIELDS = struct.Struct("<4sHH16s16sQQ")
_CHECKSUM = struct.Struct("<Q")
BLOCK_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MAGIC = b"KVRB"
_VERSION = 1
_NEVER_WRITTEN = bytes(BLOCK_HEADER_BYTES)


class BlockCheck(enum.Enum):
    """What a reader may conclude from the bytes it copied."""

    OK = "ok"
    MISS = "miss"  # an intact header of another block or layout, or a place that was never written
    CORRUPT = "corrupt"  # neither


def pack_block_header(layout_fingerprint: bytes, block_hash: bytes, payload: Payload) -> bytes:
    """The BLOCK_HEADER_BYTES bytes that go before `payload`, which is of bytes. Both names are 16 bytes.

    Lets go of the GIL while it reads a large payload.
    """
    fields = _FIELDS.pack(
        _MAGIC, _VERSION, BLOCK_HEADER_BYTES, layout_fingerprint, block_hash, len(payload), xxhash.xxh3_64_intdigest(payload)
    )
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))


def check_block(
    header: bytes, payload: Payload, layout_fingerprint: bytes, block_hash: bytes, payload_checksum: int | None = None
) -> BlockCheck:
    """Whether header and payload are what was stored under block_hash. Both must be the reader's own copy, because a store
    may recycle the place at any moment; a header of the wrong length is CORRUPT. payload_checksum: the payload's xxh3_64, if the
    reader has computed it while the bytes came."""
    if len(header) != BLOCK_HEADER_BYTES:
        return BlockCheck.CORRUPT
    if header == _NEVER_WRITTEN:
        return BlockCheck.MISS
    fields = header[: _FIELDS.size]
    if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
        return BlockCheck.CORRUPT
    magic, version, header_bytes, stored_fingerprint, stored_hash, payload_bytes, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or version != _VERSION or header_bytes != BLOCK_HEADER_BYTES:
        return BlockCheck.CORRUPT
    if stored_fingerprint != layout_fingerprint or stored_hash != block_hash:
        return BlockCheck.MISS
    if payload_checksum is None:
        payload_checksum = xxhash.xxh3_64_intdigest(payload)
    if payload_bytes != len(payload) or checksum != payload_checksum:
        return BlockCheck.CORRUPT
    return BlockCheck.OK
