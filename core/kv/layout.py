"""Shape of one KV block in memory, and the fingerprint under which its bytes may be exchanged.

A pool is block-major, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: K and V of all layers of one block are
contiguous, so that a connector moves one range per block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PAGE_BYTES = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block: [num_layers, 2, block_size, num_kv_heads, head_dim] of `dtype`. block_size is in tokens."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def block_bytes(self) -> int:
        """Payload of one block in bytes."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_stride_bytes(self) -> int:
        """Distance of two blocks in the pool in bytes: payload rounded up to a page, so that direct I/O can target it."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning of a block's bytes differs."""
        text = (
            f"kvrelay layout 1|layers={self.num_layers}|block_size={self.block_size}|kv_heads={self.num_kv_heads}"
            f"|head_dim={self.head_dim}|dtype={self.dtype}|order=layer,kv,token,head,dim|endian=little"
        )
        return hashlib.sha256(text.encode()).digest()[:16]
