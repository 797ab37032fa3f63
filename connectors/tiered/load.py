"""Loads over several tiers: the run from each block on from the fastest tier that has it, or from the next where that fails.

Not safe for threads: whoever calls holds the tiered connector's lock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from connectors.tiered.tier import Tier, sub_transfer
from connectors.tiered.tier_set import MAX_RUNS, Questions, Report, TierSet
from core.kv.connector import PrefixLookup, Transfer, TransferOutcome, TransferResult

_NOBODY = -1


@dataclass(slots=True)
class _Run:
    """Blocks start to end of a load, on their way from one tier. tried: tiers that had failed at `start` before."""

    tier: Tier
    start: int
    end: int
    tried: frozenset[int]
    is_hung: bool = False


@dataclass(slots=True)
class _Load:
    transfer: Transfer
    chain: list[bytes]  # ancestors of the transfer's blocks, then these
    num_ancestors: int
    started_s: float
    sources: list[int]  # by block: the tier that brought it
    end: int  # the first block that no tier has, as far as found out
    runs: dict[int, _Run] = field(default_factory=dict)  # by the child's transfer id
    outcomes: dict[int, list[TransferOutcome]] = field(default_factory=dict)  # by the block at which a run ended
    num_bytes: int = 0
    is_reported: bool = False

    def num_ok(self) -> int:
        """Leading blocks that have arrived."""
        return next((index for index, source in enumerate(self.sources) if source == _NOBODY), len(self.sources))


class TieredLoads:
    """All loads in flight. Each ends with report(); report_early() comes before where all that is left hangs in some tier."""

    def __init__(self, tiers: TierSet, report: Report, report_early: Report, is_promoting: bool) -> None:
        self._tiers = tiers
        self._report = report
        self._report_early = report_early
        self._is_promoting = is_promoting
        self._load_by_child: dict[int, _Load] = {}

    def start(self, transfer: Transfer) -> None:
        """Begin a load."""
        ancestors = self._tiers.chains.note_transfer(transfer.request_id, transfer.block_hashes)
        num_blocks = len(transfer.block_ids)
        chain = [*ancestors, *transfer.block_hashes]
        load = _Load(transfer, chain, len(ancestors), self._tiers.clock.now_s(), [_NOBODY] * num_blocks, num_blocks)
        self._fetch(load, 0, num_blocks, frozenset())
        self._end_if_done(load)

    def on_result(self, child: Transfer, result: TransferResult) -> bool:
        """A child's transfer ended. False when it is none of ours."""
        load = self._load_by_child.pop(child.transfer_id, None)
        if load is None:
            return False
        run = load.runs.pop(child.transfer_id)
        reached = run.start + result.num_blocks_ok
        # A tier that would like to have what it brought itself counts as slower than it is.
        load.sources[run.start : reached] = [run.tier.index + result.wants_save] * result.num_blocks_ok
        load.num_bytes += result.moved_bytes
        if reached < run.end:
            load.outcomes.setdefault(reached, []).append(result.outcome)
            is_worth_it = reached < load.end and self._tiers.clock.now_s() < load.transfer.deadline_s and not load.is_reported
            if is_worth_it and not self._tiers.is_closed:
                tried = run.tried if reached == run.start else frozenset()
                self._fetch(load, reached, run.end, tried | {run.tier.index})
        self._end_if_done(load)
        return True

    def on_hung(self, child: Transfer) -> None:
        """A child says nothing of its transfer. Its blocks are lost to the load, which keeps their memory until it does."""
        load = self._load_by_child.get(child.transfer_id)
        if load is not None:
            run = load.runs[child.transfer_id]
            run.is_hung = True
            load.outcomes.setdefault(run.start, []).append(TransferOutcome.TIMEOUT)
            self._end_if_done(load)

    def _fetch(self, load: _Load, start: int, end: int, tried: frozenset[int]) -> None:
        """Start runs for blocks start to end, where `tried` have failed at the first."""
        transfer = load.transfer
        questions = Questions(PrefixLookup(transfer.request_id, load.chain, self._block_size))
        position, num_runs = start, 0
        while position < end and num_runs < MAX_RUNS:
            without = tried if position == start else frozenset()
            tier, count = self._tiers.find_run(questions, load.num_ancestors + position, without)
            if tier is None:
                break
            stop = min(end, position + count) if count else end
            deadline_s = self._tiers.child_deadline_s(transfer)
            child = sub_transfer(transfer, self._tiers.child_id(), range(position, stop), deadline_s)
            load.runs[child.transfer_id] = _Run(tier, position, stop, without)
            self._load_by_child[child.transfer_id] = load
            if tier.start(child):
                position, num_runs = stop, num_runs + 1
                continue
            del load.runs[child.transfer_id], self._load_by_child[child.transfer_id]
            load.outcomes.setdefault(position, []).append(TransferOutcome.ERROR)
            if position != start:
                break
            tried |= {tier.index}
        if position < end:
            load.end = min(load.end, position)

    def _end_if_done(self, load: _Load) -> None:
        if load.runs and (load.is_reported or not all(run.is_hung for run in load.runs.values())):
            return
        transfer, num_ok = load.transfer, load.num_ok()
        is_complete = num_ok == len(transfer.block_ids)
        outcome = TransferOutcome.OK if is_complete else self._tiers.why(load.outcomes.get(num_ok, ()))
        result = TransferResult(
            transfer_id=transfer.transfer_id,
            num_blocks_ok=num_ok,
            outcome=outcome,
            moved_bytes=min(load.num_bytes, num_ok * self._tiers.block_bytes),
            detail="" if is_complete else "no tier has the next block",
            duration_s=self._tiers.clock.now_s() - load.started_s,
            wants_save=not load.runs and self._is_promoting and self._tiers.offer_promotion(transfer, load.sources[:num_ok]),
        )
        if load.runs:
            load.is_reported = True
            self._report_early(result)
        else:
            self._report(result)

    @property
    def _block_size(self) -> int:
        assert self._tiers.layout is not None, "register_kv_cache comes first"
        return self._tiers.layout.block_size
