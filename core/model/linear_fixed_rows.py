"""A projection that is always computed for the same number of rows: so no library can choose another kernel for another batch.

For devices on which a matrix product's kernel, and with it the order of its additions, follows from the number of rows. Costs
padding in small batches and several calls in large ones.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from core.model.linear import Linear

FIXED_ROWS = 128


class FixedRowsLinear(Linear):
    """torch's own product, FIXED_ROWS rows at a time. weight: [num_outputs, num_inputs]; bias: [num_outputs] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, inputs: Tensor) -> Tensor:
        num_rows = inputs.shape[0]
        padded = functional.pad(inputs, (0, 0, 0, -num_rows % FIXED_ROWS))
        outputs = [functional.linear(part, self._weight, self._bias) for part in torch.split(padded, FIXED_ROWS)]
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:num_rows]


def make_fixed_rows_linear(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
    """core.model.linear.MakeLinear."""
    return FixedRowsLinear(weight, bias)
