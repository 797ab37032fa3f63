"""How a connector's blocks are at rest: as they are in the pool (the default, without a copy), or encoded, encrypted, or both.

Blocks of a lossy codec, and encrypted ones, have another layout fingerprint at rest, so that no reader takes a lossy block for an
exact one, or one that anybody could have written for an authenticated one. Exact blocks are read by all, whatever they write.
"""

from __future__ import annotations

import enum
import hashlib
import importlib
import logging
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import xxhash

from connectors.coding.codec import Codec, RawCodec
from connectors.coding.coded_payload import (
    AES_256_GCM,
    CHECKSUM,
    NO_CIPHER,
    NONCE_BYTES,
    PREFIX_BYTES,
    CodedPrefix,
    read_prefix,
)
from connectors.coding.quantized import Fp8Codec, Int8Codec
from connectors.slots.store import StoredLayout
from connectors.stored_block import (
    CODED_VERSION,
    PLAIN_VERSION,
    BlockCheck,
    Payload,
    check_block,
    pack_block_header,
    read_block_header,
)
from core.errors import ConfigError
from core.kv.layout import FLOAT_DTYPES, KVLayout

logger = logging.getLogger(__name__)

CODECS = ("none", "zstd", "int8", "fp8")
SLOT_CODECS = ("none", "int8", "fp8")  # slots are of equal size: one that shrinks some blocks would save no room there
_CIPHER_MODULE = "connectors.coding.block_cipher"
_ZSTD_MODULE = "connectors.coding.zstd"
_ZSTD_NUMBER = 1
_TAG_BYTES = 16


class Cipher(Protocol):
    """See block_cipher.BlockCipher."""

    key_id: bytes

    def encrypt(self, names: bytes, body: bytes, authenticated: bytes, nonce: bytes) -> bytes:
        """Ciphertext and tag."""

    def decrypt(self, names: bytes, body: memoryview, authenticated: bytes, nonce: bytes) -> bytes | None:
        """None when anything of it is not what was encrypted."""


@dataclass(frozen=True, slots=True)
class CodingOptions:
    """Checked when a connector is made. codec: one of CODECS. codec_level: of zstd. encryption_key_file "": not encrypted."""

    codec: str = "none"
    codec_level: int = 1
    encryption_key_file: str = ""

    def check(self, codecs: tuple[str, ...] = CODECS) -> CodingOptions:
        """Itself. Raises ConfigError: for a value that is not allowed, a library that is missing, a key that cannot be used."""
        if self.codec not in codecs:
            why = (
                "" if self.codec not in CODECS else " (slots are of equal size, so that zstd would save nothing; it is for redis)"
            )
            raise ConfigError("connector.options.codec", self.codec, f"one of {', '.join(codecs)}{why}")
        if not 1 <= self.codec_level <= 19:
            raise ConfigError("connector.options.codec_level", self.codec_level, "1 (fast) to 19 (small)")
        if self.codec == "zstd":
            _import_for("connector.options.codec", self.codec, _ZSTD_MODULE, "kvrelay[zstd]")
        self.load_cipher()
        return self

    def coding_for(self, layout: KVLayout) -> BlockCoding:
        """Raises ConfigError for a key file that cannot be used, and for a codec of floats where the layout has 8-bit numbers."""
        if self.codec != "none" and layout.dtype not in FLOAT_DTYPES:
            allowed = f"none where model.kv_cache_dtype is {layout.dtype}: codecs are for floats, and these have 8 bits already"
            raise ConfigError("connector.options.codec", self.codec, allowed)
        codec: Codec | None = None
        if self.codec == "zstd":
            codec = _zstd_codec(layout.dtype, self.codec_level)
        elif self.codec != "none":
            codec = (Int8Codec if self.codec == "int8" else Fp8Codec)(layout)
        return BlockCoding(layout, codec, self.load_cipher())

    def load_cipher(self) -> Cipher | None:
        """None where nothing is encrypted. Raises ConfigError."""
        path = self.encryption_key_file
        if not path:
            return None
        module = _import_for(
            "connector.options.encryption_key_file", path, "connectors.coding.block_cipher", "kvrelay[encryption]"
        )
        cipher: Cipher = module.load_cipher(path)
        return cipher


