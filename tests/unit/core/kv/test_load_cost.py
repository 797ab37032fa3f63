"""Load or recompute: the faster one is chosen, and a store that became fast again is noticed."""

from __future__ import annotations

import random

import pytest

from core.kv.load_cost import LinearCost, LoadOrRecompute


@pytest.mark.parametrize(("intercept", "slope"), [(0.0, 1e-6), (0.01, 1e-6), (0.2, 1e-9)])
def test_linear_cost_learns_latency_and_bandwidth(intercept: float, slope: float) -> None:
    cost, rng = LinearCost(is_proportional=False), random.Random(0)
    for _ in range(50):
        size = rng.randrange(1_000, 1_000_000)
        cost.observe(size, intercept + slope * size)
    for size in (1_000, 500_000, 1_000_000):
        assert cost.predict_s(size) == pytest.approx(intercept + slope * size, rel=0.05)


def test_linear_cost_of_one_size_assumes_what_it_was_told() -> None:
    for is_proportional, expected_s in ((True, 4.0), (False, 2.0)):
        cost = LinearCost(is_proportional=is_proportional)
        assert cost.predict_s(5) is None
        cost.observe(100, 2.0)
        assert cost.predict_s(200) == pytest.approx(expected_s)


def test_load_or_recompute_small_slow_load_does_not_stop_large_ones_from_being_tried() -> None:
    choice = LoadOrRecompute()
    choice.observe_prefill(16, 0.03)
    choice.observe_load(16_000, 0.2)  # one block, noticed a step late
    assert choice.should_load(16, 16_000, 0) == (False, "slower")
    assert choice.should_load(1000, 1_000_000, 0) == (True, "faster")


def test_load_or_recompute_picks_the_faster_over_lengths() -> None:
    choice = LoadOrRecompute()
    for num_tokens in (64, 256, 1024, 128, 512):
        choice.observe_prefill(num_tokens, num_tokens / 1000)  # 1,000 tokens/s
        choice.observe_load(num_tokens * 1000, 0.2 + num_tokens * 1e-5)  # 200 ms and 100 MB/s
    right = [choice.should_load(n, n * 1000, 0)[0] == (0.2 + n * 1e-5 < n / 1000) for n in range(16, 2048, 16)]
    assert sum(right) / len(right) >= 0.95


def test_load_or_recompute_counts_what_is_queued_ahead() -> None:
    choice = LoadOrRecompute()
    for num_tokens in (100, 200, 300):
        choice.observe_prefill(num_tokens, num_tokens / 1000)
        choice.observe_load(num_tokens * 1000, num_tokens * 1000 / 2e6)
    assert choice.should_load(100, 100_000, 0) == (True, "faster")
    assert choice.should_load(100, 100_000, 10_000_000) == (False, "slower")


def test_load_or_recompute_slow_store_is_probed_and_forgiven() -> None:
    choice = LoadOrRecompute()
    choice.observe_prefill(100, 0.1)
    choice.observe_load(100_000, 10.0)
    decisions = [choice.should_load(100, 100_000, 0) for _ in range(40)]
    assert ("slower" in {reason for _, reason in decisions}) and (True, "probe") in decisions
    for _ in range(60):
        choice.observe_load(100_000, 0.001)
    assert choice.should_load(100, 100_000, 0) == (True, "faster")
