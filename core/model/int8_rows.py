"""Rows of floats as whole numbers from -127 to 127 and one scale each: of weights, of their inputs, and of K and V."""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127.0


def quantize_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """(int8 numbers [..., columns], float32 scale [..., 1]) of values [..., columns]; numbers * scale is near the values.

    A row's greatest magnitude becomes 127. A row that is not finite has a scale that is not, and so spoils only itself.
    """
    exact = values.float()
    scale = exact.abs().amax(-1, keepdim=True) / INT8_MAX
    numbers = (exact / torch.where(scale == 0, 1.0, scale)).round_().nan_to_num_(0.0).clamp_(-INT8_MAX, INT8_MAX)
    return numbers.to(torch.int8), scale
