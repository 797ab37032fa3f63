"""Who is served first, and who is preempted when the pool is full."""

from __future__ import annotations

from tests.support.engine_bench import EngineBench, scheduled, unique_prompt
from tests.support.fake_runner import oracle_tokens
from tests.support.memory_connector import MemoryConnector


def test_schedule_priority_then_arrival_decides_order() -> None:
    bench = EngineBench(policy="priority")
    for name, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
        bench.add(name, unique_prompt(ord(name), 6), priority=priority)
    bench.step()
    assert list(scheduled(bench)) == ["d", "b", "c", "a"]


def test_schedule_fcfs_ignores_priority() -> None:
    bench = EngineBench(policy="fcfs")
    for name, priority in (("a", 2), ("b", 0)):
        bench.add(name, unique_prompt(ord(name), 6), priority=priority)
    bench.step()
    assert list(scheduled(bench)) == ["a", "b"]


def test_schedule_high_priority_needs_block_low_priority_is_preempted() -> None:
    bench = EngineBench(num_blocks=5, block_size=16, policy="priority", max_model_len=80)
    bench.add("low", unique_prompt(1, 32), max_tokens=30, priority=5)
    bench.step()
    bench.step()
    bench.add("high", unique_prompt(2, 32), max_tokens=30, priority=0)
    bench.step()
    bench.step()
    assert bench.last_plan.preempted_request_ids == ["low"]
    assert list(scheduled(bench)) == ["high"]
    bench.run()
    assert bench.tokens["low"] == oracle_tokens(unique_prompt(1, 32), 30)
    assert bench.tokens["high"] == oracle_tokens(unique_prompt(2, 32), 30)
    bench.assert_nothing_leaked()


def test_schedule_pool_full_youngest_is_preempted_and_resumes_by_prefix_hit() -> None:
    bench = EngineBench(num_blocks=6, block_size=2, max_model_len=12)
    for name in ("a", "b"):
        bench.add(name, unique_prompt(ord(name), 5), max_tokens=6)
    while not bench.runner.plans or not bench.last_plan.preempted_request_ids:
        bench.step()
    assert bench.last_plan.preempted_request_ids == ["b"]
    num_preempted_at = len(bench.tokens["b"])
    bench.run()
    resumed = next(plan for plan in bench.runner.plans[3:] for new in plan.new_requests if new.request_id == "b")
    computed = next(new.num_computed_tokens for new in resumed.new_requests)
    assert 0 < computed < 5 + num_preempted_at, "it should start over from what the prefix cache kept"
    assert bench.tokens["b"] == oracle_tokens(unique_prompt(ord("b"), 5), 6)
    assert bench.num_cached_tokens["b"] == 0, "hits are counted at the first admission only"
    bench.assert_nothing_leaked()


def test_schedule_victim_blocks_pinned_by_saves_nobody_is_preempted_in_vain() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=6, block_size=2, connector=connector, max_model_len=12)
    bench.add("a", unique_prompt(1, 5), max_tokens=6)
    bench.add("b", unique_prompt(2, 5), max_tokens=6)
    for _ in range(8):
        bench.step()
    assert bench.engine.stats.num_preemptions <= 1
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    connector.is_immediate = True
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(unique_prompt(1, 5), 6)
    assert bench.tokens["b"] == oracle_tokens(unique_prompt(2, 5), 6)
    bench.assert_nothing_leaked()


def test_schedule_youngest_with_pinned_blocks_waits_and_never_preempts_an_older_one() -> None:
    connector = MemoryConnector(is_immediate=False)
    bench = EngineBench(num_blocks=6, block_size=2, connector=connector, max_model_len=12)
    bench.add("older", unique_prompt(1, 4), max_tokens=6)
    bench.step()
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.add("younger", unique_prompt(2, 6), max_tokens=6)  # fills its three blocks at once; the store reads them
    bench.step()
    bench.step()
    assert scheduled(bench) == {"older": 1}
    assert bench.last_plan.preempted_request_ids == []
    connector.is_immediate = True
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    assert bench.tokens["older"] == oracle_tokens(unique_prompt(1, 4), 6)
    assert bench.tokens["younger"] == oracle_tokens(unique_prompt(2, 6), 6)
    bench.assert_nothing_leaked()
