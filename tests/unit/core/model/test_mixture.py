"""The mixture of experts against one that computes every expert for every row; which rows go where; bits in any company."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from core.model.activations import silu
from core.model.architecture import ExpertsShape
from core.model.linear import ROW_MULTIPLE, Linear, TorchLinear
from core.model.mixture import mix_experts
from core.model.weights import MixtureWeights, MlpWeights

HIDDEN, INTERMEDIATE, NUM_EXPERTS = 32, 48, 5


class CountingLinear(Linear):
    """Remembers how many rows each call had."""

    def __init__(self, weight: Tensor) -> None:
        self._linear = TorchLinear(weight)
        self.num_outputs, self.num_inputs = weight.shape
        self.num_rows: list[int] = []

    def __call__(self, inputs: Tensor) -> Tensor:
        self.num_rows.append(len(inputs))
        return self._linear(inputs)


def make_weights(has_shared_expert: bool, dtype: torch.dtype = torch.float32) -> MixtureWeights:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).mul_(0.3).to(dtype)

    def expert() -> MlpWeights:
        return MlpWeights(CountingLinear(random(2 * INTERMEDIATE, HIDDEN)), CountingLinear(random(HIDDEN, INTERMEDIATE)))

    experts = tuple(expert() for _ in range(NUM_EXPERTS))
    return MixtureWeights(TorchLinear(random(16, HIDDEN)), experts, expert() if has_shared_expert else None)


def shape(is_normalized: bool, has_shared_expert: bool, num_experts_per_token: int = 2) -> ExpertsShape:
    shared = INTERMEDIATE if has_shared_expert else 0
    return ExpertsShape(NUM_EXPERTS, num_experts_per_token, INTERMEDIATE, is_normalized, shared)


def run_expert(expert: MlpWeights, row: Tensor) -> Tensor:
    gate, up = expert.gate_up_proj(row).chunk(2)
    return expert.down_proj(silu(gate) * up)


@pytest.mark.parametrize(("is_normalized", "has_shared_expert"), [(True, False), (False, True)])
def test_mix_experts_equals_the_weighted_sum_row_by_row(is_normalized: bool, has_shared_expert: bool) -> None:
    weights = make_weights(has_shared_expert)
    rows = torch.randn(24, HIDDEN, generator=torch.Generator().manual_seed(1))
    mixed = mix_experts(weights, shape(is_normalized, has_shared_expert), silu, rows, num_tokens=21)
    for row, found in zip(rows[:21], mixed, strict=False):
        scores = weights.router(row)
        chances, chosen = scores[:NUM_EXPERTS].softmax(-1).topk(2)
        if is_normalized:
            chances = chances / chances.sum()
        expected = sum(chance * run_expert(weights.experts[i], row) for chance, i in zip(chances, chosen.tolist(), strict=True))
        if weights.shared_expert is not None:
            expected = expected + scores[NUM_EXPERTS].sigmoid() * run_expert(weights.shared_expert, row)
        assert torch.allclose(found, expected, atol=1e-5)


def test_mix_experts_rows_of_padding_go_through_no_expert() -> None:
    weights = make_weights(has_shared_expert=False)
    rows = torch.randn(ROW_MULTIPLE, HIDDEN, generator=torch.Generator().manual_seed(2))
    mix_experts(weights, shape(True, False), silu, rows, num_tokens=1)
    calls = [expert.gate_up_proj.num_rows for expert in weights.experts if isinstance(expert.gate_up_proj, CountingLinear)]
    assert sorted(calls) == [[], [], [], [ROW_MULTIPLE], [ROW_MULTIPLE]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mix_experts_rows_in_any_company_same_bits(dtype: torch.dtype) -> None:
    weights = make_weights(True, dtype)
    rows = torch.randn(120, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    expected = mix_experts(weights, shape(True, True, 3), silu, rows, num_tokens=120)
    for first, num_rows in ((0, 8), (5, 16), (40, 80), (112, 8)):
        part = rows[first : first + num_rows].clone()
        for num_tokens in (num_rows, num_rows - 3):
            found = mix_experts(weights, shape(True, True, 3), silu, part, num_tokens)[:num_tokens]
            assert torch.equal(found, expected[first : first + num_tokens])
