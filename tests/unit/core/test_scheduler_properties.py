"""Random histories of the scheduler against a plain model (scheduler_rig.py), and planted bugs, which it must find.

CI runs the same examples every time. SCHEDULER_EXAMPLES=5000 runs that many new ones (with --timeout=7200).
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from core.blocks_in_progress import BlocksInProgress
from core.kv.block_pool import BlockPool
from core.kv.connector import TransferDirection, TransferOutcome, TransferResult
from core.kv.ledger import TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.request import Request
from core.scheduler import Scheduler
from core.step import StepPlan
from core.step_output import StepOutput
from tests.unit.core.scheduler_rig import SchedulerRig, with_options

CI_EXAMPLES = 120
EXAMPLES = int(os.environ.get("SCHEDULER_EXAMPLES", "0"))
SETTINGS = settings(
    max_examples=EXAMPLES or CI_EXAMPLES,
    stateful_step_count=60,
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
MAX_MODEL_LEN = 40
FATES_OF_LOADS = ["ok", "ok", "wait", "short", "short", "fail"]
FATES_OF_SAVES = ["ok", "ok", "ok", "wait", "fail", "early", "release"]

tokens = st.integers(min_value=1, max_value=3)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests, steps, transfers and faults in any order. only_steps, only_store: what begin() takes in place of what it drew."""

    rig: SchedulerRig
    only_steps = ""
    only_store = ""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        pool_tokens=st.integers(MAX_MODEL_LEN, 2 * MAX_MODEL_LEN),
        max_num_seqs=st.integers(1, 6),
        extra_budget=st.sampled_from([0, 4, 40]),
        limits=st.sampled_from([(0, 0, True), (0, 0, True), (3, 0, True), (7, 0, True), (7, 1, True), (0, 0, False)]),
        policy=st.sampled_from([("fcfs", 0.0), ("priority", 0.0), ("priority", 0.1)]),
        delay_factor=st.sampled_from([0.0, 0.0, 0.0, 2.5]),
        caches=st.sampled_from([True, True, True, False]),
        store=st.sampled_from(["none", "auto", "always", "always"]),
        timeout_s=st.sampled_from([0.05, 10.0]),
        steps=st.sampled_from(["one", "overlap", "overlap", "drafts"]),
    )
    def begin(
        self,
        block_size: int,
        pool_tokens: int,
        max_num_seqs: int,
        extra_budget: int,
        limits: tuple[int, int, bool],
        policy: tuple[str, float],
        delay_factor: float,
        caches: bool,
        store: str,
        timeout_s: float,
        steps: str,
    ) -> None:
        steps, store = self.only_steps or steps, self.only_store or store
        options = with_options(
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            long_prefill_token_threshold=limits[0],
            max_long_partial_prefills=limits[1],
            enable_chunked_prefill=limits[2],
            policy=policy[0],
            priority_aging_s=policy[1],
            scheduler_delay_factor=delay_factor,
            enable_prefix_caching=caches,
            kv_load_policy="auto" if store == "none" else store,
            kv_load_timeout_s=timeout_s,
            kv_save_timeout_s=timeout_s,
            lookup_timeout_s=0.1,
            overlap_steps="on" if steps == "overlap" else "off",
        )
        num_blocks = -(-pool_tokens // block_size)
        has_store = store != "none"
        self.rig = SchedulerRig(options, num_blocks, MAX_MODEL_LEN, has_store=has_store, num_drafts=3 * (steps == "drafts"))

    @rule(
        family=st.integers(1, 2),
        num_shared=st.integers(0, 24),
        tail=st.lists(tokens, max_size=8),
        num_known=st.sampled_from([0, 0, 1, 3]),
        num_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "tenant"]),
        priority=st.integers(-1, 2),
        stop_at=st.sampled_from([-1, -1, 0, 2, 5]),
        is_prefill=st.sampled_from([False, False, True]),
        num_copies=st.sampled_from([1, 1, 2]),
    )
    def add(
        self,
        family: int,
        num_shared: int,
        tail: list[int],
        num_known: int,
        num_tokens: int,
        salt: str,
        priority: int,
        stop_at: int,
        is_prefill: bool,
        num_copies: int,
    ) -> None:
        prompt = (*range(100 * family, 100 * family + num_shared), *tail) or (5,)
        for _ in range(num_copies):
            self.rig.add(prompt, num_known, num_tokens, salt, priority, stop_at, is_prefill=is_prefill)

    @precondition(lambda self: self.rig.expected)
    @rule(which=st.integers(0, 10))
    def abort(self, which: int) -> None:
        names = list(self.rig.expected)
        self.rig.abort(names[which % len(names)])

    @rule(num_steps=st.integers(1, 5))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rig.may_schedule:
                self.rig.schedule()
                self.rig.check_blocks()
            if self.rig.steps:
                self.rig.finish()
                self.rig.check_blocks()

    @rule(seed=st.integers(0, 10**6), num_steps=st.integers(5, 25))
    def rough_time(self, seed: int, num_steps: int) -> None:
        """Many steps, with requests that come and go, and something that goes wrong at each."""
        rng, rig = random.Random(seed), self.rig
        for _ in range(num_steps):
            if rng.random() < 0.4:
                start = 100 * rng.randint(1, 2)
                prompt = (*range(start, start + rng.randint(0, 24)), *rng.choices([1, 2, 3], k=rng.randint(1, 8)))
                stop_at, salt, known = rng.randint(-9, 9), rng.choice(["", "", "tenant"]), rng.choice([0, 0, 2])
                rig.add(prompt, known, rng.randint(1, 20), salt, rng.randint(-1, 2), stop_at, is_prefill=rng.random() < 0.2)
            if rig.expected and rng.random() < 0.05:
                rig.abort(rng.choice(list(rig.expected)))
            if rng.random() < 0.1:
                rig.clock.advance(0.1)
            self._end_transfers(TransferDirection.LOAD, rng.choices(FATES_OF_LOADS, k=3))
            self._end_transfers(TransferDirection.SAVE, rng.choices(FATES_OF_SAVES, k=3))
            if rig.may_schedule:
                rig.schedule()
                rig.check_blocks()
            if rig.steps and rng.random() < 0.7:
                rig.finish(fails=rng.random() < 0.02)
                rig.check_blocks()

    @precondition(lambda self: self.rig.may_schedule)
    @rule()
    def schedule_ahead(self) -> None:
        self.rig.schedule()

    @precondition(lambda self: self.rig.steps)
    @rule()
    def finish_one(self) -> None:
        self.rig.finish()

    @precondition(lambda self: self.rig.steps)
    @rule()
    def fail_step(self) -> None:
        self.rig.finish(fails=True)

    @rule(fates=st.lists(st.sampled_from(FATES_OF_LOADS), min_size=1, max_size=3))
    def end_loads(self, fates: list[str]) -> None:
        self._end_transfers(TransferDirection.LOAD, fates)

    @rule(fates=st.lists(st.sampled_from(FATES_OF_SAVES), min_size=1, max_size=6))
    def end_saves(self, fates: list[str]) -> None:
        self._end_transfers(TransferDirection.SAVE, fates)

    def _end_transfers(self, direction: TransferDirection, fates: list[str]) -> None:
        connector = self.rig.connector
        transfers = [transfer for transfer in connector.pending.values() if transfer.direction is direction]
        for fate, transfer in zip(fates, transfers, strict=False):
            transfer_id, num_blocks = transfer.transfer_id, len(transfer.block_ids)
            if fate == "ok":
                connector.complete(transfer_id, wants_save=transfer_id % 3 == 0)
            elif fate == "short":
                connector.complete(transfer_id, TransferOutcome.CORRUPT, num_blocks // 2)
            elif fate == "fail":
                connector.complete(transfer_id, TransferOutcome.ERROR, 0)
                connector.report(TransferResult(transfer_id, num_blocks, TransferOutcome.OK))  # a second time, and not true
            elif fate == "early":
                connector.report_early(TransferResult(transfer_id, num_blocks, TransferOutcome.OK))
            elif fate == "release":
                connector.release(transfer_id)

    @rule(is_known=st.sampled_from([True, True, False]), fails=st.sampled_from(["", "", "", "lookup", "load", "save", "poll"]))
    def change_store(self, is_known: bool, fails: str) -> None:
        self.rig.connector.is_lookup_known = is_known
        self.rig.connector.fail_calls = {fails} - {""}

    @precondition(lambda self: self.rig.connector.store.blocks)
    @rule(which=st.integers(0, 100))
    def evict_from_store(self, which: int) -> None:
        stored = self.rig.connector.store.blocks
        del stored[list(stored)[which % len(stored)]]

    @rule(family=st.integers(1, 2), salt=st.sampled_from(["", "tenant"]))
    def store_elsewhere(self, family: int, salt: str) -> None:
        self.rig.store(tuple(range(100 * family, 100 * family + 24)), salt)

    @rule(seconds=st.sampled_from([0.01, 0.06, 1.0]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)

    @rule(force=st.booleans())
    def reset_prefix_cache(self, force: bool) -> None:
        self.rig.reset(force=force)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if hasattr(self, "rig"):
            self.rig.check_blocks()

    def teardown(self) -> None:
        if hasattr(self, "rig") and sys.exc_info()[0] is None:  # else it would hide what went wrong
            self.rig.drain()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Steps and stores that are told to fail say so at length."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_scheduler_any_history_agrees_with_a_plain_model() -> None:
    run_state_machine_as_test(SchedulerMachine, settings=SETTINGS)


# -- planted bugs ------------------------------------------------------------------------------------------------------
Patch = Callable[[pytest.MonkeyPatch], None]


def _wrap(
    patch: pytest.MonkeyPatch, owner: type, name: str, before: Callable[..., Any] | None, after: Callable[..., Any]
) -> None:
    """Replace a method by one that does `before`, the original, and then returns `after(result, *arguments)`."""
    original = getattr(owner, name)

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if before is not None:
            before(*arguments)
        return after(original(*arguments, **keywords), *arguments)

    patch.setattr(owner, name, replaced)


def hashed_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    def pretend(_kv: KVCacheManager, request: Request) -> None:
        request.num_written_tokens = request.num_computed_tokens

    _wrap(patch, KVCacheManager, "commit", pretend, lambda result, *_: result)


def hit_leaves_nothing_to_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCacheManager, "max_hit_blocks", lambda kv, request: len(request.token_ids) // kv.block_size)


def salt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def forget_salt(_scheduler: Scheduler, request: Request) -> None:
        request.root_hash = bytes(16)

    _wrap(patch, Scheduler, "add_request", forget_salt, lambda result, *_: result)


def blocks_return_while_steps_write_them(patch: pytest.MonkeyPatch) -> None:
    def release(kv: KVCacheManager, request: Request) -> None:
        kv.pool.release_references(reversed(request.block_ids))
        request.block_ids, request.num_committed_blocks = [], 0

    patch.setattr(KVCacheManager, "release", release)


def rejected_drafts_count_as_written(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._roll_back_rejected

    def roll_back(scheduler: Scheduler, request: Request, drafts: list[int], num_kept: int) -> None:
        num_written = request.num_written_tokens
        original(scheduler, request, drafts, num_kept)
        request.num_written_tokens = num_written

    patch.setattr(Scheduler, "_roll_back_rejected", roll_back)


def failed_step_is_kept(patch: pytest.MonkeyPatch) -> None:
    def keep(scheduler: Scheduler, plan: StepPlan, _error: str, _output: StepOutput) -> None:
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            if request := scheduler.requests.get(request_id):
                request.num_written_tokens += num_tokens
                scheduler._kv.commit(request)

    _wrap(patch, Scheduler, "fail_step", keep, lambda result, *_: result)


def runner_is_not_told_who_was_preempted(patch: pytest.MonkeyPatch) -> None:
    _wrap(patch, Scheduler, "schedule", None, lambda plan, *_: dataclasses.replace(plan, preempted_request_ids=[]))


def too_many_tokens(patch: pytest.MonkeyPatch) -> None:
    _widen(patch, max_num_batched_tokens=1)


def too_many_requests(patch: pytest.MonkeyPatch) -> None:
    _widen(patch, max_num_seqs=1)


def _widen(patch: pytest.MonkeyPatch, **more: int) -> None:
    original = Scheduler.__init__

    def init(scheduler: Scheduler, options: Any, *arguments: Any) -> None:
        wider = {name: getattr(options, name) + amount for name, amount in more.items()}
        patched = object.__new__(type(options))
        for leaf in dataclasses.fields(options):
            object.__setattr__(patched, leaf.name, wider.get(leaf.name, getattr(options, leaf.name)))
        original(scheduler, patched, *arguments)

    patch.setattr(Scheduler, "__init__", init)


def last_come_first_served(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "schedule_key", property(lambda request: (request.rank, -request.arrival_index)))


def priority_is_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_rank", lambda scheduler, request: 0.0)


def only_the_first_waiter_of_a_load_is_woken(patch: pytest.MonkeyPatch) -> None:
    def forget(scheduler: Scheduler, ended: list[Any]) -> None:
        for end in ended:
            del scheduler._loading.get(end.transfer.transfer_id, [])[1:]

    _wrap(patch, Scheduler, "on_transfers_ended", forget, lambda result, *_: result)


def what_a_load_did_not_bring_is_hashed(patch: pytest.MonkeyPatch) -> None:
    original = TransferLedger._hash_loaded
    patch.setattr(
        TransferLedger,
        "_hash_loaded",
        lambda ledger, transfer, result: original(
            ledger, transfer, dataclasses.replace(result, num_blocks_ok=len(transfer.block_ids) if result.num_blocks_ok else 0)
        ),
    )


def saves_pin_nothing(patch: pytest.MonkeyPatch) -> None:
    def let_go(transfer_id: int | None, ledger: TransferLedger, *_: Any) -> int | None:
        if transfer_id is not None:
            ledger._unpin([transfer_id])
        return transfer_id

    _wrap(patch, TransferLedger, "start_save", None, let_go)


def who_ended_still_fills_its_block(patch: pytest.MonkeyPatch) -> None:
    original = BlocksInProgress.withdraw
    patch.setattr(BlocksInProgress, "withdraw", lambda blocks, request: request.block_ids and original(blocks, request))


def tail_of_a_table_leaks(patch: pytest.MonkeyPatch) -> None:
    def lose(_kv: KVCacheManager, request: Request) -> None:
        if len(request.block_ids) > 4:
            request.block_ids.pop()

    _wrap(patch, KVCacheManager, "release", lose, lambda result, *_: result)


def own_hit_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def allocate(kv: KVCacheManager, request: Request, hit: list[int], num_tokens: int) -> bool:
        new = kv.pool.try_allocate(kv.num_blocks_for(num_tokens) - len(hit))
        if new is None:
            return False
        kv.pool._free_hashed.update(dict.fromkeys(block_id for block_id in hit if kv.pool.ref_count(block_id) == 0))
        kv.pool.add_references(hit)
        request.block_ids, request.num_committed_blocks = [*hit, *new], len(hit)
        return True

    patch.setattr(KVCacheManager, "try_allocate_table", allocate)


def evicted_block_can_be_hit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "_forget_hash", lambda pool, block_id: pool._hash_by_block.__setitem__(block_id, None))


def stop_tokens_are_overlooked(patch: pytest.MonkeyPatch) -> None:
    original = Scheduler._find_end

    def find_end(request: Request, num_new: int) -> tuple[Any, int]:
        is_full = len(request.token_ids) >= request.max_total_tokens
        return original(request, num_new) if is_full else (None, num_new)

    patch.setattr(Scheduler, "_find_end", staticmethod(find_end))


IN_OVERLAPPED_STEPS: tuple[Patch, ...] = (hashed_before_it_is_written, blocks_return_while_steps_write_them)
IN_DRAFTS: tuple[Patch, ...] = (rejected_drafts_count_as_written,)
IN_TRANSFERS: tuple[Patch, ...] = (
    only_the_first_waiter_of_a_load_is_woken,
    what_a_load_did_not_bring_is_hashed,
    saves_pin_nothing,
)
ANYWHERE: tuple[Patch, ...] = (
    hit_leaves_nothing_to_compute,
    salt_is_ignored,
    failed_step_is_kept,
    runner_is_not_told_who_was_preempted,
    too_many_tokens,
    too_many_requests,
    last_come_first_served,
    priority_is_ignored,
    who_ended_still_fills_its_block,
    tail_of_a_table_leaks,
    own_hit_is_evicted,
    evicted_block_can_be_hit,
    stop_tokens_are_overlooked,
)


@pytest.mark.parametrize("plant", (*IN_OVERLAPPED_STEPS, *IN_DRAFTS, *IN_TRANSFERS, *ANYWHERE), ids=lambda plant: plant.__name__)
def test_scheduler_planted_bug_is_found(plant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    monkeypatch.setattr(
        SchedulerMachine, "only_steps", "overlap" if plant in IN_OVERLAPPED_STEPS else "drafts" if plant in IN_DRAFTS else ""
    )
    monkeypatch.setattr(SchedulerMachine, "only_store", "always" if plant in IN_TRANSFERS else "")
    first_only = settings(SETTINGS, max_examples=1_000, phases=[Phase.generate], report_multiple_bugs=False, print_blob=False)
    with pytest.raises(Exception) as caught:  # what the broken parts raise, or the plain model
        run_state_machine_as_test(SchedulerMachine, settings=first_only)
    print(f"{plant.__name__}: {type(caught.value).__name__}: {caught.value}")
