"""Who is served first, and who is preempted when the pool is full."""

from __future__ import annotations

import pytest

from core.kv.connector import TransferDirection
from tests.support.engine_bench import EngineBench, scheduled, store_with, unique_prompt
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


def test_schedule_fewer_slots_than_requests_takes_the_first_by_priority_and_then_the_next() -> None:
    bench = EngineBench(policy="priority", max_num_seqs=2)
    for index, priority in enumerate((3, 1, 2, 0)):
        bench.add(f"r{index}", unique_prompt(index + 1, 6), max_tokens=2, priority=priority)
    started = []
    for _ in range(4):
        bench.step()
        started.append([new.request_id for new in bench.last_plan.new_requests])
    assert started == [["r3", "r1"], [], ["r2", "r0"], []]


def test_schedule_room_for_both_nobody_is_preempted() -> None:
    bench = EngineBench(num_blocks=8, block_size=16, policy="priority", max_model_len=64)
    bench.add("low", unique_prompt(1, 32), max_tokens=30, priority=5)
    bench.step()
    bench.add("high", unique_prompt(2, 32), max_tokens=30, priority=0)
    bench.run()
    assert bench.engine.stats.num_preemptions == 0
    assert scheduled(bench) == {"high": 1}, "who came first ended first"


def test_schedule_several_low_priorities_the_lowest_then_youngest_is_preempted() -> None:
    bench = EngineBench(num_blocks=5, block_size=4, policy="priority", max_model_len=16)
    for name, priority in (("needs", 0), ("older", 2), ("younger", 2), ("better", 1)):
        bench.add(name, unique_prompt(ord(name[0]) + len(name), 3), max_tokens=8, priority=priority)
    bench.step()
    bench.step()  # one block is left, and four have their first one full
    bench.step()
    assert bench.last_plan.preempted_request_ids == ["younger", "older"]
    bench.run()
    bench.assert_nothing_leaked()


def test_schedule_preempted_request_comes_back_before_those_that_came_after_it() -> None:
    bench = EngineBench(num_blocks=6, block_size=2, max_model_len=12)
    for name in ("a", "b"):
        bench.add(name, unique_prompt(ord(name), 5), max_tokens=6)
    bench.step()
    bench.add("later", unique_prompt(3, 1), max_tokens=1)  # would fit at any time
    bench.run()
    starts = [new.request_id for plan in bench.runner.plans for new in plan.new_requests]
    assert starts == ["a", "b", "b", "later"]


def test_schedule_loaded_request_that_needs_a_block_steps_back_and_resumes_from_its_full_blocks() -> None:
    local, remote = unique_prompt(1, 33), unique_prompt(2, 31)
    bench = EngineBench(num_blocks=5, block_size=16, connector=MemoryConnector(store_with(remote)))
    bench.add("local", local, max_tokens=8)
    bench.step()
    bench.add("remote", remote, max_tokens=8)
    bench.step()  # starts the load
    bench.step()
    assert scheduled(bench) == {"local": 1, "remote": 15}
    bench.step()
    assert scheduled(bench) == {"local": 1, "remote": 1}
    bench.step()
    assert (scheduled(bench), bench.last_plan.preempted_request_ids) == ({"local": 1}, ["remote"])
    while "local" not in bench.finished:
        bench.step()
    bench.step()
    assert scheduled(bench) == {"remote": 1}
    assert bench.last_plan.new_requests[0].num_computed_tokens == 32
    bench.run()
    assert bench.tokens["remote"] == oracle_tokens(remote, 8)
    bench.assert_nothing_leaked()


def test_schedule_preempted_request_restarts_by_local_and_external_hits_and_computes_one_token() -> None:
    older, younger = unique_prompt(1, 4), unique_prompt(2, 5)
    connector = MemoryConnector(store_with(older[:3], younger[:3], block_size=2))
    bench = EngineBench(num_blocks=6, block_size=2, connector=connector, kv_load_policy="always")
    bench.add("older", older, max_tokens=5)
    bench.add("younger", younger, max_tokens=4)
    while not bench.runner.plans or not bench.last_plan.preempted_request_ids:
        bench.step()
    assert bench.last_plan.preempted_request_ids == ["younger"]
    assert bench.num_cached_tokens == {"older": 2, "younger": 2}
    connector.started.clear()
    bench.run()
    (load,) = [transfer for transfer in connector.started if transfer.direction is TransferDirection.LOAD]
    assert len(load.block_ids) == 1, "the block that the older one took over; the two before it are still here"
    (restart,) = [plan for plan in bench.runner.plans[4:] if plan.new_requests]
    assert restart.new_requests[0].num_computed_tokens == 6
    assert restart.num_scheduled_tokens == {"younger": 1}
    assert (bench.tokens["older"], bench.tokens["younger"]) == (oracle_tokens(older, 5), oracle_tokens(younger, 4))
    bench.assert_nothing_leaked()


@pytest.mark.parametrize(("aging_s", "is_served"), [(0.1, True), (0.0, False)])
def test_schedule_low_priority_under_an_endless_stream_of_high_ones_is_served_in_time_with_aging(
    aging_s: float, is_served: bool
) -> None:
    bench = EngineBench(policy="priority", max_num_seqs=1, priority_aging_s=aging_s)
    bench.add("low", unique_prompt(1, 6), max_tokens=1, priority=3)
    for number in range(100):  # each takes a step of 0.01 s, and two of them always wait
        bench.add(f"high {number}", unique_prompt(number + 2, 6), max_tokens=1, priority=0)
        if number:
            bench.step()
    started = [new.request_id for plan in bench.runner.plans for new in plan.new_requests]
    assert ("low" in started) is is_served
    if is_served:  # three levels take 0.3 s; who came before that and waits, comes first
        assert 30 <= started.index("low") <= 33


def test_schedule_aging_keeps_order_by_priority_among_those_that_come_together() -> None:
    bench = EngineBench(policy="priority", max_num_seqs=1, priority_aging_s=60.0)
    for index, priority in enumerate((2, -1, 1, 0, -1)):
        bench.add(f"r{index}", unique_prompt(index + 1, 6), max_tokens=1, priority=priority)
        bench.clock.advance(1.0)
    bench.run()
    started = [new.request_id for plan in bench.runner.plans for new in plan.new_requests]
    assert started == ["r1", "r4", "r3", "r2", "r0"]
