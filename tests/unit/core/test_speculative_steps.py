"""Drafts in the scheduler: what is verified, kept, rolled back, hashed and saved."""

from __future__ import annotations

import random

import pytest

from core.request import FinishReason
from core.step import StepPlan, StepResult, TokenLogprob
from tests.support.engine_bench import PREFILL, EngineBench
from tests.support.fake_runner import FakeRunner, oracle_tokens
from tests.support.guessing_drafter import OracleDrafter
from tests.support.memory_connector import MemoryConnector, MemoryStore

PROMPT = [5, 6, 7, 8, 9]


class FixedDrafter(OracleDrafter):
    """num_right right tokens, then wrong ones."""

    def __init__(self, num_tokens: int, num_right: int) -> None:
        super().__init__(num_tokens, random.Random(0))
        self._num_right = num_right

    def propose(self, request_id: str, token_ids, max_tokens: int) -> list[int]:  # type: ignore[no-untyped-def]
        """See OracleDrafter."""
        prompt = self.prompts[request_id]
        num_output, num_wanted = len(token_ids) - len(prompt), min(self._num_tokens, max_tokens)
        right = oracle_tokens(prompt, num_output + num_wanted)[num_output:]
        return [token if place < self._num_right else token % 999 + 1 for place, token in enumerate(right)]


def bench_with(num_tokens: int, num_right: int, **options: object) -> EngineBench:
    drafter = FixedDrafter(num_tokens, num_right)
    bench = EngineBench(drafter=drafter, **options)  # type: ignore[arg-type]
    drafter.prompts["a"] = PROMPT
    return bench


@pytest.mark.parametrize(("num_right", "num_steps"), [(0, 13), (1, 7), (3, 4), (2, 5)])
def test_drafts_same_tokens_in_as_many_steps_as_acceptance_allows(num_right: int, num_steps: int) -> None:
    bench = bench_with(3, num_right)
    bench.add("a", PROMPT, max_tokens=13)
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(PROMPT, 13)
    assert len([plan for plan in bench.runner.plans if plan.num_total_tokens]) == num_steps
    stats = bench.engine.stats
    assert stats.num_generation_tokens == 13
    assert sum(stats.accepted_by_position.values()) == 13 - num_steps
    assert stats.num_drafts < num_steps, "the last token needs no draft, the first had none"
    bench.assert_nothing_leaked()


def test_drafts_rejected_ones_are_in_no_hashed_block_and_no_save() -> None:
    store = MemoryStore()
    bench = bench_with(6, 2, connector=MemoryConnector(store, is_immediate=True), block_size=2)
    bench.add("a", PROMPT, max_tokens=12)
    bench.run()
    plain = EngineBench(connector=MemoryConnector(MemoryStore(), is_immediate=True), block_size=2)
    plain.add("a", PROMPT, max_tokens=12)
    plain.run()
    assert plain.connector is not None
    assert store.blocks == plain.connector.store.blocks  # names and bytes
    assert len(store.blocks) == (5 + 12 - 1) // 2
    bench.assert_nothing_leaked()


def test_drafts_never_go_past_max_tokens_nor_past_the_budget() -> None:
    bench = bench_with(8, 8, max_num_seqs=2, max_num_batched_tokens=4)
    bench.add("a", PROMPT, max_tokens=10)
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(PROMPT, 10)
    assert max(plan.num_total_tokens for plan in bench.runner.plans) == 4
    for plan in bench.runner.plans:
        for request_id, drafts in plan.draft_token_ids.items():
            assert plan.num_scheduled_tokens[request_id] == len(drafts) + 1
    bench.assert_nothing_leaked()


def test_drafts_stop_token_among_accepted_ones_ends_the_request_there() -> None:
    right = oracle_tokens(PROMPT, 13)
    bench = bench_with(5, 5)
    bench.add("a", PROMPT, max_tokens=13, stop_token_ids=(right[3],))
    bench.run()
    assert bench.tokens["a"] == right[:4]
    assert bench.finished["a"].reason is FinishReason.STOP
    assert bench.finished["a"].stop_token_id == right[3]
    bench.assert_nothing_leaked()


