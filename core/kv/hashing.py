"""Names of KV blocks: block_hash = H(parent_hash, token ids), the first parent seeded by a namespace.

SHA-256 truncated to 128 bits: a tenant must not be able to forge another's prefix, and a 32,000-token prompt costs about a
millisecond. The local cache, every store, KV events and the router use these functions and no others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

HASH_BYTES = 16
_NAMESPACE_TAG = b"kvrelay namespace 1"


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything besides tokens that decides what a block holds.

    model_fingerprint: content identity of the weights (not a path). layout_fingerprint: KVLayout.fingerprint.
    """

    model_fingerprint: bytes
    layout_fingerprint: bytes
    block_size: int

    def root_hash(self, cache_salt: str = "", adapter_fingerprint: bytes = b"") -> bytes:
        """Parent of a request's first block. Parts are length-tagged, so that no two combinations can collide."""
        digest = sha256(_NAMESPACE_TAG)
        for tag, part in (
            (b"model", self.model_fingerprint),
            (b"layout", self.layout_fingerprint),
            (b"block_size", str(self.block_size).encode()),
            (b"salt", cache_salt.encode()),
            (b"adapter", adapter_fingerprint),
        ):
            digest.update(b"%b=%d:" % (tag, len(part)))
            digest.update(part)
        return digest.digest()[:HASH_BYTES]


def extend_block_hashes(block_hashes: list[bytes], token_ids: Sequence[int], block_size: int, root_hash: bytes) -> None:
    """Append the hashes of all full blocks of `token_ids` that `block_hashes` lacks, in place.

    block_hashes must be the hashes of the leading blocks of the same tokens under the same root.
    """
    first = len(block_hashes) * block_size
    last = len(token_ids) // block_size * block_size
    if first >= last:
        return
    packed = pack_token_ids(token_ids[first:last])
    parent = block_hashes[-1] if block_hashes else root_hash
    step = block_size * 4
    for start in range(0, len(packed), step):
        parent = sha256(parent + packed[start : start + step]).digest()[:HASH_BYTES]
        block_hashes.append(parent)


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32, the form that is hashed. Raises OverflowError beyond 31 bits."""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)  # in half the time of array.array
    except struct.error as error:
        raise OverflowError(str(error)) from None
