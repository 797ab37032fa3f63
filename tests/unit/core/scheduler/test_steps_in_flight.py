"""Steps that are scheduled before the results of those before them are in: whose blocks return when, and who must wait."""

from __future__ import annotations

import pytest

from core.step import StepResult
from core.step_output import StepOutput
from tests.support.engine_bench import EngineBench, unique_prompt
from tests.support.fake_runner import EOS_TOKEN_ID


@pytest.mark.parametrize("end", ["abort", "stop", "undo"])
def test_request_ends_while_steps_write_its_blocks_they_return_after_the_newest_ones_output(end: str) -> None:
    bench = EngineBench(num_blocks=8, block_size=4, overlap_steps="on")
    scheduler, pool = bench.engine._scheduler, bench.engine._pool
    bench.add("r", unique_prompt(1, 6), max_tokens=5)
    plans = [scheduler.schedule(StepOutput()) for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"r": 6}, {"r": 1}, {"r": 1}]
    if end == "abort":
        scheduler.finish_request("r")
    if end == "undo":
        scheduler.fail_step(plans[0], "broken", StepOutput())
    else:
        scheduler.update_from_output(plans[0], StepResult([[EOS_TOKEN_ID]]), StepOutput())
    assert (scheduler.requests, pool.num_free) == ({}, 6)
    scheduler.update_from_output(plans[1], StepResult([[7]]), StepOutput())
    assert pool.num_free == 6
    scheduler.update_from_output(plans[2], StepResult([[8]]), StepOutput())
    assert pool.num_free == 8


def test_schedule_pool_full_while_steps_are_in_flight_preempts_nobody_before_they_are_done() -> None:
    bench = EngineBench(num_blocks=4, block_size=4, overlap_steps="on")
    scheduler = bench.engine._scheduler
    for name in ("a", "b"):
        bench.add(name, unique_prompt(ord(name), 7), max_tokens=8)
    plans = [scheduler.schedule(StepOutput()) for _ in range(3)]
    assert [plan.num_scheduled_tokens for plan in plans] == [{"a": 7, "b": 7}, {"a": 1, "b": 1}, {}]
    assert scheduler.must_settle and plans[2].preempted_request_ids == []
    for plan in plans[:2]:
        scheduler.update_from_output(plan, StepResult([[7], [8]]), StepOutput())
    plan = scheduler.schedule(StepOutput())
    assert (plan.num_scheduled_tokens, plan.preempted_request_ids) == ({"a": 1}, ["b"])
