"""The sampler: exact cases, statistics of random draws, and independence of a row from its batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import InvalidInputError
from core.model.logit_adjustments import apply_token_masks
from core.model.logprobs import token_logprobs
from core.model.random_draw import RandomDraw
from core.model.sampled_row import SampledRow, uniform
from core.model.sampler import Sampler
from core.sampling_params import SamplingParams

EOS = 2


def make_row(prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any) -> SampledRow:
    prompt, output = prompt or [1], output or []
    return SampledRow(SamplingParams(**{"max_tokens": 50, **sampling}), np.array(prompt + output, dtype=np.int64), len(prompt))


def sample_one(logits: list[float], row: SampledRow) -> int:
    return Sampler([EOS]).sample(torch.tensor([logits]), [row])[0]


def draw(logits: torch.Tensor, count: int, **sampling: Any) -> torch.Tensor:
    """Relative frequencies of `count` draws with different seeds."""
    rows = [make_row(seed=seed, **sampling) for seed in range(count)]
    tokens = Sampler([EOS]).sample(logits.expand(count, -1).clone(), rows)
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[0]) / count


def test_sampler_greedy_tie_takes_first() -> None:
    assert sample_one([0.0, 3.0, 1.0, 3.0], make_row(temperature=0.0)) == 1
    tied = torch.zeros(3, 50_000, dtype=torch.bfloat16)
    tied[:, [777, 40_000]] = 5.0
    assert Sampler([EOS]).sample(tied, [make_row(temperature=0.0)] * 3) == [777] * 3


def test_sampler_does_not_change_logits() -> None:
    logits = torch.randn(2, 30)
    before = logits.clone()
    Sampler([EOS]).sample(logits, [make_row(logit_bias={3: 5.0}, top_k=4, repetition_penalty=1.3), make_row(temperature=0.0)])
    assert torch.equal(logits, before)


def test_sampler_logit_bias_moves_choice() -> None:
    assert sample_one([0.0, 3.0, 1.0], make_row(temperature=0.0, logit_bias={2: 5.0})) == 2
    assert sample_one([0.0, 3.0, 1.0], make_row(temperature=0.0, logit_bias={1: -100.0})) == 2


def test_sampler_min_tokens_forbids_eos_and_stop_tokens_until_reached() -> None:
    logits = [0.0, 1.0, 9.0, 8.0, 7.0]
    forbidding = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (3,)}
    assert sample_one(logits, make_row(**forbidding)) == 4
    assert sample_one(logits, make_row(output=[1], **forbidding)) == 4
    assert sample_one(logits, make_row(output=[1, 1], **forbidding)) == 2
    assert sample_one(logits, make_row(ignore_eos=True, **forbidding)) == 2  # eos ends nothing, so it may come


def test_sampler_penalties_follow_their_formulas() -> None:
    greedy = {"temperature": 0.0}
    logits = [0.0, 4.0, 3.9, -1.0]
    assert sample_one(logits, make_row(prompt=[1], **greedy, repetition_penalty=1.1)) == 2  # counts the prompt
    assert sample_one(logits, make_row(prompt=[1], **greedy, presence_penalty=1.0)) == 1  # does not
    assert sample_one(logits, make_row(output=[1], **greedy, presence_penalty=0.2)) == 2
    assert sample_one(logits, make_row(output=[1], **greedy, frequency_penalty=0.06)) == 1
    assert sample_one(logits, make_row(output=[1, 1], **greedy, frequency_penalty=0.06)) == 2
    # A negative logit is multiplied: a penalty never makes a token likelier.
    assert sample_one([-1.0, -1.1], make_row(prompt=[0], **greedy, repetition_penalty=1.5)) == 1


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"logit_bias": {1: 1.0}}]
)
def test_sampler_nothing_possible_gives_a_token(value: float, sampling: dict[str, Any]) -> None:
    assert sample_one([value] * 5, make_row(**sampling)) in range(5)


def test_sampler_infinite_logit_wins() -> None:
    assert sample_one([0.0, math.inf, 1.0, -math.inf], make_row(seed=3, top_p=0.9)) == 1


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0.0, 0.0]),
        ({"top_k": -1, "top_p": 0.7}, [2 / 3, 1 / 3, 0.0, 0.0]),
        ({"top_p": 0.76}, [5 / 9, 2.5 / 9, 1.5 / 9, 0.0]),
        ({"top_p": 0.01}, [1.0, 0.0, 0.0, 0.0]),
        ({"min_p": 0.25}, [5 / 9, 2.5 / 9, 1.5 / 9, 0.0]),
        ({"min_p": 1.0}, [1.0, 0.0, 0.0, 0.0]),
        ({"top_k": 3, "top_p": 0.8}, [2 / 3, 1 / 3, 0.0, 0.0]),  # top_p counts what top_k left: 0.5/0.9, 0.25/0.9
        ({"temperature": 0.5}, [0.25 / 0.345, 0.0625 / 0.345, 0.0225 / 0.345, 0.01 / 0.345]),
    ],
)
def test_sampler_random_draws_have_the_distribution(sampling: dict[str, Any], expected: list[float]) -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    order = torch.tensor([2, 0, 3, 1])
    found = draw(logits[order], 8000, **sampling)
    # Five standard deviations of a binomial; impossible tokens must not appear at all.
    for share, probability in zip(found[order.argsort()].tolist(), expected, strict=True):
        assert abs(share - probability) <= 5 * math.sqrt(probability * (1 - probability) / 8000) + 1e-9


def test_sampler_top_p_beyond_the_candidates_sorts_all() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, :2500] = 1.0
    probability = math.e / (2500 * math.e + 2500)
    row = make_row(seed=1, top_p=2000 * probability)
    kept = [int(RandomDraw().draw(logits.clone(), [SampledRow(row.sampling, np.arange(n), 1)])[0]) for n in range(1, 60)]
    assert max(kept) < 2500 and len(set(kept)) > 50


def test_sampler_row_is_independent_of_its_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(24, 3000, dtype=torch.float32) * 3
    variants: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.05, "temperature": 1.3},
        {"top_k": 50, "top_p": 0.5, "repetition_penalty": 1.2},
        {"frequency_penalty": 0.5, "min_tokens": 9},
        {"top_p": 0.9999, "temperature": 5.0},
    ]
    rows = [make_row(output=[5, 6, 7][: i % 4], seed=i, **variants[i % len(variants)]) for i in range(24)]
    sampler = Sampler([EOS])
    together = sampler.sample(logits, rows)
    assert together == [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together[::-1] == sampler.sample(logits.flip(0), rows[::-1])


def test_uniform_depends_on_seed_and_position_alone() -> None:
    assert uniform(None, 3) == uniform(0, 3) != uniform(0, 4)
    assert uniform(-(2**63), 0) != uniform(2**63 - 1, 0)
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.03


def test_token_logprobs_rank_and_order_of_ties() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 3.0, 1.0]])
    first, second = token_logprobs(logits, [2, 3], [3, 0])
    expected = logits.log_softmax(-1)
    assert (first.rank, second.rank) == (1, 2)
    assert [token_id for token_id, _ in first.top] == [1, 2, 0]
    assert second.top == ()
    assert first.logprob == pytest.approx(float(expected[0, 2])) and second.logprob == pytest.approx(float(expected[1, 3]))


_EXTREMES = st.sampled_from([0.0, 5e-324, 1e-300, 1e-38, 1.00001e-5, 0.5, 1.0, 2.0, 100.0])
_EXTREME_SAMPLING = st.fixed_dictionaries(
    {
        "temperature": _EXTREMES,
        "top_p": _EXTREMES,
        "min_p": _EXTREMES,
        "top_k": st.integers(-1, 20),
        "seed": st.none() | st.sampled_from([0, -(2**63), 2**63 - 1]),
        "min_tokens": st.integers(0, 20),
        "stop_token_ids": st.lists(st.integers(0, 19), max_size=4).map(tuple),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 2.0]),
        "repetition_penalty": _EXTREMES,
        "logit_bias": st.dictionaries(st.integers(0, 19), st.sampled_from([-100.0, 100.0]), max_size=4),
    }
)


@given(_EXTREME_SAMPLING, st.sampled_from([0.0, 1e30, -1e30, math.inf, -math.inf, math.nan]), st.integers(0, 5))
@settings(max_examples=300)
def test_sampler_extreme_values_that_validation_allows_choose_a_token_of_the_vocabulary(
    sampling: dict[str, Any], odd_logit: float, num_output_tokens: int
) -> None:
    """A token that does not exist would fail the next step, and with it every other request of the batch."""
    row = make_row([1, 2, 3], [7] * num_output_tokens, **sampling)
    try:
        row.sampling.validate(20)
    except InvalidInputError:
        return
    logits = torch.linspace(-9.0, 9.0, 20)
    logits[::7] = odd_logit
    assert 0 <= sample_one(logits.tolist(), row) < 20


def mask_of(allowed: set[int], vocab_size: int = 5) -> bytes:
    return sum(1 << token_id for token_id in allowed).to_bytes(4 * -(-vocab_size // 32), "little")


def masked_row(allowed: set[int], output: list[int] | None = None, **sampling: Any) -> SampledRow:
    return dataclasses.replace(make_row(output=output, **sampling), mask=mask_of(allowed))


def sample_masked(logits: list[float], row: SampledRow, dtype: torch.dtype = torch.float32) -> int:
    tensor = torch.tensor([logits], dtype=dtype)
    apply_token_masks(tensor, [row])
    return Sampler([EOS]).sample(tensor, [row])[0]


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 2.0, "seed": 7},
        {"temperature": 0.01, "top_p": 0.01, "min_p": 0.9, "seed": 7},
        {"temperature": 1.0, "top_k": 1, "repetition_penalty": 100.0, "frequency_penalty": 2.0, "seed": 7},
        {"temperature": 0.0, "logit_bias": {3: -100.0, 1: 100.0}},
    ],
)
@pytest.mark.parametrize("value", [0.0, math.nan, -math.inf, math.inf, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sampler_only_allowed_token_is_taken_whatever_the_model_says(
    sampling: dict[str, Any], value: float, dtype: torch.dtype
) -> None:
    row = masked_row({3}, output=[3, 3, 1], **sampling)
    assert sample_masked([9.0, 8.0, 7.0, value, 1.0], row, dtype) == 3


def test_sampler_mask_leaves_the_odds_of_what_it_allows() -> None:
    rows = [masked_row({1, 4}, seed=seed) for seed in range(4000)]
    logits = torch.tensor([5.0, 1.0, 9.0, 3.0, 2.0]).expand(len(rows), -1).clone()
    apply_token_masks(logits, rows)
    tokens = Sampler([EOS]).sample(logits, rows)
    assert set(tokens) == {1, 4}
    assert abs(tokens.count(4) / len(tokens) - math.e / (1 + math.e)) < 0.04


def test_sampler_masks_of_different_lengths_each_mask_their_row() -> None:
    longer = dataclasses.replace(make_row(), mask=mask_of({2}) + b"\xff" * 32)
    logits = torch.zeros(2, 5)
    apply_token_masks(logits, [masked_row({1, 4}), longer])
    assert [torch.nonzero(row == 0).flatten().tolist() for row in logits] == [[1, 4], [2]]


def test_sampler_row_without_a_mask_is_not_touched_by_its_neighbours() -> None:
    logits = torch.randn(2, 5)
    before = logits[1].clone()
    apply_token_masks(logits, [masked_row({3}), make_row()])
    assert torch.equal(logits[1], before)
    unmasked = logits.clone()
    apply_token_masks(unmasked, [make_row(), make_row()])
    assert torch.equal(unmasked, logits)


def test_sampler_end_waits_for_min_tokens_only_while_the_grammar_goes_on() -> None:
    logits = [0.0, 1.0, 9.0, 8.0, 0.0]  # the end is the likeliest
    for postponing in ({"min_tokens": 5}, {"ignore_eos": True}):
        assert sample_masked(logits, masked_row({EOS, 1}, temperature=0.0, **postponing)) == 1
        assert sample_masked(logits, masked_row({EOS}, temperature=0.0, **postponing)) == EOS
    assert sample_masked(logits, masked_row({EOS, 1}, temperature=0.0)) == EOS
    assert sample_masked(logits, masked_row({3, 1}, temperature=0.0, min_tokens=5, stop_token_ids=(3,))) == 1
    assert sample_masked(logits, masked_row({EOS, 1}, output=[1] * 5, temperature=0.0, min_tokens=5)) == EOS


def test_token_logprobs_of_masked_rows_list_no_forbidden_token() -> None:
    logits = torch.tensor([[5.0, 1.0, 9.0, 3.0, 1.0], [5.0, 1.0, 9.0, 3.0, 1.0]])
    apply_token_masks(logits, [masked_row({3}), masked_row({1, 4})])
    certain, even = token_logprobs(logits, [3, 4], [4, 4])
    assert (certain.logprob, certain.rank, certain.top) == (0.0, 1, ((3, 0.0),))
    assert [token_id for token_id, _ in even.top] == [1, 4] and even.logprob == pytest.approx(math.log(0.5))
