"""bench.interference: its statistics, its schedule, and a run against a small server in place of the real ones."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from bench.interference import Observed, Schedule, gaps_within, make_arms, observe, percentile, round_orders, summarize
from tests.unit.bench.test_serving import FakeServer, serving


def test_percentile_is_the_smallest_value_that_covers_the_share() -> None:
    values = [float(value) for value in range(1, 201)]
    assert [percentile(values, q) for q in (0.0, 0.5, 0.99, 1.0)] == [1.0, 100.0, 198.0, 200.0]
    assert percentile([7.0], 0.99) == 7.0 and percentile([], 0.5) is None


def test_gaps_within_counts_what_ends_in_the_window() -> None:
    assert gaps_within([0.0, 1.0, 1.5, 4.0, 9.0], 1.2, 4.0) == [0.5, 2.5]
    assert gaps_within([3.0], 0.0, 9.0) == []


def test_summarize_pools_rounds() -> None:
    rounds = [Observed([0.01] * 97, [1.0, 3.0]), Observed([0.2] * 3, [2.0], num_errors=1)]
    result = summarize(rounds)
    assert (result["inter_token_ms_p50"], result["inter_token_ms_p99"], result["ratio"]) == (10.0, 200.0, 20.0)
    assert (result["first_token_ms_p50"], result["first_token_ms_p99"]) == (2000.0, 3000.0)
    assert (result["num_gaps"], result["num_long_prompts"], result["num_errors"]) == (100, 3, 1)


def test_summarize_nothing_seen_is_none_and_no_error() -> None:
    result = summarize([Observed()])
    assert (result["ratio"], result["first_token_ms_p99"], result["num_gaps"]) == (None, None, 0)


def test_schedule_long_prompts_come_each_period_after_the_warm_up() -> None:
    schedule = Schedule(num_long_prompts=3, period_s=4.0, warm_s=2.0)
    assert schedule.long_prompt_times_s == [2.0, 6.0, 10.0]
    assert schedule.end_s == 14.0


def test_round_orders_have_every_arm_once_and_alternate() -> None:
    names = ["a", "b", "c", "d"]
    orders = round_orders(names, 6)
    assert all(sorted(order) == names for order in orders)
    assert len({tuple(order) for order in orders}) > 1 and orders == round_orders(names, 6)


def test_make_arms_one_node_per_core_and_the_same_chunks_for_both(tmp_path: Path) -> None:
    model = str(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    arms = make_arms(model, None)
    assert [name for name in arms if "monolithic" in name] == [f"kvrelay monolithic, chunk {chunk}" for chunk in (512, 128)]
    split = arms["kvrelay 1 prefill + 1 decode"]
    assert split.command[split.command.index("--engine.num_threads") + 1] == "1"
    assert not split.cores_by_node or [len(cores) for cores in split.cores_by_node.values()] == [1, 1]


@pytest.mark.parametrize("fail_every", [0, 3])
def test_observe_measures_streams_and_long_prompts(fail_every: int) -> None:
    app = FakeServer(fail_every=fail_every)
    schedule = Schedule(
        num_streams=2,
        num_stream_prompt_tokens=8,
        num_stream_tokens=5,
        num_long_prompts=3,
        num_long_tokens=40,
        num_long_output_tokens=2,
        period_s=0.6,
        warm_s=0.3,
    )
    with serving(app) as url:
        observed = asyncio.run(observe(url, schedule, seed=1))
    long_prompts = [prompt for prompt in app.prompts if len(prompt) == 40]
    assert len(long_prompts) == 3
    assert all(one != other for one, other in itertools.combinations(long_prompts, 2)), "no prompt is a prefix hit"
    assert len(app.prompts) - 3 > schedule.num_streams, "streams that end begin again"
    assert observed.gaps_s and all(gap > 0 for gap in observed.gaps_s)
    assert bool(observed.num_errors) == bool(fail_every)
    if not fail_every:
        assert len(observed.first_tokens_s) == 3 and min(observed.first_tokens_s) > 0.1
