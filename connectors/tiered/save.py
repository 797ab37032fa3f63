"""Saves over several tiers: into all at once, or into the fastest that can take them.

Not safe for threads: whoever calls holds the tiered connector's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from connectors.tiered.options import TieredOptions
from connectors.tiered.seen_blocks import SeenBlocks
from connectors.tiered.tier import Tier, sub_transfer
from connectors.tiered.tier_set import Report, TierSet
from core.kv.connector import Transfer, TransferOutcome, TransferResult

_MAX_PINNED_SHARE = 8  # a slower tier may hold back one in so many of the pool's blocks


@dataclass(slots=True)
class _Part:
    """One tier's share of a save."""

    tier: Tier
    positions: Sequence[int]
    is_hung: bool = False


@dataclass(slots=True)
class _Save:
    transfer: Transfer
    started_s: float
    is_promotion: bool
    parts: dict[int, _Part] = field(default_factory=dict)  # in flight, by the child's transfer id
    stored: dict[int, set[int]] = field(default_factory=dict)  # by tier: the positions that it has
    num_bytes: dict[int, int] = field(default_factory=dict)  # by tier
    outcomes: list[TransferOutcome] = field(default_factory=list)
    is_reported: bool = False

    def num_ok(self, tier_index: int) -> int:
        """Leading blocks that are in a tier."""
        stored = self.stored.get(tier_index, set())
        return next((index for index in range(len(self.transfer.block_ids)) if index not in stored), len(stored))


class TieredSaves:
    """All saves in flight. report_early() comes as soon as a prompt can be handed over, or when all that is left hangs; report()
    when every tier has let go of the blocks."""

    def __init__(self, tiers: TierSet, options: TieredOptions, report: Report, report_early: Report) -> None:
        self._tiers = tiers
        self._options = options
        self._report = report
        self._report_early = report_early
        self._save_by_child: dict[int, _Save] = {}
        self.seen = SeenBlocks(options.max_seen_blocks)
        self.num_skipped_blocks = 0  # by tiers that already held back too many

    def start(self, transfer: Transfer) -> None:
        """Begin a save."""
        sources = self._tiers.take_promotion(transfer)
        save = _Save(transfer, self._tiers.clock.now_s(), sources is not None)
        self._tiers.chains.note_transfer(transfer.request_id, transfer.block_hashes)
        if any(tier.options.store_threshold > 1 for tier in self._tiers.tiers):
            self.seen.note(transfer.request_id, transfer.block_hashes)
        positions = range(len(transfer.block_ids))
        for tier in self._tiers.usable():
            wanted = positions if sources is None else [position for position in positions if sources[position] > tier.index]
            is_enough = self._start_part(save, tier, wanted) and self._options.write == "back" and sources is None
            if is_enough:
                break
        self._end_if_done(save)

    def on_result(self, child: Transfer, result: TransferResult) -> bool:
        """A child's transfer ended. False when it is none of ours."""
        save = self._save_by_child.pop(child.transfer_id, None)
        if save is None:
            return False
        part = save.parts.pop(child.transfer_id)
        tier = part.tier
        save.stored.setdefault(tier.index, set()).update(part.positions[: result.num_blocks_ok])
        save.num_bytes[tier.index] = save.num_bytes.get(tier.index, 0) + result.moved_bytes
        if result.num_blocks_ok < len(part.positions):
            save.outcomes.append(result.outcome)
            is_worth_it = self._options.write == "back" and not save.is_promotion and not save.is_reported
            if is_worth_it and not self._tiers.is_closed:
                self._hand_on(save, tier)
        self._end_if_done(save)
        return True

    def on_hung(self, child: Transfer) -> None:
        """A child says nothing of its transfer, which keeps the blocks' memory until it does."""
        save = self._save_by_child.get(child.transfer_id)
        if save is not None:
            save.parts[child.transfer_id].is_hung = True
            save.outcomes.append(TransferOutcome.TIMEOUT)
            self._end_if_done(save)

    def _start_part(self, save: _Save, tier: Tier, positions: Sequence[int]) -> bool:
        """Begin to save into one tier what it takes; False when that is nothing."""
        threshold = tier.options.store_threshold
        if threshold > 1:
            names = save.transfer.block_hashes
            positions = [position for position in positions if self.seen.count(names[position]) >= threshold]
        if not positions:
            return False
        is_bounded = tier.index > 0 and tier.name != self._options.handoff and tier.num_pinned_blocks > 0
        if is_bounded and (tier.num_pinned_blocks + len(positions)) * _MAX_PINNED_SHARE > self._tiers.num_pool_blocks:
            self.num_skipped_blocks += len(positions)
            return False
        deadline_s = self._tiers.child_deadline_s(save.transfer)
        child = sub_transfer(save.transfer, self._tiers.child_id(), positions, deadline_s)
        save.parts[child.transfer_id] = _Part(tier, positions)
        self._save_by_child[child.transfer_id] = save
        if tier.start(child):
            return True
        del save.parts[child.transfer_id], self._save_by_child[child.transfer_id]
        save.outcomes.append(TransferOutcome.ERROR)
        return False

    def _hand_on(self, save: _Save, failed: Tier) -> None:
        """What one tier did not take goes to the next."""
        stored: set[int] = set().union(*save.stored.values())
        left = [position for position in range(len(save.transfer.block_ids)) if position not in stored]
        for tier in self._tiers.usable():
            if tier.index > failed.index and self._start_part(save, tier, left):
                return

    def _end_if_done(self, save: _Save) -> None:
        num_blocks = len(save.transfer.block_ids)
        if save.parts:
            is_handed_over = any(self._is_for_handoff(index) and save.num_ok(index) == num_blocks for index in save.stored)
            if save.is_reported or not (is_handed_over or all(part.is_hung for part in save.parts.values())):
                return
        if self._options.write == "back":  # parts complete each other
            stored: set[int] = set().union(*save.stored.values())
            num_ok = next((index for index in range(num_blocks) if index not in stored), num_blocks)
        else:
            num_ok = max((save.num_ok(index) for index in save.stored), default=0)
        is_complete = num_ok == num_blocks or save.is_promotion
        result = TransferResult(
            transfer_id=save.transfer.transfer_id,
            num_blocks_ok=num_blocks if save.is_promotion else num_ok,
            outcome=TransferOutcome.OK if is_complete else self._tiers.why(save.outcomes),
            moved_bytes=max(save.num_bytes.values(), default=0),
            detail="" if is_complete else "no tier has taken all blocks",
            duration_s=self._tiers.clock.now_s() - save.started_s,
        )
        if save.parts:
            save.is_reported = True
            self._report_early(result)
        else:
            self._report(result)

    def _is_for_handoff(self, tier_index: int) -> bool:
        """Whether a decode node can read this tier; any will do while the one for that cannot be used."""
        handoff = next((tier for tier in self._tiers.tiers if tier.name == self._options.handoff), None)
        if handoff is None or tier_index == handoff.index:
            return True
        return not handoff.is_usable(self._tiers.clock.now_s())
