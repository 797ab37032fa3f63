"""Steps that are scheduled while the one before them runs: what is known, what is fenced, what a failure undoes."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from core.clock import MonotonicClock
from core.config import EngineOptions
from core.engine import EngineCore
from core.kv.pool_memory import KVPoolMemory
from core.request import FinishReason
from core.sampling_params import SamplingParams
from core.step import StepPlan, StepResult
from core.step_output import StepOutput
from tests.support.engine_bench import PREFILL, EngineBench
from tests.support.fake_runner import FakeRunner, fake_layout, fake_model, oracle_tokens
from tests.support.memory_connector import MemoryConnector, MemoryStore

PROMPT = [5, 6, 7, 8, 9]


def overlapping(**options: Any) -> EngineBench:
    return EngineBench(overlap_steps="on", **options)


def used_blocks(bench: EngineBench) -> int:
    return bench.engine.audit().counts["blocks_used"]


def test_overlap_second_step_is_scheduled_before_the_first_has_a_result() -> None:
    bench = overlapping()
    bench.add("a", PROMPT, max_tokens=6)
    first = bench.step()
    assert (first.num_tokens, first.new_token_ids, bench.runner.plans) == (5, {}, [])  # begun, not asked for
    second = bench.step()
    assert second.new_token_ids == {"a": oracle_tokens(PROMPT, 1)}
    assert len(bench.runner.plans) == 1
    assert bench.engine.audit().counts["steps_in_flight"] == 1
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(PROMPT, 6)
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("overlap_steps", ["on", "off"])
def test_overlap_known_end_computes_no_token_too_many(overlap_steps: str) -> None:
    """Of max_tokens tokens the last is never computed; the same with overlap and without."""
    bench = EngineBench(overlap_steps=overlap_steps)
    bench.add("a", PROMPT, max_tokens=6)
    bench.add("b", PROMPT, max_tokens=3, stage=PREFILL)
    bench.run()
    computed: dict[str, int] = {}
    for plan in bench.runner.plans:
        for name, num_tokens in plan.num_scheduled_tokens.items():
            computed[name] = computed.get(name, 0) + num_tokens
    assert computed["a"] == 5 + 6 - 1
    assert computed["b"] <= 5  # the prompt, less what it hit


def test_overlap_token_behind_a_stop_is_discarded_and_its_block_fenced() -> None:
    right = oracle_tokens(PROMPT, 6)
    bench = overlapping(block_size=2)
    bench.add("a", PROMPT, max_tokens=20, stop_token_ids=(right[3],))
    while "a" not in bench.finished:
        bench.step()
    assert bench.tokens["a"] == right[:4]
    counts = bench.engine.audit().counts
    assert (counts["steps_in_flight"], counts["requests"], counts["request_references"]) == (1, 0, 0)
    assert counts["fenced_references"] == used_blocks(bench) > 0  # a step that writes to them is in flight
    assert bench.engine.has_work()
    bench.step()
    assert used_blocks(bench) == 0
    assert bench.tokens["a"] == right[:4]
    assert bench.finished["a"].reason is FinishReason.STOP
    bench.assert_nothing_leaked()


def test_overlap_blocks_of_an_aborted_request_stay_until_the_newest_step_is_done() -> None:
    bench = overlapping(block_size=2)
    bench.add("a", PROMPT, max_tokens=20)
    bench.step()
    bench.step()
    bench.engine.abort_request("a")
    assert used_blocks(bench) > 0
    output = bench.step()
    assert output.new_token_ids == {}
    bench.run()
    assert used_blocks(bench) == 0
    bench.assert_nothing_leaked()


def test_overlap_a_load_gets_no_block_that_a_step_in_flight_writes_to() -> None:
    """The pool has room for one request: the second's load waits for the step that still writes to the first one's blocks."""
    store = MemoryStore()
    filler = EngineBench(connector=MemoryConnector(store, is_immediate=True), block_size=2)
    filler.add("b", [9, 8, 7, 6, 5, 4, 3], max_tokens=1)
    filler.run()
    right = oracle_tokens(PROMPT, 4)
    connector = MemoryConnector(store, is_immediate=True)
    bench = overlapping(connector=connector, block_size=2, num_blocks=5, max_model_len=10, kv_load_policy="always")
    bench.add("a", PROMPT, max_tokens=5, stop_token_ids=(right[2],))
    bench.add("b", [9, 8, 7, 6, 5, 4, 3], max_tokens=3)
    bench.run()
    assert bench.tokens == {"a": right[:3], "b": oracle_tokens([9, 8, 7, 6, 5, 4, 3], 3)}
    assert bench.num_cached_tokens["b"] == 6
    bench.assert_nothing_leaked()


def test_overlap_preemption_waits_for_the_steps_in_flight() -> None:
    bench = overlapping(num_blocks=8, block_size=2, max_model_len=16)
    for name, first in (("a", 5), ("b", 6)):
        bench.add(name, [first, 7, 8, 9], max_tokens=11)
    while bench.engine.has_work():
        before = bench.engine.stats.num_preemptions
        in_flight = bench.engine.audit().counts["steps_in_flight"]
        bench.step()
        assert bench.engine.stats.num_preemptions == before or in_flight == 0
    assert bench.engine.stats.num_preemptions > 0
    assert bench.tokens == {name: oracle_tokens([first, 7, 8, 9], 11) for name, first in (("a", 5), ("b", 6))}
    bench.assert_nothing_leaked()


def test_overlap_failed_step_ends_its_requests_and_the_step_after_it_starts_over() -> None:
    bench = overlapping()
    bench.add("a", PROMPT, max_tokens=6)
    bench.step()
    bench.step()
    bench.add("b", [1, 2, 3], max_tokens=4)  # only in the step behind the one that fails
    bench.runner.fail_next = True
    bench.run()
    assert bench.finished["a"].reason is FinishReason.ERROR
    assert "told to fail" in bench.finished["a"].error
    assert bench.tokens["b"] == oracle_tokens([1, 2, 3], 4)
    assert bench.finished["b"].reason is FinishReason.LENGTH
    bench.assert_nothing_leaked()


def test_overlap_request_that_needs_its_last_token_makes_steps_wait_for_each_other() -> None:
    bench = overlapping()
    bench.add("a", PROMPT, max_tokens=6)
    bench.add("b", [1, 2, 3], max_tokens=6)
    bench.engine._scheduler.requests["b"].needs_last_token = True
    while bench.engine.has_work():
        bench.step()
        if "b" in bench.engine._scheduler.requests:
            assert bench.engine.audit().counts["steps_in_flight"] == 0
    assert bench.tokens == {"a": oracle_tokens(PROMPT, 6), "b": oracle_tokens([1, 2, 3], 6)}
    num_steps_with_b = sum("b" in plan.num_scheduled_tokens for plan in bench.runner.plans)
    assert num_steps_with_b == 6


def test_overlap_forced_reset_of_the_cache_keeps_the_news_of_steps_in_flight() -> None:
    bench = overlapping()
    bench.add("a", PROMPT, max_tokens=6)
    for _ in range(3):
        bench.step()
    assert bench.engine.try_reset_prefix_cache(force=True)
    assert bench.engine.has_work()
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(PROMPT, 6)
    bench.assert_nothing_leaked()


class _HeldRunner(FakeRunner):
    """Says when a step runs, and waits until it may end."""

    def __init__(self, pool: KVPoolMemory) -> None:
        super().__init__(pool)
        self.runs = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def execute(self, plan: StepPlan) -> StepResult:
        self.runs.release()
        assert self.may_end.acquire(timeout=60)
        return super().execute(plan)


def test_overlap_on_a_thread_the_next_step_is_scheduled_while_the_model_runs() -> None:
    options = EngineOptions(block_size=4, overlap_steps="on", max_num_seqs=4, max_num_batched_tokens=64)
    pool = KVPoolMemory(fake_layout(4), 16)
    runner = _HeldRunner(pool)
    engine = EngineCore(options, fake_model(4, 64), 16, runner, None, MonotonicClock(), has_model_thread=True)
    engine.add_request("a", PROMPT, [], SamplingParams(temperature=0.0, max_tokens=5))
    tokens: list[int] = []
    engine.step()
    assert runner.runs.acquire(timeout=60)  # the first step runs,
    assert engine.audit().counts["steps_in_flight"] == 1
    plan = engine._scheduler.schedule(StepOutput())  # and the next one can be scheduled
    assert dict(plan.num_scheduled_tokens) == {"a": 1}
    engine._steps.begin(plan, 0.0)
    for _ in range(8):
        runner.may_end.release()
    while engine.has_work():
        tokens += engine.step().new_token_ids.get("a", [])
    assert tokens == oracle_tokens(PROMPT, 5)
    engine.close()
