"""External hits: lookups and loads, as the scheduler sees them. Prompts share only what a test says."""

from __future__ import annotations

import dataclasses

import pytest

from core.kv.connector import TransferDirection, TransferOutcome
from tests.support.engine_bench import EngineBench, scheduled, store_with, unique_prompt
from tests.support.fake_runner import oracle_tokens
from tests.support.memory_connector import MemoryConnector


def test_admit_external_hit_loads_outside_slots_and_budget() -> None:
    prompt = unique_prompt(1, 40)  # two and a half blocks
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, max_num_seqs=1)
    bench.add("remote", prompt, max_tokens=2)
    bench.step()
    assert bench.runner.plans == [], "nothing to compute while the load is on its way"
    assert bench.engine.stats.waiting_by_reason["loading"] == 1
    bench.add("local", unique_prompt(2, 20), max_tokens=1)
    bench.step()
    assert scheduled(bench) == {"local": 20}, "a load takes no run slot"
    connector.complete(connector.started[0].transfer_id)
    bench.step()
    assert scheduled(bench) == {"remote": 8}
    connector.is_immediate = True
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    assert bench.tokens["remote"] == oracle_tokens(prompt, 2)
    assert bench.num_cached_tokens["remote"] == 32
    stats = bench.engine.stats
    assert (stats.external_hit_tokens, stats.external_query_tokens) == (32, 60)


def test_admit_external_hit_of_whole_blocks_computes_the_last_one() -> None:
    prompt = unique_prompt(1, 32)
    bench = EngineBench(num_blocks=20, block_size=16, connector=MemoryConnector(store_with(prompt)))
    bench.add("r", prompt, max_tokens=1)
    bench.run()
    assert bench.num_cached_tokens["r"] == 16, "at least one token is computed, and hits are whole blocks"
    assert bench.tokens["r"] == oracle_tokens(prompt, 1)


def test_schedule_two_loading_two_running_one_waiting_are_counted_by_reason() -> None:
    remote = [unique_prompt(number, 40) for number in (1, 2)]
    connector = MemoryConnector(store_with(*remote), is_immediate=False)
    bench = EngineBench(num_blocks=64, block_size=16, connector=connector, max_num_batched_tokens=100)
    for index, prompt in enumerate([*remote, *(unique_prompt(number, 50) for number in (3, 4, 5))]):
        bench.add(f"r{index}", prompt)
    bench.step()
    assert scheduled(bench) == {"r2": 50, "r3": 50}
    stats = bench.engine.stats
    assert (stats.num_running, stats.waiting_by_reason) == (2, {"capacity": 1, "loading": 2, "constraint": 0, "lora": 0})
    assert stats.num_waiting == 3


def test_admit_local_then_external_hit_loads_only_the_rest_and_counts_both() -> None:
    prompt = unique_prompt(1, 128)
    bench = EngineBench(num_blocks=32, block_size=16, connector=MemoryConnector(store_with(prompt[:32])))
    bench.add("first", prompt[:64], max_tokens=1)
    bench.step()
    bench.step()
    assert scheduled(bench) == {"first": 32}
    bench.run()
    connector = MemoryConnector(store_with(prompt[:96]))
    bench = EngineBench(num_blocks=32, block_size=16, connector=connector)
    bench.add("short", prompt[:65], max_tokens=1)
    bench.run()
    connector.started.clear()
    stats = bench.engine.stats
    before = dataclasses.replace(stats)
    bench.add("long", prompt, max_tokens=1)
    bench.step()
    assert [len(transfer.block_ids) for transfer in connector.started] == [2]
    bench.step()
    assert scheduled(bench) == {"long": 32}
    names = ("prefix_cache_query_tokens", "prefix_cache_hit_tokens", "external_query_tokens", "external_hit_tokens")
    assert [getattr(stats, name) - getattr(before, name) for name in names] == [128, 64, 64, 32]
    bench.run()
    bench.assert_nothing_leaked()


