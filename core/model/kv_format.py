"""How K and V become what the pool holds, and float32 again: as they are, or as numbers of 8 bits.

Each token's numbers of one head are encoded by themselves, so that what a block holds does not depend on how it was filled. The
attention backend calls this when it writes and when it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.kv.layout import FLOAT_DTYPES, SCALE_BYTES, KVLayout
from core.model.int8_rows import quantize_rows

FP8_MAX = 448.0
_SCALE_BYTES = SCALE_BYTES["int8"]


class KVFormat:
    """Floats, stored in the pool's own dtype. stored_dim: the last dimension of the pool's views."""

    def head_dim(self, stored_dim: int) -> int:
        """Numbers of a head, from how many elements hold them."""
        return stored_dim

    def encode(self, values: Tensor) -> Tensor:
        """values, [num_tokens, num_kv_heads, head_dim] of any floating dtype, as [..., stored_dim] for the pool to take."""
        return values

    def decode(self, stored: Tensor, target: Tensor) -> None:
        """Fill target, float32, from stored, which may be strided; all dimensions but the last are equal."""
        target.copy_(stored)


class Fp8Format(KVFormat):
    """E4M3 without a scale: what is beyond 448 becomes 448. Pool views are uint8, since torch indexes no float8."""

    def encode(self, values: Tensor) -> Tensor:
        return values.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8)

    def decode(self, stored: Tensor, target: Tensor) -> None:
        target.copy_(stored.view(torch.float8_e4m3fn))


class Int8Format(KVFormat):
    """A head's numbers of a token as int8, then their scale as float32: the greatest magnitude becomes 127.

    Numbers that are not finite leave a scale that is not, and so come back as NaN, all of that head's.
    """

    def head_dim(self, stored_dim: int) -> int:
        return stored_dim - _SCALE_BYTES

    def encode(self, values: Tensor) -> Tensor:
        numbers, scale = quantize_rows(values)
        return torch.cat((numbers.view(torch.uint8), scale.view(torch.uint8)), -1)

    def decode(self, stored: Tensor, target: Tensor) -> None:
        head_dim = target.shape[-1]
        target.copy_(stored[..., :head_dim].view(torch.int8))
        target.mul_(stored[..., head_dim:].contiguous().view(torch.float32))


def kv_format_of(layout: KVLayout) -> KVFormat:
    """The format of a layout's dtype."""
    if layout.dtype in FLOAT_DTYPES:
        return KVFormat()
    return {"fp8": Fp8Format, "int8": Int8Format}[layout.dtype]()
