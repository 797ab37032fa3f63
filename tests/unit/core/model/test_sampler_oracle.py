"""The sampler against the plain one over random mixes of rows, its adjustments bit by bit, and counts that follow the output."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from core.model.logit_adjustments import adjust_logits, apply_token_masks, is_adjusted
from core.model.logprobs import token_logprobs
from core.model.random_draw import RandomDraw
from core.model.sampled_row import SampledRow, TokenCounts
from core.model.sampler import Sampler, best_tokens
from core.sampling_params import SamplingParams
from tests.support.plain_sampler import adjusted_plainly, sample_plainly

EOS = (2, 9)


def random_sampling(rng: random.Random, vocab_size: int) -> SamplingParams:
    def some(likelihood: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < likelihood else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 1.7, 5.0]),
        top_p=some(0.5, rng.choice([0.01, 0.5, 0.9, 0.99, 0.9999]), 1.0),
        top_k=some(0.4, rng.choice([1, 5, 50, 700, vocab_size - 1, vocab_size]), rng.choice([0, -1])),
        min_p=some(0.3, rng.choice([1e-6, 0.01, 0.2, 1.0]), 0.0),
        seed=rng.randrange(2**40),
        max_tokens=100,
        min_tokens=some(0.2, 50, 0),
        stop_token_ids=some(0.3, (2, 5), ()),
        ignore_eos=rng.random() < 0.3,
        presence_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(0.3, rng.uniform(0.5, 2), 1.0),
        logit_bias=some(0.2, {rng.randrange(vocab_size): rng.uniform(-9, 9) for _ in range(20)}, {}),
    )


def random_row(rng: random.Random, vocab_size: int) -> SampledRow:
    num_prompt, num_output = rng.randrange(1, 60), rng.randrange(40)
    token_ids = np.array([rng.randrange(min(vocab_size, 200)) for _ in range(num_prompt + num_output)], dtype=np.int64)
    mask = None
    if rng.random() < 0.25:
        allowed = rng.choice([{2}, {2, 7}, set(rng.sample(range(vocab_size), 40)), set(range(0, vocab_size, 2))])
        mask = sum(1 << token_id for token_id in allowed).to_bytes(4 * -(-vocab_size // 32), "little")
    counts = None
    if rng.random() < 0.5:
        counts = TokenCounts(num_prompt)
        for length in (num_prompt // 2, num_prompt + num_output // 2, len(token_ids)):
            counts.advance(token_ids[:length])
    return SampledRow(random_sampling(rng, vocab_size), token_ids, num_prompt, mask, counts)


def random_logits(rng: random.Random, num_rows: int, vocab_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat and peaked rows, many ties (bfloat16), all negative ones, constants, and infinite and missing values."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(rng.randrange(2**31)))
    logits *= torch.tensor([rng.choice([0.0, 0.5, 3.0, 9.0]) for _ in range(num_rows)])[:, None]
    logits -= torch.tensor([rng.choice([0.0, 0.0, 60.0]) for _ in range(num_rows)])[:, None]
    for i in range(num_rows):
        if rng.random() < 0.2:
            places = rng.sample(range(vocab_size), vocab_size // 3)
            logits[i, places] = rng.choice([-torch.inf, torch.nan])
        if rng.random() < 0.1:
            logits[i, rng.randrange(vocab_size)] = torch.inf
    return logits.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [40, 3000, 4096])
def test_sampler_random_mixes_choose_what_the_plain_one_does(vocab_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab_size)
    sampler = Sampler(EOS)  # one for all batches: what a step leaves in its buffers must not show
    for _ in range(8):
        rows = [random_row(rng, vocab_size) for _ in range(rng.choice([1, 7, 32]))]
        logits = random_logits(rng, len(rows), vocab_size, dtype)
        apply_token_masks(logits, rows)
        expected = sample_plainly(logits, rows, EOS)
        found = sampler.sample(logits, rows)
        wrong = [i for i in range(len(rows)) if found[i] != expected[i]]
        assert not wrong, [(rows[i].sampling, found[i], expected[i]) for i in wrong]
        alone = rng.randrange(len(rows))
        assert Sampler(EOS).sample(logits[alone : alone + 1], [rows[alone]]) == [found[alone]]


def test_adjustments_of_a_batch_have_the_bits_of_each_row_alone() -> None:
    rng = random.Random(5)
    rows = [random_row(rng, 500) for _ in range(40)]
    logits = random_logits(rng, 40, 500, torch.float32)
    apply_token_masks(logits, rows)
    together = torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    expected = torch.stack([adjusted_plainly(logits[i], row, list(EOS)) for i, row in enumerate(rows)])
    adjust_logits(together, rows, [i for i, row in enumerate(rows) if is_adjusted(row)], EOS)
    assert torch.equal(together, expected)


def test_random_draw_nucleus_of_any_size_equals_the_plain_one() -> None:
    """Small enough for the nearest candidates, for the farther ones, and so large that the row is sorted."""
    logits = (torch.randn(40, 8192, generator=torch.Generator().manual_seed(1)) * 0.7).repeat(3, 1)
    rows = [
        SampledRow(SamplingParams(seed=i, top_p=0.001 * 10 ** (i % 3) if i < 60 else 0.5 + i / 241), np.arange(i + 1), 1)
        for i in range(120)
    ]
    expected = sample_plainly(logits, rows, EOS)
    assert RandomDraw().draw(logits.clone(), rows).tolist() == expected
    assert len(set(expected)) > 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_best_tokens_are_the_first_maxima_whatever_their_sign(dtype: torch.dtype) -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, -9.0],
            [-3.0, -1.0, -2.0, -1.0],
            [-0.0, 0.0, -1.0, 0.0],
            [-1.0, -0.0, 0.0, -1.0],
            [nan, 1.0, 2.0, nan],
            [nan, -2.0, -1.0, -nan],
            [nan, -inf, nan, -inf],
            [1.0, inf, inf, nan],
            [-inf, -inf, 1e-30 if dtype != torch.float16 else 1e-7, 0.0],
        ]
    ).to(dtype)
    assert best_tokens(logits).tolist() == [1, 1, 0, 1, 2, 2, 0, 1, 2]


def test_token_counts_that_follow_the_output_equal_a_count_made_anew() -> None:
    rng = random.Random(3)
    token_ids = np.array([rng.randrange(300) for _ in range(900)])
    counts = TokenCounts(400)
    for length in sorted(rng.sample(range(1, 901), 60)):
        counts.advance(token_ids[:length])
        output = token_ids[400:length].tolist()
        assert sorted(counts.token_ids.tolist()) == sorted(set(token_ids[:length].tolist()))
        pairs = zip(counts.token_ids.tolist(), counts.output_counts.tolist(), strict=True)
        assert all(count == output.count(token_id) for token_id, count in pairs)


@pytest.mark.parametrize("vocab_size", [30, 2000, 4096])
def test_token_logprobs_list_the_best_by_value_and_id(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    logits = torch.randn(21, vocab_size, generator=torch.Generator().manual_seed(2)).bfloat16()  # many ties
    logits[3, vocab_size // 2 :] = -torch.inf
    tokens, num_tops = [rng.randrange(vocab_size) for _ in range(21)], [rng.choice([0, 1, 5, 20]) for _ in range(21)]
    for row, found in enumerate(token_logprobs(logits, tokens, num_tops)):
        expected = logits[row].float().log_softmax(-1).tolist()
        possible = [token for token in range(vocab_size) if expected[token] > -torch.inf]
        ordered = sorted(possible, key=lambda token: (-expected[token], token))[: num_tops[row]]
        assert found.top == tuple((token, expected[token]) for token in ordered)
        assert (found.token_id, found.logprob) == (tokens[row], expected[tokens[row]])
        assert found.rank == 1 + sum(value > found.logprob for value in expected)