class BlockCoding:
    """Between blocks of one KV layout and what is at rest. Any thread.

    fingerprint: at rest, the layout's own for exact blocks that are not encrypted. max_bytes: the longest payload at rest; where
    the codec's length is fixed, that of every block. is_plain: payloads at rest are the pool's bytes, which may move uncopied.
    complaint: why an intact block could not be read, when that last happened.
    """

    def __init__(self, layout: KVLayout, codec: Codec | None = None, cipher: Cipher | None = None) -> None:
        self.block_bytes = layout.block_bytes
        self.is_plain = codec is None and cipher is None
        self.complaint = ""
        self._codec = codec or RawCodec(layout.block_bytes)
        self._raw_codec = RawCodec(layout.block_bytes)
        self._cipher = cipher
        self._dtype = layout.dtype
        self.fingerprint = _fingerprint_at_rest(layout, self._codec, is_encrypted=cipher is not None)
        body_bytes = CHECKSUM.size + (self._codec.encoded_bytes or layout.block_bytes)
        self.max_bytes = layout.block_bytes if self.is_plain else PREFIX_BYTES + body_bytes + (_TAG_BYTES if cipher else 0)

    @property
    def slot_layout(self) -> StoredLayout:
        """For a store of equal slots: of codecs whose length is fixed."""
        return StoredLayout(self.fingerprint, self.max_bytes)

    def seal(self, block_hash: bytes, payload: memoryview) -> tuple[bytes, Payload] | None:
        """Header and payload at rest of a block in the pool; None for one that the codec cannot hold (not finite).

        The payload may be the pool's own bytes.
        """
        encoded = None if self.is_plain else self._codec.encode(payload)
        codec = self._codec
        if encoded is None:
            if codec.is_lossy:
                return None
            if self._cipher is None:
                return pack_block_header(self.fingerprint, block_hash, payload), payload
            codec, encoded = self._raw_codec, payload
        checksum = CHECKSUM.pack(0 if codec.is_lossy else xxhash.xxh3_64_intdigest(payload))
        if self._cipher is None:
            at_rest = b"".join((CodedPrefix(codec.number, len(payload)).pack(), checksum, encoded))
        else:
            nonce = os.urandom(NONCE_BYTES)
            prefix = CodedPrefix(codec.number, len(payload), AES_256_GCM, self._cipher.key_id, nonce).pack()
            at_rest = prefix + self._cipher.encrypt(self.fingerprint + block_hash, b"".join((checksum, encoded)), prefix, nonce)
        return pack_block_header(self.fingerprint, block_hash, at_rest, CODED_VERSION), at_rest

    def unseal(self, header: bytes, at_rest: memoryview, block_hash: bytes, target: memoryview) -> BlockCheck:
        """Verify a block's own copy and put it into target, of block_bytes bytes, which may hold anything unless this is OK.

        UNREADABLE, with `complaint`: intact, but encrypted with another key, or of a codec that cannot be had here.
        """
        found = read_block_header(header)
        if found is not None and found.version == PLAIN_VERSION:
            if self._codec.is_lossy or self._cipher is not None:
                return BlockCheck.CORRUPT  # nobody writes such a block under these names
            check = check_block(header, at_rest, self.fingerprint, block_hash)
            return check if check is not BlockCheck.OK or self._raw_codec.decode(at_rest, target) else BlockCheck.CORRUPT
        check = check_block(header, at_rest, self.fingerprint, block_hash, CODED_VERSION)
        if check is not BlockCheck.OK:
            return check
        prefix = read_prefix(at_rest)
        if prefix is None or prefix.raw_bytes != len(target):
            return BlockCheck.CORRUPT
        return self._decode(prefix, at_rest, block_hash, target)

    def _decode(self, prefix: CodedPrefix, at_rest: memoryview, block_hash: bytes, target: memoryview) -> BlockCheck:
        body: Payload | None = at_rest[PREFIX_BYTES:]
        if (prefix.cipher == NO_CIPHER) != (self._cipher is None):
            return BlockCheck.CORRUPT  # the fingerprint says otherwise
        if self._cipher is not None:
            if prefix.key_id != self._cipher.key_id:
                return self._complain(f"it is encrypted with key {prefix.key_id.hex()}, ours is {self._cipher.key_id.hex()}")
            names, authenticated = self.fingerprint + block_hash, bytes(at_rest[:PREFIX_BYTES])
            body = self._cipher.decrypt(names, at_rest[PREFIX_BYTES:], authenticated, prefix.nonce)
        if body is None or len(body) < CHECKSUM.size:
            return BlockCheck.CORRUPT
        codec = self._codec_of(prefix.codec)
        if codec is None:
            return self._complain(f"codec {prefix.codec} is not known, or its library is not installed")
        view = memoryview(body)
        if codec.is_lossy != self._codec.is_lossy or not codec.decode(view[CHECKSUM.size :], target):
            return BlockCheck.CORRUPT
        (checksum,) = CHECKSUM.unpack_from(view)
        is_intact = codec.is_lossy or checksum == xxhash.xxh3_64_intdigest(target)
        return BlockCheck.OK if is_intact else BlockCheck.CORRUPT

    def _codec_of(self, number: int) -> Codec | None:
        for codec in (self._codec, self._raw_codec):
            if codec.number == number:
                return codec
        try:
            return _zstd_codec(self._dtype, 1) if number == _ZSTD_NUMBER else None
        except ImportError:
            return None

    def _complain(self, complaint: str) -> BlockCheck:
        if complaint != self.complaint:
            self.complaint = complaint
            logger.warning("a stored block is a miss: %s", complaint)
        return BlockCheck.UNREADABLE


