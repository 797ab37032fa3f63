"""A projection of the model: inputs @ weight.T + bias, kept in whatever form a backend multiplies best.

The model calls it and knows no more. Which kind is made is decided once, at load (MakeLinear).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

# A matrix product gives a row the same bits among any multiple of 8 rows, in float32, bfloat16 and float16 and with any number
# of threads, but not alone or among 1, 2, 3, 5, 7 or 9 (measured on x86 with MKL and oneDNN; the tests repeat it).
ROW_MULTIPLE = 8


def padded_num_rows(num_rows: int) -> int:
    """How many rows a batch of num_rows must be padded to, so that no row's bits depend on the batch's size."""
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


class Linear(ABC):
    """One projection. num_inputs, num_outputs: of a row. A row's bits do not depend on which other rows are in the call, as long
    as the number of rows is a multiple of ROW_MULTIPLE.
    """

    num_inputs: int
    num_outputs: int

    @abstractmethod
    def __call__(self, inputs: Tensor) -> Tensor:
        """[num_rows, num_outputs] of inputs' dtype, for inputs [num_rows, num_inputs]. Any thread, one at a time."""


class TorchLinear(Linear):
    """torch's own product. weight: [num_outputs, num_inputs]; bias: [num_outputs] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self._weight, self._bias)


# (name in the checkout of the model, such as "model.layers.3.self_attn.qkv_proj" or "lm_head"; weight; bias) -> the projection
MakeLinear = Callable[[str, Tensor, Tensor | None], Linear]


def make_torch_linear(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    """MakeLinear of the plain backend."""
    return TorchLinear(weight, bias)
