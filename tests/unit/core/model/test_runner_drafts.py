"""Drafts in the runner: whatever is guessed, tokens, log-probabilities and KV are those of a run without drafts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core.model.runner import _kept_tokens
from core.model.sampled_row import SampledRow
from core.model.sampler import Sampler
from core.sampling_params import SamplingParams
from tests.unit.core.model.support import Driver, random_prompt, save_llama

NUM_TOKENS = 24
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100, logprobs=3),
    "random": SamplingParams(temperature=1.0, max_tokens=100, seed=7, top_p=0.9, logprobs=3),
    "penalties": SamplingParams(
        temperature=0.8, max_tokens=100, seed=9, repetition_penalty=1.3, presence_penalty=0.5, logprobs=0
    ),
    "min_tokens": SamplingParams(temperature=0.0, max_tokens=100, min_tokens=12, logprobs=1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runner_any_drafts_give_the_same_tokens_logprobs_and_kv(tmp_path: Path, dtype: str) -> None:
    save_llama(tmp_path)
    plain = Driver(tmp_path, dtype)
    prompts = {name: random_prompt(30 + 17 * i, seed=i) for i, name in enumerate(SAMPLINGS)}
    expected = {  # a run of each without drafts
        name: plain.run_alone(plain.add(name, prompts[name], sampling), NUM_TOKENS, chunk=25)
        for name, sampling in SAMPLINGS.items()
    }
    rng = random.Random(1)
    driver = Driver(tmp_path, dtype)
    requests = {name: driver.add(name, prompts[name], sampling) for name, sampling in SAMPLINGS.items()}
    num_right = num_wrong = num_steps = 0
    while unfinished := [request for request in requests.values() if len(request.output) < NUM_TOKENS]:
        shares, drafts = [], {}
        for request in rng.sample(unfinished, rng.randrange(1, len(unfinished) + 1)):
            remaining = len(request.token_ids) - request.num_computed_tokens
            if remaining > 1:
                shares.append((request, min(remaining, rng.randrange(1, 40))))
                continue
            start = len(request.output)
            guess = expected[request.request_id].output[start : start + rng.randrange(4)]
            guess = guess[: NUM_TOKENS - 1 - start]
            if guess and rng.random() < 0.6:
                guess[rng.randrange(len(guess))] += 1
            drafts[request.request_id] = guess
            before = len(request.output)
            shares.append((request, 1 + len(guess)))
        before = {request.request_id: len(request.output) for request, _ in shares}
        driver.step(shares, drafts)
        num_steps += 1
        for request, _ in shares:
            kept = len(request.output) - before[request.request_id] - 1
            num_right += max(kept, 0)
            num_wrong += kept >= 0 and kept < len(drafts.get(request.request_id, []))
    assert num_right > 10 < num_wrong, "nothing was accepted, or nothing was rejected"
    for name, request in requests.items():
        assert request.output == expected[name].output, name
        assert request.logprobs == expected[name].logprobs, name
        written = request.num_computed_tokens
        assert torch.equal(driver.kv(request)[:, :, :written], plain.kv(expected[name])[:, :, :written]), name


def chi_square(counts: list[int], probabilities: list[float]) -> float:
    total = sum(counts)
    return sum((count - total * p) ** 2 / (total * p) for count, p in zip(counts, probabilities, strict=True))


@pytest.mark.parametrize("draft", [0, 2, 5])
def test_verification_keeps_the_target_distribution_whatever_is_drafted(draft: int) -> None:
    """Over seeds, with a draft of one token before: the first token has the model's distribution p, accepted or not, the
    second, where there is one, has that of the position behind the draft.
    """
    first = [0.3, 0.05, 0.4, 0.1, 0.14, 0.01]
    second = [0.1, 0.2, 0.3, 0.2, 0.15, 0.05]
    logits = torch.tensor([first, second]).log()
    counts_first, counts_second = [0] * 6, [0] * 6
    sampler = Sampler(())
    known = torch.arange(3).numpy()
    with_draft = torch.tensor([0, 1, 2, draft]).numpy()
    num_accepted, num_seeds = 0, 4000
    for seed in range(num_seeds):
        sampling = SamplingParams(temperature=1.0, max_tokens=9, seed=seed)
        rows = [SampledRow(sampling, known, 3), SampledRow(sampling, with_draft, 3)]
        kept = _kept_tokens([draft], iter(sampler.sample(logits, rows)))
        counts_first[kept[0]] += 1
        if len(kept) == 2:
            assert kept[0] == draft
            num_accepted += 1
            counts_second[kept[1]] += 1
    critical_5_degrees = 20.5  # 0.1 % of right samplers are beyond; the seeds are fixed, so that this is no lottery
    assert chi_square(counts_first, first) < critical_5_degrees
    assert num_accepted == counts_first[draft]
    if num_accepted > 200:
        assert chi_square(counts_second, second) < critical_5_degrees
