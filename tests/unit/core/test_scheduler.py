"""Behaviours of the scheduler, each as given state -> expected step. Prompts share only what a test says."""

from __future__ import annotations

import pytest

from core.errors import InvalidInputError, OverloadedError
from core.kv.connector import TransferDirection, TransferOutcome
from core.request import FinishReason
from core.scheduler import Scheduler
from core.step import StepPlan, StepResult
from core.step_output import StepOutput
from tests.support.engine_bench import PREFILL, EngineBench
from tests.support.fake_runner import EOS_TOKEN_ID, oracle_tokens
from tests.support.memory_connector import MemoryConnector, MemoryStore


def unique_prompt(name: int, num_tokens: int) -> list[int]:
    """num_tokens tokens that no other name's prompt starts with."""
    return [name, *range(1, num_tokens)][:num_tokens]


def scheduled(bench: EngineBench) -> dict[str, int]:
    """The last plan's tokens per request."""
    return dict(bench.last_plan.num_scheduled_tokens)


class TestBudgets:
    def test_schedule_ten_short_prompts_all_in_first_step_in_order(self) -> None:
        bench = EngineBench(num_blocks=64, block_size=16, max_num_batched_tokens=8192)
        for index in range(10):
            bench.add(f"r{index}", unique_prompt(index + 1, 10))
        bench.step()
        assert list(scheduled(bench).items()) == [(f"r{index}", 10) for index in range(10)]

    def test_schedule_long_prompts_are_capped_and_share_the_budget(self) -> None:
        bench = EngineBench(num_blocks=256, block_size=16, max_num_batched_tokens=1024, long_prefill_token_threshold=400)
        for index in range(3):
            bench.add(f"r{index}", unique_prompt(index + 1, 800))
        steps = []
        for _ in range(3):
            bench.step()
            steps.append(list(scheduled(bench).values()))
        assert steps == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]

    @pytest.mark.parametrize(("is_chunked", "expected"), [(True, [800, 224]), (False, [800])])
    def test_schedule_head_does_not_fit_nobody_jumps_the_queue(self, is_chunked: bool, expected: list[int]) -> None:
        bench = EngineBench(
            num_blocks=256, block_size=16, max_num_batched_tokens=1024, max_num_seqs=3, enable_chunked_prefill=is_chunked
        )
        for index, length in enumerate((800, 800, 10, 10)):
            bench.add(f"r{index}", unique_prompt(index + 1, length))
        bench.step()
        assert list(scheduled(bench).values()) == expected

    def test_schedule_twice_before_output_does_not_repeat_tokens(self) -> None:
        bench = EngineBench(num_blocks=256, block_size=16, max_num_batched_tokens=1024)
        scheduler: Scheduler = bench.engine._scheduler
        bench.add("r0", unique_prompt(1, 512))
        first = scheduler.schedule(StepOutput())
        bench.add("r1", unique_prompt(2, 512))
        second = scheduler.schedule(StepOutput())
        assert (dict(first.num_scheduled_tokens), dict(second.num_scheduled_tokens)) == ({"r0": 512}, {"r1": 512})
        scheduler.update_from_output(first, StepResult([[7]]), StepOutput())
        assert dict(scheduler.schedule(StepOutput()).num_scheduled_tokens) == {"r0": 1}

    def test_schedule_sequence_limit_keeps_the_rest_waiting(self) -> None:
        bench = EngineBench(num_blocks=64, block_size=16, max_num_seqs=2)
        for index in range(4):
            bench.add(f"r{index}", unique_prompt(index + 1, 8), max_tokens=3)
        bench.step()
        assert list(scheduled(bench)) == ["r0", "r1"]
        assert bench.engine.stats.num_waiting == 2
        bench.run()
        bench.assert_nothing_leaked()