def test_load_in_flight_holds_its_blocks_unhashed_until_they_have_arrived() -> None:
    prompt = unique_prompt(1, 40)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", prompt, max_tokens=3)
    for _ in range(3):
        bench.step()
    (load,) = connector.started
    pool, request = bench.engine._pool, bench.engine._scheduler.requests["r"]
    assert (request.block_ids, request.num_computed_tokens, bench.runner.plans) == ([], 0, []), "the transfer holds them"
    assert [(pool.ref_count(block_id), pool.block_hash(block_id)) for block_id in load.block_ids] == [(1, None)] * 2
    connector.complete(load.transfer_id)
    bench.step()
    assert scheduled(bench) == {"r": 8}
    assert request.block_ids[:2] == list(load.block_ids)
    assert [pool.block_hash(block_id) for block_id in request.block_ids] == [*load.block_hashes, None]


def test_admit_first_token_known_and_prompt_of_whole_blocks_computes_that_token_alone() -> None:
    prompt = unique_prompt(1, 32)
    bench = EngineBench(num_blocks=20, block_size=16, connector=MemoryConnector(store_with(prompt)))
    bench.add("r", prompt, max_tokens=3, output=oracle_tokens(prompt, 1))
    bench.step()
    bench.step()
    assert scheduled(bench) == {"r": 1}
    assert bench.num_cached_tokens["r"] == 32
    bench.run()
    assert bench.tokens["r"] == oracle_tokens(prompt, 3)[1:]


def test_load_in_flight_is_not_a_local_hit_and_second_request_waits_for_it() -> None:
    prompt = unique_prompt(1, 40)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("a", prompt, max_tokens=1)
    bench.add("b", prompt, max_tokens=1)
    bench.step()
    loads = [transfer for transfer in connector.started if transfer.direction is TransferDirection.LOAD]
    assert len(loads) == 1, "one block is loaded once"
    assert bench.engine.stats.waiting_by_reason["loading"] == 2
    connector.complete(loads[0].transfer_id)
    connector.is_immediate = True
    bench.run()
    assert bench.tokens["a"] == bench.tokens["b"] == oracle_tokens(prompt, 1)
    bench.assert_nothing_leaked()


@pytest.mark.parametrize("outcome", [TransferOutcome.CORRUPT, TransferOutcome.MISS, TransferOutcome.ERROR])
def test_load_fails_behind_first_block_tail_is_recomputed(outcome: TransferOutcome) -> None:
    prompt = unique_prompt(1, 60)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", prompt, max_tokens=3)
    bench.step()
    connector.complete(connector.started[0].transfer_id, outcome, num_ok=1)
    connector.is_immediate = True
    bench.run()
    assert bench.num_cached_tokens["r"] == 16
    assert bench.tokens["r"] == oracle_tokens(prompt, 3)
    bench.assert_nothing_leaked()


def test_load_misses_its_deadline_request_goes_on_and_blocks_stay_pinned_until_reported() -> None:
    prompt = unique_prompt(1, 60)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, kv_load_timeout_s=0.05)
    bench.add("r", prompt, max_tokens=3)
    bench.step()
    load = connector.started[0]
    for _ in range(30):
        bench.step()
    assert bench.tokens["r"] == oracle_tokens(prompt, 3)
    assert bench.engine.audit().counts["transfers_overdue"] == 1
    assert all(bench.engine._pool.ref_count(block_id) == 1 for block_id in load.block_ids)
    connector.complete(load.transfer_id)
    connector.is_immediate = True
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    bench.assert_nothing_leaked()


def test_two_loads_that_fit_alone_but_not_together_both_finish() -> None:
    prompts = [unique_prompt(1, 60), unique_prompt(2, 60)]
    store = store_with(prompts[0])
    store.blocks.update(store_with(prompts[1]).blocks)
    connector = MemoryConnector(store, is_immediate=False)
    bench = EngineBench(num_blocks=6, block_size=16, connector=connector, max_model_len=96)
    for index, prompt in enumerate(prompts):
        bench.add(f"r{index}", prompt, max_tokens=20)
    for _ in range(200):
        bench.step()
        for transfer_id in list(connector.pending):
            connector.complete(transfer_id)
    assert [bench.tokens[f"r{index}"] for index in range(2)] == [oracle_tokens(prompt, 20) for prompt in prompts]
    bench.assert_nothing_leaked()


