"""What a step schedules under its token budget and its limits on requests and chunks."""

from __future__ import annotations

import pytest

from core.scheduler import Scheduler
from core.step import StepResult
from core.step_output import StepOutput
from tests.support.engine_bench import EngineBench, scheduled, unique_prompt


def test_schedule_ten_short_prompts_all_in_first_step_in_order() -> None:
    bench = EngineBench(num_blocks=64, block_size=16, max_num_batched_tokens=8192)
    for index in range(10):
        bench.add(f"r{index}", unique_prompt(index + 1, 10))
    bench.step()
    assert list(scheduled(bench).items()) == [(f"r{index}", 10) for index in range(10)]


def test_schedule_long_prompts_are_capped_and_share_the_budget() -> None:
    bench = EngineBench(num_blocks=256, block_size=16, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for index in range(3):
        bench.add(f"r{index}", unique_prompt(index + 1, 800))
    steps = []
    for _ in range(3):
        bench.step()
        steps.append(list(scheduled(bench).values()))
    assert steps == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_schedule_as_many_long_prompts_as_allowed_run_and_the_others_let_short_ones_pass() -> None:
    limits = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32, "max_long_partial_prefills": 1}
    bench = EngineBench(num_blocks=64, block_size=16, **limits)
    for name, length in (("long 1", 112), ("long 2", 112), ("long 3", 112), ("short", 32)):
        bench.add(name, unique_prompt(ord(name[-1]), length), max_tokens=2)
    steps = []
    for _ in range(5):
        bench.step()
        steps.append(scheduled(bench))
    assert steps[:2] == [{"long 1": 32, "short": 32}, {"long 1": 32, "short": 1}]
    assert steps[2] == {"long 1": 32, "long 2": 32}, "what is then left of the first is no more than a chunk"
    assert steps[3:] == [{"long 1": 16, "long 2": 32}, {"long 1": 1, "long 2": 32, "long 3": 31}]
    bench.run()
    assert bench.engine.stats.num_preemptions == 0
    bench.assert_nothing_leaked()


def test_schedule_long_prompt_that_is_mostly_cached_is_not_long() -> None:
    limits = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 32, "max_long_partial_prefills": 1}
    bench = EngineBench(num_blocks=64, block_size=16, **limits)
    bench.add("before", unique_prompt(1, 100), max_tokens=1)
    bench.run()
    bench.add("long", unique_prompt(2, 100), max_tokens=1)
    bench.add("cached", unique_prompt(1, 100), max_tokens=1)
    bench.step()
    assert scheduled(bench) == {"long": 32, "cached": 4}


@pytest.mark.parametrize(("is_chunked", "expected"), [(True, [800, 224]), (False, [800])])
def test_schedule_head_does_not_fit_nobody_jumps_the_queue(is_chunked: bool, expected: list[int]) -> None:
    bench = EngineBench(
        num_blocks=256, block_size=16, max_num_batched_tokens=1024, max_num_seqs=3, enable_chunked_prefill=is_chunked
    )
    for index, length in enumerate((800, 800, 10, 10)):
        bench.add(f"r{index}", unique_prompt(index + 1, length))
    bench.step()
    assert list(scheduled(bench).values()) == expected


def test_schedule_twice_before_output_does_not_repeat_tokens() -> None:
    bench = EngineBench(num_blocks=256, block_size=16, max_num_batched_tokens=1024)
    scheduler: Scheduler = bench.engine._scheduler
    bench.add("r0", unique_prompt(1, 512))
    first = scheduler.schedule(StepOutput())
    bench.add("r1", unique_prompt(2, 512))
    second = scheduler.schedule(StepOutput())
    assert (dict(first.num_scheduled_tokens), dict(second.num_scheduled_tokens)) == ({"r0": 512}, {"r1": 512})
    scheduler.update_from_output(first, StepResult([[7]]), StepOutput())
    assert dict(scheduler.schedule(StepOutput()).num_scheduled_tokens) == {"r0": 1}


def test_schedule_sequence_limit_keeps_the_rest_waiting() -> None:
    bench = EngineBench(num_blocks=64, block_size=16, max_num_seqs=2)
    for index in range(4):
        bench.add(f"r{index}", unique_prompt(index + 1, 8), max_tokens=3)
    bench.step()
    assert list(scheduled(bench)) == ["r0", "r1"]
    assert bench.engine.stats.num_waiting == 2
    bench.run()
    bench.assert_nothing_leaked()


def test_run_to_the_end_leaves_no_request_and_no_reference_but_findable_blocks() -> None:
    bench = EngineBench(num_blocks=25, block_size=4)
    for index in range(5):
        bench.add(f"r{index}", unique_prompt(index + 1, 10), max_tokens=10)
    bench.run()
    scheduler, pool = bench.engine._scheduler, bench.engine._pool
    assert (scheduler.requests, scheduler.running, scheduler.num_waiting) == ({}, [], 0)
    assert [pool.ref_count(block_id) for block_id in range(25)] == [0] * 25
    assert (pool.num_free, pool.num_cached_free) == (25, 20), "each of 5 requests filled 4 blocks, which can still be hit"
    bench.assert_nothing_leaked()