class TestStopping:
    def _sample(self, bench: EngineBench, tokens: list[int]) -> StepOutput:
        """Run one step in which the model samples exactly these tokens."""
        output = StepOutput()
        plan: StepPlan = bench.engine._scheduler.schedule(output)
        bench.engine._scheduler.update_from_output(plan, StepResult([list(tokens)]), output)
        return output

    def test_update_eos_sampled_finishes_and_is_reported_once(self) -> None:
        bench = EngineBench()
        bench.add("r", [5, 6], max_tokens=10)
        output = self._sample(bench, [EOS_TOKEN_ID])
        assert output.finished["r"].reason is FinishReason.STOP
        assert output.new_token_ids["r"] == [EOS_TOKEN_ID]
        plans = [bench.engine._scheduler.schedule(StepOutput()) for _ in range(2)]
        assert [plan.finished_request_ids for plan in plans] == [["r"], []]

    def test_update_stop_token_cuts_what_follows(self) -> None:
        bench = EngineBench()
        bench.add("r", [5, 6], max_tokens=10, stop_token_ids=(42,))
        output = self._sample(bench, [10, 42, 12])
        assert output.new_token_ids["r"] == [10, 42]
        assert (output.finished["r"].reason, output.finished["r"].stop_token_id) == (FinishReason.STOP, 42)

    def test_update_max_tokens_cuts_what_follows(self) -> None:
        bench = EngineBench()
        bench.add("r", [5, 6], max_tokens=2)
        output = self._sample(bench, [10, 11, 12])
        assert output.new_token_ids["r"] == [10, 11]
        assert output.finished["r"].reason is FinishReason.LENGTH

    def test_update_ignore_eos_goes_on(self) -> None:
        bench = EngineBench()
        bench.add("r", [5, 6], max_tokens=10, ignore_eos=True)
        assert self._sample(bench, [EOS_TOKEN_ID]).finished == {}

    @pytest.mark.parametrize("token_id", [EOS_TOKEN_ID, 42])
    def test_update_min_tokens_holds_stops_back(self, token_id: int) -> None:
        bench = EngineBench()
        bench.add("r", [5, 6], max_tokens=10, min_tokens=5, stop_token_ids=(42,))
        assert self._sample(bench, [10, 11, token_id]).finished == {}
        assert self._sample(bench, [12, token_id]).finished["r"].reason is FinishReason.STOP

    def test_update_model_length_ends_request(self) -> None:
        bench = EngineBench(num_blocks=4, block_size=4)  # 16 tokens
        bench.add("r", unique_prompt(1, 10), max_tokens=100)
        bench.run()
        assert bench.finished["r"].reason is FinishReason.LENGTH
        assert len(bench.tokens["r"]) == 6
        bench.assert_nothing_leaked()


class TestPriorityAndPreemption:
    def test_schedule_priority_then_arrival_decides_order(self) -> None:
        bench = EngineBench(policy="priority")
        for name, priority in (("a", 2), ("b", 1), ("c", 1), ("d", 0)):
            bench.add(name, unique_prompt(ord(name), 6), priority=priority)
        bench.step()
        assert list(scheduled(bench)) == ["d", "b", "c", "a"]

    def test_schedule_fcfs_ignores_priority(self) -> None:
        bench = EngineBench(policy="fcfs")
        for name, priority in (("a", 2), ("b", 0)):
            bench.add(name, unique_prompt(ord(name), 6), priority=priority)
        bench.step()
        assert list(scheduled(bench)) == ["a", "b"]

    def test_schedule_high_priority_needs_block_low_priority_is_preempted(self) -> None:
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

    def test_schedule_pool_full_youngest_is_preempted_and_resumes_by_prefix_hit(self) -> None:
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

    def test_schedule_victim_blocks_pinned_by_saves_nobody_is_preempted_in_vain(self) -> None:
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

    def test_schedule_youngest_with_pinned_blocks_waits_and_never_preempts_an_older_one(self) -> None:
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

    def test_reset_prefix_cache_declines_while_in_use_and_forced_keeps_order(self) -> None:
        bench = EngineBench()
        for name in ("a", "b", "c"):
            bench.add(name, unique_prompt(ord(name), 9), max_tokens=20)
        bench.step()
        assert bench.engine.try_reset_prefix_cache() is False
        assert bench.engine.try_reset_prefix_cache(force=True) is True
        bench.step()
        assert scheduled(bench) == {"a": 10, "b": 10, "c": 10}, "in their order, from the start"
        bench.run()
        assert all(bench.tokens[name] == oracle_tokens(unique_prompt(ord(name), 9), 20) for name in ("a", "b", "c"))
        bench.assert_nothing_leaked()


