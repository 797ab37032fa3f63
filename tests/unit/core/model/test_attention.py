"""Every attention backend on the CPU beside the formula, with windows and soft caps; and a row's bits in any company."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from core.model.attention import AttentionBackend
from core.model.attention_native import NativeAttention
from core.model.attention_torch import TorchAttention
from core.model.native.build import load_native
from core.model.native_linear import NATIVE_DTYPES
from tests.unit.core.model.attention_steps import Pool, Shape, exact_attention, same_bits

SHAPES = {
    "grouped": Shape(9, 3, 64),
    "odd": Shape(5, 5, 20, block_size=8),
    "wide_group": Shape(16, 2, 32, block_size=32),
    "window": Shape(4, 2, 32, sliding_window=100),
    "narrow_window": Shape(4, 2, 16, sliding_window=5),
    "soft_cap": Shape(4, 2, 48, soft_cap=3.0),
    "window_and_soft_cap": Shape(6, 2, 64, sliding_window=300, soft_cap=5.0),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
MakeBackend = Callable[[Shape], AttentionBackend]


def _torch_attention(shape: Shape) -> AttentionBackend:
    return TorchAttention(shape.block_size, shape.num_heads, shape.num_kv_heads)


def _native_attention(shape: Shape) -> AttentionBackend:
    native = load_native()
    assert native is not None, "these tests need a C++ compiler"
    return NativeAttention(native, shape.block_size)


BACKENDS: dict[str, MakeBackend] = {"torch": _torch_attention, "native": _native_attention}
CASES = [
    pytest.param(backend, shape, dtype, id=f"{backend}-{shape}-{dtype}")
    for backend in BACKENDS
    for shape in SHAPES
    for dtype in TOLERANCE
    if backend == "torch" or dtype in NATIVE_DTYPES
]


@pytest.mark.parametrize(("backend", "shape", "dtype"), CASES)
def test_attention_as_the_formula(backend: str, shape: str, dtype: torch.dtype) -> None:
    pool = Pool(SHAPES[shape], dtype)
    attention = BACKENDS[backend](SHAPES[shape])
    for length in (1, 63, 700):
        rows = pool.add(length, seed=1)
        found = pool.compute_alone(attention, rows, chunk=699)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(found.double(), exact_attention(rows, SHAPES[shape]), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("backend", "shape", "dtype"), CASES)
def test_attention_any_batch_chunks_blocks_and_threads_same_bits(backend: str, shape: str, dtype: torch.dtype) -> None:
    rng = random.Random(shape)
    lengths = [1, 40, 64, 65, 300, 513, 620]
    whole = Pool(SHAPES[shape], dtype, seed=1)
    attention = BACKENDS[backend](SHAPES[shape])
    expected = [whole.compute_alone(attention, whole.add(length, seed=2), 10_000) for length in lengths]
    pool = Pool(SHAPES[shape], dtype, num_blocks=400, seed=3)
    sequences = [pool.add(length, seed=2) for length in lengths]
    found: list[list[torch.Tensor]] = [[] for _ in lengths]
    while running := [i for i, rows in enumerate(sequences) if rows.num_left]:
        torch.set_num_threads(rng.choice((1, 2)))
        members = rng.sample(running, rng.randint(1, len(running)))
        shares = [(sequences[i], min(sequences[i].num_left, rng.choice((1, 1, 2, 37, 100, 300)))) for i in members]
        for i, output in zip(members, pool.step(attention, shares, num_padding_rows=rng.choice((0, 3))), strict=True):
            found[i].append(output)
    for length, parts, whole_output in zip(lengths, found, expected, strict=True):
        assert same_bits(torch.cat(parts), whole_output), f"sequence of {length}"
