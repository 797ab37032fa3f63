"""Stores, runners and clients that fail: what it costs, and that nothing leaks."""

from __future__ import annotations

import pytest

from core.request import FinishReason
from tests.support.engine_bench import EngineBench, store_with, unique_prompt
from tests.support.fake_runner import oracle_tokens
from tests.support.memory_connector import MemoryConnector


@pytest.mark.parametrize("call", ["lookup", "load", "save", "poll"])
def test_connector_raises_costs_a_miss_never_the_engine(call: str) -> None:
    prompt = unique_prompt(1, 40)
    store = store_with(prompt)
    connector = MemoryConnector(store)
    connector.fail_calls = {call}
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, kv_load_timeout_s=0.05, kv_save_timeout_s=0.05)
    bench.add("r", prompt, max_tokens=20)
    for _ in range(100):
        bench.step()
    assert bench.tokens["r"] == oracle_tokens(prompt, 20)
    assert sum(bench.engine.stats.connector_errors.values()) > 0
    connector.fail_calls = set()
    bench.run()
    bench.assert_nothing_leaked()


def test_connector_keeps_failing_circuit_opens_and_closes_again() -> None:
    connector = MemoryConnector()
    connector.fail_calls = {"lookup", "save"}
    bench = EngineBench(num_blocks=60, block_size=16, connector=connector)
    for index in range(4):
        bench.add(f"r{index}", unique_prompt(index + 1, 40), max_tokens=1)
        bench.run()
    assert bench.engine.stats.circuit_is_open is True
    assert sum(bench.engine.stats.connector_errors.values()) == 3, "after three faults it is not asked"
    connector.fail_calls = set()
    bench.clock.advance(5.0)
    bench.add("later", unique_prompt(9, 40), max_tokens=1)
    bench.run()
    assert len(connector.store.blocks) > 0, "the store is used again"
    assert bench.engine.stats.circuit_is_open is False


@pytest.mark.parametrize("is_used_again", [True, False])
def test_connector_that_is_well_again_is_no_longer_complained_of_whether_or_not_it_is_used(is_used_again: bool) -> None:
    connector = MemoryConnector()
    connector.fail_calls = {"lookup", "save"}
    bench = EngineBench(num_blocks=60, block_size=16, connector=connector)

    def gauges(after_s: float) -> tuple[bool, str]:
        bench.clock.advance(after_s)
        bench.engine.record_gauges()
        return bench.engine.stats.circuit_is_open, bench.engine.stats.store_complaint

    for index in range(4):
        bench.add(f"r{index}", unique_prompt(index + 1, 40), max_tokens=1)
        bench.run()
    is_open, complaint = gauges(0.0)
    assert is_open and complaint.startswith("3 operations in a row failed, the last one 0 s ago")
    connector.fail_calls = set()
    is_open, complaint = gauges(10.0)
    assert not is_open and "10 s ago" in complaint  # it would be asked; nothing better is known of it
    if is_used_again:
        bench.add("later", unique_prompt(9, 40), max_tokens=1)
        bench.run()
    assert gauges(0.0 if is_used_again else 60.0) == (False, "")


def test_runner_fails_requests_of_the_step_end_with_error_and_engine_lives() -> None:
    bench = EngineBench(num_blocks=20, block_size=4)
    bench.add("a", unique_prompt(1, 10), max_tokens=3)
    bench.runner.fail_next = True
    bench.step()
    assert bench.finished["a"].reason is FinishReason.ERROR
    assert "told to fail" in bench.finished["a"].error
    bench.add("b", unique_prompt(1, 10), max_tokens=3)
    bench.run()
    assert bench.num_cached_tokens["b"] == 0, "nothing that the failed step computed may be hit"
    assert bench.tokens["b"] == oracle_tokens(unique_prompt(1, 10), 3)
    bench.assert_nothing_leaked()


def test_deadline_passes_request_ends_with_error() -> None:
    bench = EngineBench(num_blocks=20, block_size=4)
    bench.add("a", unique_prompt(1, 10), max_tokens=60, time_left_s=0.1)
    bench.run()
    assert (bench.finished["a"].reason, bench.finished["a"].error) == (FinishReason.ERROR, "deadline exceeded")
    bench.assert_nothing_leaked()


def test_abort_in_every_state_leaks_nothing() -> None:
    bench = EngineBench(num_blocks=20, block_size=4, max_num_seqs=1, connector=MemoryConnector())
    bench.add("running", unique_prompt(1, 10), max_tokens=50)
    bench.add("waiting", unique_prompt(2, 10), max_tokens=50)
    bench.step()
    assert bench.engine.abort_request("running") and bench.engine.abort_request("waiting")
    assert bench.engine.abort_request("unknown") is False
    bench.run()
    bench.assert_nothing_leaked()