class TestPrefixCache:
    def test_admit_common_prefix_shares_blocks(self) -> None:
        bench = EngineBench(num_blocks=10, block_size=16)
        common = list(range(100, 148))
        bench.add("r0", common + [1] * 7, max_tokens=20)
        bench.step()
        bench.add("r1", common + [2] * 5, max_tokens=20)
        bench.step()
        assert scheduled(bench) == {"r0": 1, "r1": 5}
        r0, r1 = (bench.engine._scheduler.requests[name] for name in ("r0", "r1"))
        assert r0.block_ids[:3] == r1.block_ids[:3]
        assert [bench.engine._pool.ref_count(block_id) for block_id in r1.block_ids] == [2, 2, 2, 1]
        assert bench.last_plan.num_common_prefix_blocks == 3

    def test_admit_same_prompt_together_is_computed_once(self) -> None:
        bench = EngineBench(num_blocks=64, block_size=4, max_num_batched_tokens=24)
        prompt = unique_prompt(1, 41)
        for name in "abcd":
            bench.add(name, prompt, max_tokens=3)
        bench.add("other", unique_prompt(2, 4), max_tokens=1)
        bench.step()
        assert list(scheduled(bench)) == ["a"], "the first takes the whole budget"
        bench.step()
        assert scheduled(bench) == {"a": 17, "other": 4}, "who waits for a's blocks does not hold up the others"
        bench.run()
        assert all(bench.tokens[name] == oracle_tokens(prompt, 3) for name in "abcd")
        assert bench.num_cached_tokens == {"a": 0, "b": 40, "c": 40, "d": 40, "other": 0}

    def test_admit_waits_for_a_prefix_whose_request_is_aborted_then_computes_it(self) -> None:
        bench = EngineBench(num_blocks=64, block_size=4, max_num_batched_tokens=16)
        prompt = unique_prompt(1, 41)
        for name in "ab":
            bench.add(name, prompt, max_tokens=3)
        bench.step()
        bench.engine.abort_request("a")
        bench.run()
        assert bench.tokens["b"] == oracle_tokens(prompt, 3)
        assert bench.num_cached_tokens["b"] == 16, "what a had finished is a hit"
        bench.assert_nothing_leaked()

    def test_admit_fully_cached_prompt_computes_its_last_block(self) -> None:
        bench = EngineBench(num_blocks=10, block_size=16)
        prompt = unique_prompt(1, 48)
        bench.add("r0", prompt, max_tokens=1)
        bench.run()
        bench.add("r1", prompt, max_tokens=1)
        bench.step()
        assert bench.num_cached_tokens["r1"] == 32
        assert scheduled(bench) == {"r1": 16}
        assert bench.tokens["r1"] == bench.tokens["r0"]

    def test_admit_other_salt_never_hits(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=16)
        for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
            bench.add(name, unique_prompt(1, 55), max_tokens=1, salt=salt)
            bench.run()
        assert bench.num_cached_tokens == {"a": 0, "b": 48, "c": 0, "d": 0}

    def test_admit_prompt_logprobs_request_computes_everything_and_still_caches(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=16)
        for name, count in (("a", None), ("b", 1), ("c", None)):
            bench.add(name, unique_prompt(1, 40), max_tokens=1, prompt_logprobs=count)
            bench.run()
        assert bench.num_cached_tokens == {"a": 0, "b": 0, "c": 32}

    def test_admit_caching_off_counts_no_queries(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=16, enable_prefix_caching=False)
        for name in ("a", "b"):
            bench.add(name, unique_prompt(1, 40), max_tokens=1)
            bench.run()
        stats = bench.engine.stats
        assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (0, 0)
        assert bench.num_cached_tokens["b"] == 0
        bench.assert_nothing_leaked()

    def test_decode_grows_by_one_block_at_a_time(self) -> None:
        bench = EngineBench(num_blocks=10, block_size=16)
        bench.add("r", unique_prompt(1, 55), max_tokens=24)
        for _ in range(4):
            bench.step()
        request = bench.engine._scheduler.requests["r"]
        assert len(request.block_ids) == 4
        assert bench.engine._pool.block_hash(request.block_ids[3]) is None
        for _ in range(16):
            bench.step()
        assert len(request.block_ids) == 5
        hashes = [bench.engine._pool.block_hash(block_id) for block_id in request.block_ids]
        assert [block_hash is not None for block_hash in hashes] == [True] * 4 + [False]