def test_abort_while_loading_frees_blocks_when_the_transfer_ends() -> None:
    prompt = unique_prompt(1, 60)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", prompt, max_tokens=3)
    bench.step()
    assert bench.engine.abort_request("r") is True
    assert bench.engine.audit().counts["transfer_pins"] == 3
    connector.complete(connector.started[0].transfer_id)
    bench.run()
    bench.assert_nothing_leaked()


def test_lookup_of_a_request_that_has_to_queue_starts_when_it_arrives() -> None:
    connector = MemoryConnector()
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, max_num_seqs=1)
    for name in ("first", "second"):
        bench.add(name, unique_prompt(ord(name[0]), 40), max_tokens=1)
    assert connector.lookups == ["second"], "the first is asked for in the step that comes at once"
    bench.step()
    assert connector.lookups == ["second", "first"]
    bench.run()
    bench.assert_nothing_leaked()


def test_lookup_not_known_yet_steps_aside_and_gives_up_in_time() -> None:
    prompt = unique_prompt(1, 40)
    connector = MemoryConnector(store_with(prompt))
    connector.is_lookup_known = False
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, lookup_timeout_s=0.05)
    bench.add("r", prompt, max_tokens=1)
    bench.add("other", unique_prompt(2, 5), max_tokens=1)
    bench.step()
    assert bench.engine.stats.waiting_by_reason["constraint"] == 1
    assert scheduled(bench) == {"other": 5}, "who waits for the store does not hold up the others"
    bench.run()
    assert bench.tokens["r"] == oracle_tokens(prompt, 1)
    assert bench.num_cached_tokens["r"] == 0


def test_lookup_is_not_waited_for_longer_than_computing_takes() -> None:
    connector = MemoryConnector(store_with(unique_prompt(1, 40)))
    connector.is_lookup_known = False
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector, lookup_timeout_s=60.0)
    bench.engine._ledger.cost.observe_prefill(40, 0.0, 2.0)
    bench.add("r", unique_prompt(1, 40), max_tokens=1)
    bench.step()
    bench.clock.advance(1.9)
    bench.step()
    assert bench.engine.stats.num_waiting == 1
    bench.clock.advance(0.1)
    bench.step()
    assert bench.tokens["r"] == oracle_tokens(unique_prompt(1, 40), 1)


def test_loads_that_hang_leave_room_to_compute_the_same_prompts() -> None:
    prompts = [unique_prompt(number, 60) for number in range(1, 13)]  # more blocks than the pool has
    store = store_with(prompts[0])
    for prompt in prompts[1:]:
        store.blocks.update(store_with(prompt).blocks)
    connector = MemoryConnector(store, is_immediate=False)
    bench = EngineBench(num_blocks=32, block_size=16, connector=connector, kv_load_timeout_s=0.05)
    for number, prompt in enumerate(prompts):
        bench.add(f"r{number}", prompt, max_tokens=2)
    for _ in range(200):  # no load ever ends, and neither does a save
        bench.step()
    assert [bench.tokens[f"r{number}"] for number in range(12)] == [oracle_tokens(prompt, 2) for prompt in prompts]
    assert connector.pending
    connector.is_immediate = True
    for transfer_id in list(connector.pending):
        connector.complete(transfer_id)
    bench.run()
    bench.assert_nothing_leaked()


def test_abort_after_its_load_has_arrived_frees_everything_at_once() -> None:
    prompt = unique_prompt(1, 60)
    connector = MemoryConnector(store_with(prompt), is_immediate=False)
    bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
    bench.add("r", prompt, max_tokens=3)
    bench.step()
    connector.complete(connector.started[0].transfer_id)
    bench.engine.settle()
    assert bench.engine.abort_request("r") is True
    assert bench.engine.has_work() is False
    bench.assert_nothing_leaked()
