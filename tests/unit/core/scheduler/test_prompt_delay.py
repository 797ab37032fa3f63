"""engine.scheduler_delay_factor: prompts that come while others decode are computed together, a little later."""

from __future__ import annotations

import pytest

from core.prompt_delay import PromptDelay
from tests.support.engine_bench import EngineBench, scheduled, unique_prompt


def steps_until_started(bench: EngineBench, request_id: str) -> int:
    """Steps of 0.01 s until the request's first token is computed."""
    for number in range(100):
        bench.step()
        if request_id in scheduled(bench):
            return number
    raise AssertionError(f"{request_id} never started")


@pytest.mark.parametrize(("factor", "num_waited"), [(0.0, 0), (2.5, 3), (7.5, 8)])
def test_schedule_prompt_while_others_decode_waits_by_the_last_prompt_steps_latency(factor: float, num_waited: int) -> None:
    bench = EngineBench(scheduler_delay_factor=factor)
    bench.add("first", unique_prompt(1, 8), max_tokens=50)
    bench.step()  # a prompt step, of 0.01 s
    bench.step()
    bench.add("second", unique_prompt(2, 8), max_tokens=50)
    assert steps_until_started(bench, "second") == num_waited


def test_schedule_prompts_that_come_during_the_delay_start_in_one_step() -> None:
    starts = []
    for factor in (0.0, 4.0):
        bench = EngineBench(scheduler_delay_factor=factor)
        bench.add("first", unique_prompt(1, 8), max_tokens=50)
        bench.step()
        for number in range(2, 5):
            bench.add(f"r{number}", unique_prompt(number, 8), max_tokens=50)
            bench.step()
        bench.run()
        starts.append([len(plan.new_requests) for plan in bench.runner.plans if plan.new_requests])
    assert starts == [[1, 1, 1, 1], [1, 3]]


def test_schedule_nothing_to_decode_prompt_is_not_delayed() -> None:
    bench = EngineBench(scheduler_delay_factor=50.0)
    bench.add("first", unique_prompt(1, 8), max_tokens=1)
    bench.step()
    bench.add("second", unique_prompt(2, 8), max_tokens=50)
    assert steps_until_started(bench, "second") == 0


def test_prompt_delay_new_heads_of_the_queue_do_not_prolong_it() -> None:
    delay = PromptDelay(2.0)
    delay.note_prompt_step(10.0)
    assert delay.is_over(11.0, None, is_anyone_running=True), "nobody waits"  # and the prompt step took a second
    heads = [(11.0, 11.0), (11.9, 11.8), (12.9, 12.8), (13.0, 12.9)]  # now, and the head's arrival
    assert [delay.is_over(now_s, arrival_s, is_anyone_running=True) for now_s, arrival_s in heads] == [False, False, False, True]
    assert not delay.is_over(13.1, 13.1, is_anyone_running=True), "the next one has a delay of its own"
