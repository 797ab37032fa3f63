"""The payload of an encoded or encrypted block at rest: a prefix that says how, then the body.

| codec 1 | cipher 1 | zero 6 | bytes in the pool 8 | key id 8 | nonce 12 | zero 4 |   and the body:
| xxh3_64 of the block in the pool 8, 0 for a lossy codec | the encoded block |  as it is, or encrypted with a tag of 16 behind it

The block header in front of it (stored_block) names layout and hash, and has a checksum of prefix and body. The prefix is as
open as the header, and is authenticated by the cipher along with it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from connectors.stored_block import Payload

_PREFIX = struct.Struct("<BB6xQ8s12s4x")
PREFIX_BYTES = _PREFIX.size
CHECKSUM = struct.Struct("<Q")
KEY_ID_BYTES = 8
NONCE_BYTES = 12
MAX_RAW_BYTES = 2**30
NO_CIPHER, AES_256_GCM = 0, 1


@dataclass(frozen=True, slots=True)
class CodedPrefix:
    """codec: see the codecs' numbers. cipher: NO_CIPHER or AES_256_GCM. raw_bytes: of the block in the pool."""

    codec: int
    raw_bytes: int
    cipher: int = NO_CIPHER
    key_id: bytes = bytes(KEY_ID_BYTES)
    nonce: bytes = bytes(NONCE_BYTES)

    def pack(self) -> bytes:
        """PREFIX_BYTES bytes."""
        return _PREFIX.pack(self.codec, self.cipher, self.raw_bytes, self.key_id, self.nonce)


def read_prefix(payload: Payload) -> CodedPrefix | None:
    """The prefix of a payload; None when that is too short or says what no writer says."""
    if len(payload) < PREFIX_BYTES + CHECKSUM.size:
        return None
    codec, cipher, raw_bytes, key_id, nonce = _PREFIX.unpack_from(payload)
    prefix = CodedPrefix(codec, raw_bytes, cipher, key_id, nonce)
    is_same = prefix.pack() == bytes(payload[:PREFIX_BYTES])  # also of the bytes that are zero
    return prefix if is_same and cipher in (NO_CIPHER, AES_256_GCM) and 1 <= raw_bytes <= MAX_RAW_BYTES else None
