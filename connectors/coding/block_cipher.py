"""AES-256-GCM for blocks at rest, by the `cryptography` package, which is imported here alone and only when it was chosen.

Each block has a key of its own, HMAC-SHA-256 of the store's key over the block's names, and each write a random nonce of 96
bits. So a repeated nonce could matter only among writes of the same block, which all encrypt the same tokens' KV. Under one
key for all, 2^32 writes by all processes together would be the limit, and processes that share a key cannot share a counter.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from connectors.coding.coded_payload import KEY_ID_BYTES
from core.errors import ConfigError

KEY_BYTES = 32
TAG_BYTES = 16
_KEY_ID_TAG = b"kvrelay store key id 1"
_BLOCK_KEY_TAG = b"kvrelay block key 1"
FIELD = "connector.options.encryption_key_file"


class BlockCipher:
    """One key. Any thread. key_id says which, and nothing else of it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.key_id = hmac.digest(key, _KEY_ID_TAG, hashlib.sha256)[:KEY_ID_BYTES]

    def encrypt(self, names: bytes, body: bytes, authenticated: bytes, nonce: bytes) -> bytes:
        """Ciphertext and tag. names: of layout and block; authenticated: what stays open and must not be changed."""
        return AESGCM(self._key_of(names)).encrypt(nonce, body, authenticated + names)

    def decrypt(self, names: bytes, body: memoryview, authenticated: bytes, nonce: bytes) -> bytes | None:
        """None when anything of it is not what was encrypted."""
        if len(body) < TAG_BYTES:
            return None
        try:
            return AESGCM(self._key_of(names)).decrypt(nonce, body, authenticated + names)
        except InvalidTag:
            return None

    def _key_of(self, names: bytes) -> bytes:
        return hmac.digest(self._key, _BLOCK_KEY_TAG + names, hashlib.sha256)


def load_cipher(path: str) -> BlockCipher:
    """The key in a file made by `kvrelay keys store`. Raises ConfigError, in which nothing of it is shown."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(KEY_BYTES + 1)
    except OSError as error:
        raise ConfigError(FIELD, path, f"a readable file made by `kvrelay keys store FILE` ({error.strerror})") from error
    if len(key) != KEY_BYTES:
        raise ConfigError(FIELD, path, f"a file of {KEY_BYTES} bytes, made by `kvrelay keys store FILE`")
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(FIELD, path, f"a file that its owner alone may read: chmod 600 {path}")
    return BlockCipher(key)
