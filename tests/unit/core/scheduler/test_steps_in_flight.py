"""Steps that are scheduled before the results of those before them are in: whose blocks return when, and who must wait."""

from __future__ import annotations

import pytest

from core.request import FinishReason
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


def test_fail_step_runner_learns_who_ended_although_it_skips_the_plan_that_said_so() -> None:
    bench = EngineBench(num_blocks=8, block_size=4, overlap_steps="on")
    bench.add("short", unique_prompt(1, 3), max_tokens=1)
    bench.add("long", unique_prompt(2, 3), max_tokens=9)
    bench.step()
    bench.step()
    assert list(bench.finished) == ["short"]
    bench.runner.fail_next = True
    bench.step()  # schedules the plan that says so, while the one before it is in flight, and fails that one
    assert bench.finished["long"].reason is FinishReason.ERROR
    bench.assert_nothing_leaked()


def test_undo_step_request_of_two_undone_steps_starts_over_once() -> None:
    bench = EngineBench(num_blocks=8, block_size=4, overlap_steps="on")
    scheduler = bench.engine._scheduler
    bench.add("failing", unique_prompt(1, 3), max_tokens=9)
    plans = [scheduler.schedule(StepOutput())]
    bench.add("other", unique_prompt(2, 3), max_tokens=9)
    plans += [scheduler.schedule(StepOutput()) for _ in range(2)]
    assert [list(plan.num_scheduled_tokens) for plan in plans] == [["failing"], ["failing", "other"], ["failing", "other"]]
    scheduler.fail_step(plans[0], "broken", StepOutput())
    scheduler.undo_step(plans[1])
    scheduler.undo_step(plans[2])
    assert (list(scheduler.requests), scheduler.num_waiting, bench.engine._pool.num_free) == (["other"], 1, 8)
    assert scheduler.schedule(StepOutput()).num_scheduled_tokens == {"other": 3}