def decoded_in_full(header: bytes, payload: bytes) -> tuple[bytes, bytes] | None:
    """The plain form of an intact block that is lossless and not encrypted, for those that cannot decode it; else None."""
    found, prefix = read_block_header(header), read_prefix(payload)
    if found is None or found.version != CODED_VERSION or prefix is None or prefix.cipher != NO_CIPHER:
        return None
    codec: Codec | None = RawCodec(prefix.raw_bytes) if prefix.codec == RawCodec.number else None
    if prefix.codec == _ZSTD_NUMBER:
        try:
            codec = _zstd_codec("float32", 1)
        except ImportError:
            return None
    target, view = bytearray(prefix.raw_bytes), memoryview(payload)[PREFIX_BYTES:]
    if codec is None or not codec.decode(view[CHECKSUM.size :], memoryview(target)):
        return None
    if CHECKSUM.unpack_from(view)[0] != xxhash.xxh3_64_intdigest(target):
        return None
    return pack_block_header(found.layout_fingerprint, found.block_hash, target), bytes(target)


class Encryption(enum.Enum):
    """What a key has to do with an intact block at rest."""

    NONE = "not encrypted"
    READABLE = "readable with the key"
    OTHER_KEY = "of another key"
    NO_KEY = "encrypted, and no key was given"
    FORGED = "of this key by name, and does not decrypt with it"


def judge_encryption(header: bytes, payload: bytes, cipher: Cipher | None) -> Encryption:
    """Of a block that is intact at rest; with its key it is decrypted."""
    found, prefix = read_block_header(header), read_prefix(payload)
    if found is None or found.version != CODED_VERSION or prefix is None or prefix.cipher == NO_CIPHER:
        return Encryption.NONE
    if cipher is None:
        return Encryption.NO_KEY
    if prefix.key_id != cipher.key_id:
        return Encryption.OTHER_KEY
    names, body = found.layout_fingerprint + found.block_hash, memoryview(payload)[PREFIX_BYTES:]
    plain = cipher.decrypt(names, body, bytes(payload[:PREFIX_BYTES]), prefix.nonce)
    return Encryption.FORGED if plain is None else Encryption.READABLE


def _fingerprint_at_rest(layout: KVLayout, codec: Codec, *, is_encrypted: bool) -> bytes:
    if not codec.is_lossy and not is_encrypted:
        return layout.fingerprint
    codec_name = codec.name if codec.is_lossy else "exact"
    text = f"kvrelay at rest 1|{layout.fingerprint.hex()}|{codec_name}|{'aes-256-gcm' if is_encrypted else 'open'}"
    return hashlib.sha256(text.encode()).digest()[:16]


def fingerprints_at_rest(layout: KVLayout) -> dict[bytes, str]:
    """What each form of a layout's blocks is called at rest, and how it is in words."""
    forms: list[tuple[Codec, str]] = [
        (RawCodec(layout.block_bytes), "exact"),
        (Int8Codec(layout), "int8"),
        (Fp8Codec(layout), "fp8"),
    ]
    return {
        _fingerprint_at_rest(layout, codec, is_encrypted=is_encrypted): f"{words}{', encrypted' if is_encrypted else ''}"
        for codec, words in forms
        for is_encrypted in (False, True)
    }


def _zstd_codec(dtype: str, level: int) -> Codec:
    """Raises ImportError."""
    codec: Codec = importlib.import_module(_ZSTD_MODULE).ZstdCodec(dtype, level)
    return codec


def _import_for(field: str, value: str, module: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(field, value, f"an option whose library is installed: pip install {extra} ({error})") from error
