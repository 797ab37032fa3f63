"""Projections by this project's own CPU kernels (native/src/linear.cpp): weights packed once, each output one fp32 accumulator.

A row's bits are the same in any number of rows. bfloat16 and float32; other dtypes stay with torch.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.model.linear import Linear, MakeLinear, TorchLinear

CHUNK_BYTES = 2**24
ALIGNMENT_BYTES = 64
PANEL = 32  # outputs side by side in a packed weight; as in native/src/linear.h
NATIVE_DTYPES = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


class NativeLinear(Linear):
    """A packed weight. `packed` is what other kernels of the extension take; it refers to memory that this object keeps."""

    def __init__(self, native: Any, weight: Tensor, bias: Tensor | None = None, memory: HugePages | None = None) -> None:
        """native: the extension. weight: [num_outputs, num_inputs], of one of NATIVE_DTYPES; num_inputs is even.

        The weight is copied, to `memory` if that is given.
        """
        self.num_outputs, self.num_inputs = weight.shape
        self.dtype = weight.dtype
        self._native = native
        self._panels = pack(weight) if memory is None else memory.copy(pack(weight))
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self.packed = getattr(native, f"PackedWeight_{NATIVE_DTYPES[weight.dtype]}")(
            self._panels.data_ptr(), 0 if self._bias is None else self._bias.data_ptr(), self.num_inputs, self.num_outputs
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        return self._multiply(inputs, self.dtype)

    def in_float32(self, inputs: Tensor) -> Tensor:
        """The outputs as they are accumulated, not rounded to the weights' dtype: [num_rows, num_outputs] float32."""
        return self._multiply(inputs, torch.float32)

    def _multiply(self, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        inputs = inputs.contiguous()
        num_rows = inputs.shape[0]
        assert inputs.dtype == self.dtype and inputs.shape == (num_rows, self.num_inputs)
        outputs = torch.empty(num_rows, self.num_outputs, dtype=dtype)
        self._native.linear(self.packed, inputs.data_ptr(), outputs.data_ptr(), num_rows, dtype == torch.float32)
        return outputs


def pack(weight: Tensor) -> Tensor:
    """[num_outputs, num_inputs] as panels of PANEL outputs, in the order that native/src/linear.h says. A copy."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL)
    padded = functional.pad(weight, (0, 0, 0, num_panels * PANEL - num_outputs))
    if weight.dtype == torch.bfloat16:
        return padded.view(num_panels, PANEL, num_inputs // 2, 2).permute(0, 2, 1, 3).contiguous()
    return padded.view(num_panels, PANEL, num_inputs).permute(0, 2, 1).contiguous()


class HugePages:
    """Memory for weights, for which the kernel is asked for huge pages: a step reads every weight once, and with pages of 4 KiB a
    third of a single decode went into finding them.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def copy(self, values: Tensor) -> Tensor:
        """A contiguous copy there."""
        size = values.numel() * values.element_size()
        if self._memory is None or self._used + size > len(self._memory):
            self._memory = mmap.mmap(-1, max(CHUNK_BYTES, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._used = 0
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
        copy = torch.frombuffer(self._memory, dtype=values.dtype, count=values.numel(), offset=self._used).view(values.shape)
        self._used += -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return copy.copy_(values)


def native_linear_maker(native: Any) -> MakeLinear:
    """MakeLinear of the extension; weights that its kernels do not take stay with torch."""

    memory = HugePages()

    def make(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        if weight.dtype not in NATIVE_DTYPES or weight.device.type != "cpu" or weight.shape[1] % 2:
            return TorchLinear(weight, bias)
        return NativeLinear(native, weight, bias, memory)

    return make