class TestExternalHits:
    def _store_with(self, prompt: list[int], block_size: int = 16) -> MemoryStore:
        store = MemoryStore()
        bench = EngineBench(num_blocks=20, block_size=block_size, connector=MemoryConnector(store))
        bench.add("seed", prompt, max_tokens=1, stage=PREFILL)
        bench.run()
        assert bench.prefill_done == ["seed"]
        return store

    def test_admit_external_hit_loads_outside_slots_and_budget(self) -> None:
        prompt = unique_prompt(1, 40)  # two and a half blocks
        connector = MemoryConnector(self._store_with(prompt), is_immediate=False)
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

    def test_admit_external_hit_of_whole_blocks_computes_the_last_one(self) -> None:
        prompt = unique_prompt(1, 32)
        bench = EngineBench(num_blocks=20, block_size=16, connector=MemoryConnector(self._store_with(prompt)))
        bench.add("r", prompt, max_tokens=1)
        bench.run()
        assert bench.num_cached_tokens["r"] == 16, "at least one token is computed, and hits are whole blocks"
        assert bench.tokens["r"] == oracle_tokens(prompt, 1)

    def test_load_in_flight_is_not_a_local_hit_and_second_request_waits_for_it(self) -> None:
        prompt = unique_prompt(1, 40)
        connector = MemoryConnector(self._store_with(prompt), is_immediate=False)
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
    def test_load_fails_behind_first_block_tail_is_recomputed(self, outcome: TransferOutcome) -> None:
        prompt = unique_prompt(1, 60)
        connector = MemoryConnector(self._store_with(prompt), is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        bench.add("r", prompt, max_tokens=3)
        bench.step()
        connector.complete(connector.started[0].transfer_id, outcome, num_ok=1)
        connector.is_immediate = True
        bench.run()
        assert bench.num_cached_tokens["r"] == 16
        assert bench.tokens["r"] == oracle_tokens(prompt, 3)
        bench.assert_nothing_leaked()

    def test_load_misses_its_deadline_request_goes_on_and_blocks_stay_pinned_until_reported(self) -> None:
        prompt = unique_prompt(1, 60)
        connector = MemoryConnector(self._store_with(prompt), is_immediate=False)
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

    def test_two_loads_that_fit_alone_but_not_together_both_finish(self) -> None:
        prompts = [unique_prompt(1, 60), unique_prompt(2, 60)]
        store = self._store_with(prompts[0])
        store.blocks.update(self._store_with(prompts[1]).blocks)
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

    def test_abort_while_loading_frees_blocks_when_the_transfer_ends(self) -> None:
        prompt = unique_prompt(1, 60)
        connector = MemoryConnector(self._store_with(prompt), is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        bench.add("r", prompt, max_tokens=3)
        bench.step()
        assert bench.engine.abort_request("r") is True
        assert bench.engine.audit().counts["transfer_pins"] == 3
        connector.complete(connector.started[0].transfer_id)
        bench.run()
        bench.assert_nothing_leaked()

    def test_lookup_of_a_request_that_has_to_queue_starts_when_it_arrives(self) -> None:
        connector = MemoryConnector()
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector, max_num_seqs=1)
        for name in ("first", "second"):
            bench.add(name, unique_prompt(ord(name[0]), 40), max_tokens=1)
        assert connector.lookups == ["second"], "the first is asked for in the step that comes at once"
        bench.step()
        assert connector.lookups == ["second", "first"]
        bench.run()
        bench.assert_nothing_leaked()

    def test_lookup_not_known_yet_steps_aside_and_gives_up_in_time(self) -> None:
        prompt = unique_prompt(1, 40)
        connector = MemoryConnector(self._store_with(prompt))
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

    def test_lookup_is_not_waited_for_longer_than_computing_takes(self) -> None:
        connector = MemoryConnector(self._store_with(unique_prompt(1, 40)))
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

    def test_prefill_stage_samples_one_token_and_reports_done_after_saves(self) -> None:
        connector = MemoryConnector(is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector, max_num_batched_tokens=32)
        prompt = unique_prompt(1, 40)
        bench.add("r", prompt, max_tokens=50, stage=PREFILL)
        bench.step()
        assert [transfer.direction for transfer in connector.started] == [TransferDirection.SAVE], "saved while computing"
        bench.step()
        assert bench.finished["r"].reason is FinishReason.LENGTH
        assert bench.tokens["r"] == oracle_tokens(prompt, 1)
        bench.step()
        assert bench.prefill_done == []
        for transfer_id in list(connector.pending):
            connector.complete(transfer_id)
        bench.step()
        assert bench.prefill_done == ["r"]
        bench.assert_nothing_leaked()

    def test_prefill_stage_handoff_is_reported_between_steps_and_waited_for_briefly(self) -> None:
        connector = MemoryConnector(is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
        assert bench.engine.handoff_wait_s() == 0.0
        bench.step()
        assert bench.engine.handoff_wait_s() > 0.0, "its save takes milliseconds, the next step may take seconds"
        for transfer_id in list(connector.pending):
            connector.complete(transfer_id)
        assert bench.engine.settle().prefill_done == ["r"]
        bench.engine.record_gauges()
        assert bench.engine.stats.kv_usage_ratio == 0.0, "metrics know it although no step follows"
        assert bench.engine.handoff_wait_s() == 0.0

    def test_prefill_stage_slow_store_does_not_hold_up_the_engine(self) -> None:
        connector = MemoryConnector(is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
        bench.step()
        bench.clock.advance(1.0)
        assert bench.engine.handoff_wait_s() == 0.0, "it had its time"
        for transfer_id in list(connector.pending):
            connector.complete(transfer_id)
        bench.run()
        assert bench.prefill_done == ["r"]

    def test_prefill_stage_store_that_hangs_is_waited_for_as_long_as_computing_takes(self) -> None:
        connector = MemoryConnector(is_immediate=False)
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        bench.engine._ledger.cost.observe_prefill(40, 0.0, 2.0)
        bench.add("r", unique_prompt(1, 40), max_tokens=50, stage=PREFILL)
        bench.step()
        bench.clock.advance(0.8)
        bench.step()
        assert bench.prefill_done == []
        bench.clock.advance(0.2)
        bench.step()
        assert bench.prefill_done == ["r"], "the decode node computes it sooner than this store stores it"
        for transfer_id in list(connector.pending):
            connector.complete(transfer_id)
        bench.run()
        bench.assert_nothing_leaked()

    def test_loads_that_hang_leave_room_to_compute_the_same_prompts(self) -> None:
        prompts = [unique_prompt(number, 60) for number in range(1, 13)]  # more blocks than the pool has
        store = self._store_with(prompts[0])
        for prompt in prompts[1:]:
            store.blocks.update(self._store_with(prompt).blocks)
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

    def test_prefill_stage_local_hit_is_saved_again_for_the_handoff(self) -> None:
        connector = MemoryConnector()
        bench = EngineBench(num_blocks=20, block_size=16, connector=connector)
        prompt = unique_prompt(1, 40)
        bench.add("a", prompt, max_tokens=5, stage=PREFILL)
        bench.run()
        connector.store.blocks.clear()  # the store evicted it
        bench.add("b", prompt, max_tokens=5, stage=PREFILL)
        bench.run()
        assert len(connector.store.blocks) == 2
        assert bench.prefill_done == ["a", "b"]

    def test_decode_blocks_are_saved_only_if_wanted(self) -> None:
        counts = []
        for is_wanted in (True, False):
            connector = MemoryConnector()
            bench = EngineBench(num_blocks=20, block_size=4, connector=connector, save_decode_blocks=is_wanted)
            bench.add("r", unique_prompt(1, 10), max_tokens=10)
            bench.run()
            counts.append(len(connector.store.blocks))
        assert counts == [4, 2]


class TestFaults:
    @pytest.mark.parametrize("call", ["lookup", "load", "save", "poll"])
    def test_connector_raises_costs_a_miss_never_the_engine(self, call: str) -> None:
        prompt = unique_prompt(1, 40)
        store = TestExternalHits()._store_with(prompt)
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

    def test_connector_keeps_failing_circuit_opens_and_closes_again(self) -> None:
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
    def test_connector_that_is_well_again_is_no_longer_complained_of_whether_or_not_it_is_used(self, is_used_again: bool) -> None:
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

    def test_runner_fails_requests_of_the_step_end_with_error_and_engine_lives(self) -> None:
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

    def test_deadline_passes_request_ends_with_error(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=4)
        bench.add("a", unique_prompt(1, 10), max_tokens=60, time_left_s=0.1)
        bench.run()
        assert (bench.finished["a"].reason, bench.finished["a"].error) == (FinishReason.ERROR, "deadline exceeded")
        bench.assert_nothing_leaked()

    def test_abort_in_every_state_leaks_nothing(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=4, max_num_seqs=1, connector=MemoryConnector())
        bench.add("running", unique_prompt(1, 10), max_tokens=50)
        bench.add("waiting", unique_prompt(2, 10), max_tokens=50)
        bench.step()
        assert bench.engine.abort_request("running") and bench.engine.abort_request("waiting")
        assert bench.engine.abort_request("unknown") is False
        bench.run()
        bench.assert_nothing_leaked()


class TestIntake:
    @pytest.mark.parametrize(
        ("keywords", "field"),
        [
            ({"prompt": []}, "prompt"),
            ({"prompt": [5000]}, "prompt"),
            ({"prompt": [-1]}, "prompt"),
            ({"prompt": [1] * 80}, "prompt"),
            ({"prompt": [1], "output": [1, 2], "max_tokens": 2}, "max_tokens"),
            ({"prompt": [1], "top_p": 0.0}, "top_p"),
        ],
    )
    def test_add_request_bad_input_names_the_field(self, keywords: dict[str, object], field: str) -> None:
        bench = EngineBench(num_blocks=20, block_size=4)
        with pytest.raises(InvalidInputError) as caught:
            bench.add("r", **keywords)  # type: ignore[arg-type]
        assert caught.value.field == field
        assert bench.engine.has_work() is False

    def test_add_request_queue_full_declines(self) -> None:
        bench = EngineBench(num_blocks=20, block_size=4, max_num_waiting=2)
        bench.add("a", [1, 2])
        bench.add("b", [1, 2])
        with pytest.raises(OverloadedError):
            bench.add("c", [1, 2])

    def test_request_moved_mid_stream_continues_exactly(self) -> None:
        prompt = unique_prompt(1, 10)
        whole = oracle_tokens(prompt, 12)
        bench = EngineBench(num_blocks=20, block_size=4)
        bench.add("r", prompt, max_tokens=12, output=whole[:5])
        outputs = [bench.step() for _ in range(7)]
        assert bench.tokens["r"] == whole[5:]
        assert [output.first_index["r"] for output in outputs] == [5, 6, 7, 8, 9, 10, 11]
