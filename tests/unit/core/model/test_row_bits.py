"""The measured facts that batch invariance rests on: which operations give a row the same bits among any number of rows.

If one of these fails on a new machine or torch version, ROW_MULTIPLE or the operation must change.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.model import activations, attention_torch, linear

THREADS = (1, 2, 4)
SMOLLM2_MATRICES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]


def assert_rows_keep_their_bits(run: Callable[[Tensor], Tensor], rows: Tensor, counts: list[int]) -> None:
    expected = run(rows)
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for count in counts:
            for start in {0, min(5, len(rows) - count)}:
                found = run(rows[start : start + count].clone())
                assert torch.equal(found, expected[start : start + count]), f"{count} rows from {start}, {num_threads} threads"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [*SMOLLM2_MATRICES, (96, 160), (100, 344), (2048, 1024)])
def test_linear_multiples_of_eight_rows_same_bits(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = (torch.randn(num_outputs, num_inputs) * 0.05).to(dtype)
    rows = torch.randn(64 if num_outputs > 10_000 else 264, num_inputs).to(dtype)
    counts = [8, 32] if num_outputs > 10_000 else [8, 16, 24, 56, 104, 256]
    assert all(linear.padded_num_rows(count) == count for count in counts)
    assert_rows_keep_their_bits(lambda part: functional.linear(part, weight), rows, counts)


def test_batched_products_any_batch_and_multiple_of_eight_rows_same_bits() -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(3, 256, 64), torch.randn(3, 256, 64)
    queries, weights = torch.randn(3, 384, 64), torch.rand(3, 384, 256)
    scores, sums = torch.bmm(queries, keys.transpose(1, 2)), torch.bmm(weights, values)
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for num_rows in (8, 16, 40, 200):
            assert num_rows % attention_torch.ROW_MULTIPLE == 0
            assert torch.equal(torch.bmm(queries[:, -num_rows:], keys.transpose(1, 2)), scores[:, -num_rows:])
            assert torch.equal(torch.bmm(weights[:, -num_rows:], values), sums[:, -num_rows:])
        for batch in (1, 2, 33):  # decoding: many requests' heads in one product
            many = torch.bmm(queries[:1, :8].expand(batch, -1, -1), keys[:1].expand(batch, -1, -1).transpose(1, 2))
            assert torch.equal(many, scores[:1, :8].expand(batch, -1, -1))
        for start, num_rows in ((5, 8), (131, 96), (250, 128)):  # rows that share a tile with others: any place, any neighbours
            rows = slice(start, start + num_rows)
            assert torch.equal(torch.bmm(queries[:, rows], keys.transpose(1, 2)), scores[:, rows])
            assert torch.equal(torch.bmm(weights[:, rows], values), sums[:, rows])


def test_softmax_steps_on_some_rows_of_a_product_same_bits_as_on_all() -> None:
    torch.manual_seed(0)
    scores = torch.randn(12, 8, 256)
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for num_rows in (1, 3, 5):
            some = scores.clone()[:, :num_rows]
            assert torch.equal(some.amax(-1), scores.amax(-1)[:, :num_rows])
            assert torch.equal(some.exp_(), scores.exp()[:, :num_rows])
            assert torch.equal(some.sum(-1), scores.exp().sum(-1)[:, :num_rows])


@pytest.mark.parametrize("width", [576, 1536, 1000, 100])
def test_elementwise_and_row_sums_any_number_of_rows_same_bits(width: int) -> None:
    torch.manual_seed(0)
    rows = torch.randn(300, width)
    counts = [1, 2, 3, 7, 8, 31, 257]
    for elementwise in (activations.silu, activations.gelu, activations.gelu_tanh, torch.exp, torch.tanh):
        assert_rows_keep_their_bits(elementwise, rows, counts)
    assert_rows_keep_their_bits(lambda part: activations.soft_cap(part, 3.0), rows, counts)
    assert_rows_keep_their_bits(lambda part: part.softmax(-1).topk(8).values, rows, counts)
    assert_rows_keep_their_bits(lambda part: part.sum(-1), rows, counts)
    weight = torch.randn(width)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_rows_keep_their_bits(
            lambda part: functional.rms_norm(part, (width,), weight.to(part.dtype), 1e-5), rows.to(dtype), counts
        )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (activations.silu, functional.silu),
        (activations.gelu, functional.gelu),
        (activations.gelu_tanh, lambda values: functional.gelu(values, approximate="tanh")),
    ],
)
def test_activation_equals_torch_within_rounding(ours: Callable[[Tensor], Tensor], theirs: Callable[[Tensor], Tensor]) -> None:
    values = torch.linspace(-120.0, 120.0, 2401)
    assert torch.allclose(ours(values), theirs(values), atol=1e-6)
    extremes = torch.tensor([-200.0, 0.0, 200.0])
    assert torch.equal(ours(extremes), theirs(extremes))
    assert ours(torch.tensor(torch.inf)) == torch.inf
