"""The activations of feed-forwards, by functions whose result for an element depends on nothing but the element.

torch's own silu and gelu compute the end of each thread's range by scalar code with other roundings, so that an element's bits
depend on the number of rows and threads; its exp, tanh and erf are the same for every element (see test_row_bits.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

FEED_FORWARD_ROWS = 128  # rows whose activations are worked on at a time, so that their float32 copies stay in the cache

Activation = Callable[[Tensor], Tensor]


def silu(values: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, rounded once to values' dtype."""
    exact = values.float()
    return (exact / exact.neg().exp_().add_(1.0)).to(values.dtype)


def gelu_tanh(values: Tensor) -> Tensor:
    """x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) in float32, rounded once to values' dtype.

    https://arxiv.org/abs/1606.08415.
    """
    exact = values.float()
    inner = (exact * exact * exact).mul_(0.044715).add_(exact).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1.0).mul_(exact).mul_(0.5).to(values.dtype)


def gelu(values: Tensor) -> Tensor:
    """x / 2 * (1 + erf(x / sqrt(2))) in float32, rounded once to values' dtype."""
    exact = values.float()
    return (exact / math.sqrt(2)).erf_().add_(1.0).mul_(exact).mul_(0.5).to(values.dtype)


ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_tanh": gelu_tanh}  # by ModelArchitecture.activation


def gate_and_up(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up (https://arxiv.org/abs/2002.05202): [num_rows, intermediate] of [num_rows, 2 * intermediate]."""
    gate, up = gate_up.chunk(2, dim=-1)
    activated = torch.empty_like(gate, memory_format=torch.contiguous_format)
    for rows in range(0, gate.shape[0], FEED_FORWARD_ROWS):
        part = slice(rows, rows + FEED_FORWARD_ROWS)
        activated[part] = activation(gate[part]).mul_(up[part])
    return activated


def soft_cap(values: Tensor, cap: float) -> Tensor:
    """cap * tanh(values / cap) in float32, rounded once to values' dtype: nearly the identity far below cap, never above it."""
    return (values.float() / cap).tanh_().mul_(cap).to(values.dtype)
