"""Load or recompute: the faster one is chosen, and a store that became fast again is noticed."""

from __future__ import annotations

import random

import pytest

from core.kv.load_cost import LinearCost, LoadOrRecompute

BLOCK_TOKENS = 16
BYTES_PER_TOKEN = 23_040  # SmolLM2-135M in bfloat16
MAX_STEP_TOKENS = 1024


def compute_s(first: int, end: int) -> float:
    """A small model on one core, as measured: overhead, tokens, attention."""
    return 0.03 + (end - first) * 1.4e-3 + (end - first) * (first + end) / 2 * 1.65e-6


class Engine:
    """Serves prompts of which all but the last block are stored, and learns as an engine does."""

    def __init__(self, latency_s: float, bytes_per_s: float, noise: float = 0.1, seed: int = 0) -> None:
        self.choice = LoadOrRecompute()
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s
        self._rng, self._noise = random.Random(seed), noise

    def load_s(self, num_tokens: int) -> float:
        return self._latency_s + num_tokens * BYTES_PER_TOKEN / self._bytes_per_s

    def compute(self, first: int, end: int) -> None:
        for start in range(first, end, MAX_STEP_TOKENS):
            stop = min(end, start + MAX_STEP_TOKENS)
            num_tokens = stop - start
            seconds = self._noisy(compute_s(start, stop))
            self.choice.observe_prefill(num_tokens, num_tokens * (start + stop) / 2, seconds)

    def serve(self, num_tokens: int) -> bool:
        """Whether that was right: it took at most a tenth longer than the other would have."""
        num_stored = num_tokens - BLOCK_TOKENS
        is_loaded, _reason = self.choice.should_load(num_stored, 0, num_stored * BYTES_PER_TOKEN, 0)
        if is_loaded:
            self.choice.observe_load(num_stored * BYTES_PER_TOKEN, self._noisy(self.load_s(num_stored)))
        self.compute(num_stored if is_loaded else 0, num_tokens)
        rest_s, all_s = compute_s(num_stored, num_tokens), 0.0
        for start in range(0, num_tokens, MAX_STEP_TOKENS):
            all_s += compute_s(start, min(num_tokens, start + MAX_STEP_TOKENS))
        took_s, other_s = self.load_s(num_stored) + rest_s, all_s
        if not is_loaded:
            took_s, other_s = other_s, took_s
        return took_s <= 1.1 * other_s

    def _noisy(self, seconds: float) -> float:
        return seconds * (1.0 + self._noise * self._rng.uniform(-1.0, 1.0))


@pytest.mark.parametrize(("intercept", "slope"), [(0.0, 1e-6), (0.01, 1e-6), (0.2, 1e-9)])
def test_linear_cost_learns_latency_and_bandwidth(intercept: float, slope: float) -> None:
    cost, rng = LinearCost(2, 0.9), random.Random(0)
    for _ in range(50):
        size = rng.randrange(1_000, 1_000_000)
        cost.observe((1.0, size), intercept + slope * size, 1.0)
    for size in (1_000, 500_000, 1_000_000):
        assert cost.predict_s((1.0, size)) == pytest.approx(intercept + slope * size, rel=0.05)


def test_linear_cost_of_one_size_takes_its_first_term_for_the_cause() -> None:
    cost = LinearCost(2, 0.9)
    assert cost.predict_s((1.0, 5.0)) is None
    cost.observe((1.0, 100.0), 2.0, 1.0)
    assert cost.predict_s((1.0, 200.0)) == pytest.approx(2.0)
    other = LinearCost(2, 0.9)
    other.observe((100.0, 1.0), 2.0, 1.0)
    assert other.predict_s((200.0, 1.0)) == pytest.approx(4.0)


def test_load_or_recompute_small_slow_load_does_not_stop_large_ones_from_being_tried() -> None:
    choice = LoadOrRecompute()
    choice.observe_prefill(16, 128, 0.03)
    choice.observe_load(16_000, 0.2)  # one block, noticed a step late
    assert choice.should_load(16, 0, 16_000, 0) == (False, "slower")
    assert choice.should_load(1000, 0, 1_000_000, 0) == (True, "faster")


@pytest.mark.parametrize("seed", range(5))
def test_load_or_recompute_picks_the_faster_over_lengths_and_stores(seed: int) -> None:
    stores = [(0.002, 5e9), (0.1, 3e9), (0.3, 1e9), (1.0, 1e9), (0.0, 2e7), (0.01, 1e7), (0.01, 4e6), (0.5, 5e7)]
    lengths, right = (64, 160, 256, 640, 1024, 2000), []
    for latency_s, bytes_per_s in stores:
        engine = Engine(latency_s, bytes_per_s, seed=seed)
        engine.compute(0, 40)
        for round_number in range(6):
            right += [engine.serve(length) for length in lengths][: len(lengths) if round_number else 0]
    assert sum(right) / len(right) >= 0.95


def test_load_or_recompute_many_small_steps_do_not_make_it_forget_what_a_long_prompt_costs() -> None:
    engine = Engine(0.01, 1e9)
    engine.compute(0, 2000)
    for _ in range(60):
        engine.serve(64)
        engine.compute(2000, 2016)
    predicted_s = engine.choice.predict_recompute_s(2000, 0)
    assert predicted_s == pytest.approx(compute_s(0, 2000), rel=0.4)


def test_load_or_recompute_knows_that_what_stands_far_back_costs_more() -> None:
    engine = Engine(0.01, 1e9, noise=0.0)
    for length in (64, 256, 1024, 2000):
        engine.compute(0, length)
    near_s, far_s = (engine.choice.predict_recompute_s(512, first) for first in (0, 4096))
    assert near_s is not None and far_s is not None and far_s > 2 * near_s


def test_load_or_recompute_counts_what_is_queued_ahead() -> None:
    choice = LoadOrRecompute()
    for num_tokens in (100, 200, 300):
        choice.observe_prefill(num_tokens, 0.0, num_tokens / 1000)
        choice.observe_load(num_tokens * 1000, num_tokens * 1000 / 2e6)
    assert choice.should_load(100, 0, 100_000, 0) == (True, "faster")
    assert choice.should_load(100, 0, 100_000, 10_000_000) == (False, "slower")


def test_load_or_recompute_slow_store_is_probed_and_forgiven() -> None:
    choice = LoadOrRecompute()
    choice.observe_prefill(100, 5000.0, 0.1)
    choice.observe_load(100_000, 10.0)
    decisions = [choice.should_load(100, 0, 100_000, 0) for _ in range(40)]
    assert ("slower" in {reason for _, reason in decisions}) and (True, "probe") in decisions
    for _ in range(60):
        choice.observe_load(100_000, 0.001)
    assert choice.should_load(100, 0, 100_000, 0) == (True, "faster")
