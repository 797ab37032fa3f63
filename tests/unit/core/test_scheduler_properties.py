"""Random histories of the scheduler against a plain model (scheduler_rig.py), and planted bugs, which it must find.

CI runs the same examples every time. SCHEDULER_EXAMPLES=5000 runs that many new ones (with --timeout=7200).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from core import scheduler as scheduler_module
from core.blocks_in_progress import BlocksInProgress
from core.drafter import DraftedRequests
from core.kv.block_pool import BlockPool
from core.kv.ledger import TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.request import Request
from core.scheduler import Scheduler
from core.step import StepPlan
from core.step_output import StepOutput
from tests.unit.core.scheduler_machine import SETTINGS, SchedulerMachine


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
    original = DraftedRequests.roll_back

    def roll_back(drafted: DraftedRequests, request: Request, drafts: list[int], num_kept: int) -> None:
        num_written = request.num_written_tokens
        original(drafted, request, drafts, num_kept)
        request.num_written_tokens = num_written

    patch.setattr(DraftedRequests, "roll_back", roll_back)


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
            del scheduler._admissions._loading.get(end.transfer.transfer_id, [])[1:]

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
    original = scheduler_module.find_end

    def find_end(request: Request, num_new: int) -> tuple[Any, int]:
        is_full = len(request.token_ids) >= request.max_total_tokens
        return original(request, num_new) if is_full else (None, num_new)

    patch.setattr(scheduler_module, "find_end", find_end)


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
