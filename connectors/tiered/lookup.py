"""Lookups over several tiers: where a prefix ends that they have together, and who has had it.

Not safe for threads: whoever calls holds the tiered connector's lock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from connectors.tiered.seen_blocks import SeenBlocks
from connectors.tiered.tier_set import MAX_RUNS, Questions, TierSet
from core.kv.connector import PrefixLookup

_MAX_NOTED_REQUESTS = 4096
_COUNTED_AT_ONCE = 128  # blocks; some 50 us


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """position: of the first block that no tier has. is_known: no tier that does not know yet is worth waiting for. is_slow: a
    tier other than the first is needed."""

    position: int
    is_known: bool
    is_slow: bool


class TieredLookups:
    """Answers within microseconds, whatever state a tier is in. seen: counts who looked what up, where a tier wants to know."""

    def __init__(self, tiers: TierSet, seen: SeenBlocks) -> None:
        self._tiers = tiers
        self._seen = seen
        self._counts_seen = any(tier.options.store_threshold > 1 for tier in tiers.tiers)
        self._noted_requests: dict[str, None] = {}
        self._unseen: deque[tuple[PrefixLookup, int]] = deque()  # to be counted, up to which block

    def find_end(self, lookup: PrefixLookup, position: int) -> PrefixEnd:
        """From a block on: each tier goes on where another one ends."""
        self._tiers.chains.note_lookup(lookup.request_id, lookup.block_hashes)
        if self._counts_seen and lookup.request_id not in self._noted_requests:
            self._note_request(lookup)
        questions = Questions(lookup)
        is_known, is_slow = True, False
        for number in range(MAX_RUNS):
            num_found = 0
            if position >= len(lookup.block_hashes):
                break
            for tier in self._tiers.tiers:
                count = tier.count(questions.to(tier), position)
                if count is None:
                    is_known &= not tier.should_wait(lookup.request_id)
                    continue
                if number == 0:
                    tier.note_answer(lookup.request_id)
                if count:
                    num_found = count
                    is_slow |= tier.index > 0
                    break
            if not num_found:
                break
            position += num_found
        return PrefixEnd(position, is_known, is_slow)

    @property
    def has_unseen(self) -> bool:
        """Whether count_some has something to do."""
        return bool(self._unseen)

    def count_some(self) -> None:
        """Count some of what requests have looked up: not all at once, as a lookup may be waiting for the lock."""
        if self._unseen:
            lookup, end = self._unseen.popleft()
            start = max(0, end - _COUNTED_AT_ONCE)
            self._seen.note(lookup.request_id, lookup.block_hashes[start:end])
            if start:
                self._unseen.appendleft((lookup, start))

    def _note_request(self, lookup: PrefixLookup) -> None:
        if len(self._noted_requests) >= _MAX_NOTED_REQUESTS:
            del self._noted_requests[next(iter(self._noted_requests))]
        self._noted_requests[lookup.request_id] = None
        self._unseen.append((lookup, len(lookup.block_hashes)))  # counted later: a lookup has no time for it