def test_drafts_a_guess_takes_no_block_from_anybody() -> None:
    """a's draft would need a block, of which there is none: it goes on by one token, and b keeps its blocks."""
    drafter = FixedDrafter(4, 4)
    bench = EngineBench(drafter=drafter, num_blocks=4, block_size=4, max_model_len=16)
    drafter.prompts.update({"a": PROMPT[:4], "b": [9, 8, 7, 6]})
    bench.add("a", PROMPT[:4], max_tokens=4)
    bench.add("b", [9, 8, 7, 6], max_tokens=4)
    bench.run()
    assert bench.engine.stats.num_preemptions == 0
    assert bench.tokens == {"a": oracle_tokens(PROMPT[:4], 4), "b": oracle_tokens([9, 8, 7, 6], 4)}
    bench.assert_nothing_leaked()


def test_drafts_prefill_stage_request_samples_one_token_and_drafts_none() -> None:
    bench = bench_with(5, 5, connector=MemoryConnector(MemoryStore(), is_immediate=True))
    bench.add("a", PROMPT, max_tokens=10, stage=PREFILL)
    bench.run()
    assert bench.tokens["a"] == oracle_tokens(PROMPT, 1)
    assert not any(plan.draft_token_ids for plan in bench.runner.plans)


def test_drafts_preempted_request_forgets_its_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = FixedDrafter(3, 3)
    bench = EngineBench(drafter=drafter, num_blocks=6, block_size=4, max_model_len=24)
    for name, first in (("a", 5), ("b", 6)):
        drafter.prompts[name] = [first, 7, 8, 9]
        bench.add(name, [first, 7, 8, 9], max_tokens=14)
    bench.run()
    assert bench.engine.stats.num_preemptions > 0
    assert bench.tokens == {name: oracle_tokens([first, 7, 8, 9], 14) for name, first in (("a", 5), ("b", 6))}
    bench.assert_nothing_leaked()


def test_drafts_log_probabilities_stay_parallel_to_the_tokens_that_are_kept() -> None:
    class WithLogprobs(FakeRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            pairs = zip(plan.num_scheduled_tokens, result.sampled_token_ids, strict=True)
            logprobs = {name: [TokenLogprob(token, -1.0, 1) for token in tokens] for name, tokens in pairs}
            return StepResult(result.sampled_token_ids, logprobs)

    right = oracle_tokens(PROMPT, 13)
    bench = bench_with(5, 5)
    runner = WithLogprobs(bench.pool)
    bench.engine._steps._runner = runner
    bench.add("a", PROMPT, max_tokens=13, stop_token_ids=(right[8],), logprobs=0)
    told: list[int] = []
    while bench.engine.has_work():
        output = bench.step()
        told += [item.token_id for item in output.logprobs.get("a", [])]
    assert told == bench.tokens["a"] == right[:9]


def test_drafts_request_that_moves_on_after_a_save_of_decode_blocks_hits_them() -> None:
    """What was stored while drafting is what any other engine wants."""
    store = MemoryStore()
    bench = bench_with(4, 2, connector=MemoryConnector(store, is_immediate=True), block_size=2)
    bench.add("a", PROMPT, max_tokens=9)
    bench.run()
    other = EngineBench(connector=MemoryConnector(store, is_immediate=True), block_size=2, kv_load_policy="always")
    known = oracle_tokens(PROMPT, 8)
    other.add("a", PROMPT, max_tokens=12, output=known)
    other.run()
    assert other.tokens["a"] == oracle_tokens(PROMPT, 12)[8:]
    assert other.num_cached_tokens["a"] == 12


def test_drafts_are_made_in_batches_up_to_the_limit_only() -> None:
    drafter = FixedDrafter(3, 3)
    bench = EngineBench(drafter=drafter, speculative_disable_by_batch_size=2)
    prompts = {name: [first, 7, 8, 9] for name, first in (("a", 5), ("b", 6), ("c", 4))}
    drafter.prompts.update(prompts)
    for name, max_tokens in (("a", 20), ("b", 20), ("c", 5)):
        bench.add(name, prompts[name], max_tokens=max_tokens)
    bench.run()
    for plan in bench.runner.plans:
        assert not plan.draft_token_ids or "c" not in plan.num_scheduled_tokens, "three were running"
    assert any(plan.draft_token_ids for plan in bench.runner.plans), "then two were"
    assert bench.tokens == {name: oracle_tokens(prompt, 5 if name == "c" else 20) for name, prompt in prompts.items()}
