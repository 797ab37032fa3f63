"""A block at rest or on the wire: a 64-byte header, then the payload.

Every store that keeps bytes uses these functions, so that what one reader calls intact is intact for all. Bad bytes are an
outcome here, never an exception: they cost a recompute. What a payload of CODED_VERSION holds is block_coding's business.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

Payload = bytes | bytearray | memoryview

# | magic 4 | version 2 | header bytes 2 | layout fingerprint 16 | block hash 16 | payload bytes 8 | payload xxh3_64 8 |
# and then the xxh3_64 of these 56 bytes.
_FIELDS = struct.Struct("<4sHH16s16sQQ")
_CHECKSUM = struct.Struct("<Q")
BLOCK_HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_MAGIC = b"KVRB"
PLAIN_VERSION = 1  # the payload is the block as it is in the pool
CODED_VERSION = 2  # the payload begins with a prefix that says how the block is encoded and encrypted
_NEVER_WRITTEN = bytes(BLOCK_HEADER_BYTES)


class BlockCheck(enum.Enum):
    """What a reader may conclude from the bytes it copied."""

    OK = "ok"
    MISS = "miss"  # an intact header of another block or layout, or a place that was never written
    CORRUPT = "corrupt"  # neither
    UNREADABLE = "unreadable"  # intact, but encrypted with another key, or of a codec that is not there: a miss that says why


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What an intact header says. payload_bytes and checksum (xxh3_64) are of the payload at rest."""

    version: int
    layout_fingerprint: bytes
    block_hash: bytes
    payload_bytes: int
    checksum: int

    def matches(self, payload: Payload) -> bool:
        """Whether this is the payload that the header was written for."""
        return len(payload) == self.payload_bytes and xxhash.xxh3_64_intdigest(payload) == self.checksum


def pack_block_header(layout_fingerprint: bytes, block_hash: bytes, payload: Payload, version: int = PLAIN_VERSION) -> bytes:
    """The BLOCK_HEADER_BYTES bytes that go before `payload`, which is of bytes. Both names are 16 bytes.

    Lets go of the GIL while it reads a large payload.
    """
    return _pack(version, layout_fingerprint, block_hash, len(payload), xxhash.xxh3_64_intdigest(payload))


def read_block_header(header: bytes) -> BlockHeader | None:
    """What a header says; None when it is damaged, of another version, or was never written."""
    if len(header) != BLOCK_HEADER_BYTES:
        return None
    fields = header[: _FIELDS.size]
    if _CHECKSUM.unpack_from(header, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(fields):
        return None
    magic, version, header_bytes, fingerprint, block_hash, payload_bytes, checksum = _FIELDS.unpack(fields)
    if magic != _MAGIC or version not in (PLAIN_VERSION, CODED_VERSION) or header_bytes != BLOCK_HEADER_BYTES:
        return None
    return BlockHeader(version, fingerprint, block_hash, payload_bytes, checksum)


def check_block(
    header: bytes,
    payload: Payload,
    layout_fingerprint: bytes,
    block_hash: bytes,
    version: int = PLAIN_VERSION,
    *,
    payload_checksum: int | None = None,
) -> BlockCheck:
    """Whether header and payload are what was stored under block_hash. Both must be the reader's own copy, because a store
    may recycle the place at any moment; a header of the wrong length is CORRUPT. payload_checksum: the payload's xxh3_64, if the
    reader has computed it while the bytes came."""
    if payload_checksum is None:
        payload_checksum = xxhash.xxh3_64_intdigest(payload)
    if header == _pack(version, layout_fingerprint, block_hash, len(payload), payload_checksum):  # the quickest way to know
        return BlockCheck.OK
    if header == _NEVER_WRITTEN:
        return BlockCheck.MISS
    found = read_block_header(header)
    if found is None:
        return BlockCheck.CORRUPT
    is_wanted = (found.version, found.layout_fingerprint, found.block_hash) == (version, layout_fingerprint, block_hash)
    return BlockCheck.CORRUPT if is_wanted else BlockCheck.MISS


def _pack(version: int, layout_fingerprint: bytes, block_hash: bytes, payload_bytes: int, checksum: int) -> bytes:
    fields = _FIELDS.pack(_MAGIC, version, BLOCK_HEADER_BYTES, layout_fingerprint, block_hash, payload_bytes, checksum)
    return fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))
