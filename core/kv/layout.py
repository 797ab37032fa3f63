"""Shape of one KV block in memory, and the fingerprint under which its bytes may be exchanged.

A pool is block-major, [num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]: K and V of all layers of one block are
contiguous, so that a connector moves one range per block. In int8 each head's numbers of a token are followed by their scale.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

PAGE_BYTES = 4096
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
FLOAT_DTYPES = ("float32", "bfloat16", "float16")  # the others are numbers of 8 bits, which not everybody can read
SCALE_BYTES = {"int8": 4}  # of a token's K or V of one head: a float32, behind its numbers


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One block: [num_layers, 2, block_size, num_kv_heads, head_dim] of `dtype`. block_size is in tokens.

    dtype: one of DTYPE_BYTES. fp8 is E4M3 without infinities, int8 is a number from -127 to 127 to be multiplied by its scale.
    """

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def head_bytes(self) -> int:
        """Of one token's K or V of one head, with its scale."""
        return self.head_dim * DTYPE_BYTES[self.dtype] + SCALE_BYTES.get(self.dtype, 0)

    @property
    def block_bytes(self) -> int:
        """Payload of one block in bytes."""
        return self.num_layers * 2 * self.block_size * self.num_kv_heads * self.head_bytes

    @property
    def block_stride_bytes(self) -> int:
        """Distance of two blocks in the pool in bytes: payload rounded up to a page, so that direct I/O can target it."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning of a block's bytes differs."""
        scale = "|scale=float32 behind each head" if self.dtype in SCALE_BYTES else ""
        text = (
            f"kvrelay layout 1|layers={self.num_layers}|block_size={self.block_size}|kv_heads={self.num_kv_heads}"
            f"|head_dim={self.head_dim}|dtype={self.dtype}|order=layer,kv,token,head,dim|endian=little{scale}"
        )
        return hashlib.sha256(text.encode()).digest()[:16]
