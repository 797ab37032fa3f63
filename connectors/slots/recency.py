"""When the blocks of a slot index were used, which of them are pinned, and which go first when room is needed.

All of it is hints in the records' LAST_USE, shared by the processes of a store. Every method is called under the index' lock.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from connectors.slots.eviction_policy import FREQUENT, PINNED, TICK_MASK, Slots, counts_as_another_use, create_eviction_policy
from connectors.slots.index_file import HASH_LOW, LAST_USE, PARENT, STATE_AND_OWNER, IndexFile, SlotState, hashes_of
from connectors.slots.index_mirror import IndexMirror

logger = logging.getLogger(__name__)

_MAX_PINNED_SHARE = 4  # at most one slot in so many


class SlotRecency:
    """One process' hand on the hints of an index, and its eviction policy."""

    def __init__(self, file: IndexFile, mirror: IndexMirror, eviction: str) -> None:
        self.num_evictions = 0
        self._file = file
        self._mirror = mirror
        self._policy = create_eviction_policy(eviction, file.num_slots)
        self._victims: deque[tuple[int, int]] = deque()  # slots, and their LAST_USE when they were chosen
        self._pinned_names: set[bytes] = set()  # by this process, stored or not

    # -- use -----------------------------------------------------------------------------------------------------------
    def touch(self, chain: Sequence[bytes], hits: Iterable[bytes]) -> None:
        """Mark blocks as just used, and hits as used again where the use before was long enough ago."""
        records = self._file.records
        if hit_slots := self._mirror.slots_of(hits):
            is_another_use = counts_as_another_use(records[hit_slots, LAST_USE], self._file.tick, self._file.num_slots)
            self._mark(list(itertools.compress(hit_slots, is_another_use.tolist())), FREQUENT)
        slots = np.asarray(self._mirror.slots_of(chain), dtype=np.int64)
        newest = self._file.tick + len(slots)
        ticks = np.arange(newest, newest - len(slots), -1).astype(np.uint64) & np.uint64(TICK_MASK)
        records[slots, LAST_USE] = records[slots, LAST_USE] & np.uint64(FREQUENT | PINNED) | ticks
        self._file.tick = newest

    def note_missing(self, block_hashes: Iterable[bytes]) -> None:
        """These are about to be stored."""
        self._policy.note_missing(block_hashes)

    def note_stored(self, slot_by_hash: Mapping[bytes, int]) -> None:
        """These are stored now, and touched."""
        self._mark([slot_by_hash[name] for name in self._policy.take_frequent(slot_by_hash)], FREQUENT)
        if self._pinned_names:
            self._mark_pinned([slot for name, slot in slot_by_hash.items() if name in self._pinned_names])

    # -- pinning -------------------------------------------------------------------------------------------------------
    def pin(self, block_hashes: Sequence[bytes]) -> int:
        """Keep a prefix from eviction until unpin; how many of its blocks are stored and pinned now, by whomever.

        Blocks that come later are pinned when this process stores them. Pins are marks in the shared index and outlive the
        process. Once a quarter of the slots is pinned, nothing more is.
        """
        names = list(block_hashes[: max(0, self._max_pinned - len(self._pinned_names))])
        self._pinned_names.update(names)
        slots = self._mirror.slots_of(block_hashes)
        self._mark_pinned(slots)
        return int(np.count_nonzero(self._file.records[np.asarray(slots, dtype=np.int64), LAST_USE] & np.uint64(PINNED)))

    def unpin(self, block_hashes: Sequence[bytes]) -> None:
        """Let these blocks be evicted again."""
        self._pinned_names.difference_update(block_hashes)
        slots = np.asarray(self._mirror.slots_of(block_hashes), dtype=np.int64)
        self._file.records[slots, LAST_USE] &= ~np.uint64(PINNED)

    @property
    def _max_pinned(self) -> int:
        return self._file.num_slots // _MAX_PINNED_SHARE

    def _mark_pinned(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        is_pinned = (self._file.records[:, LAST_USE] & np.uint64(PINNED)) != 0
        room = max(0, self._max_pinned - int(np.count_nonzero(is_pinned)))
        self._mark([slot for slot in slots if not is_pinned[slot]][:room], PINNED)

    def _mark(self, slots: Sequence[int], bit: int) -> None:
        if slots:
            self._file.records[np.asarray(slots, dtype=np.int64), LAST_USE] |= np.uint64(bit)

    # -- eviction ------------------------------------------------------------------------------------------------------
    @property
    def has_victims(self) -> bool:
        """Whether candidates of an earlier scan are left."""
        return bool(self._victims)

    def evict(self, num_wanted: int, taken: set[int], protected: set[int]) -> None:
        """Add stored slots to taken until it has num_wanted, in the policy's order.

        Candidates of an earlier scan stay exact: whatever was touched or stored since comes after all of them.
        """
        num_before = len(taken)
        if self._policy.is_stale():
            self._victims.clear()
        num_at_scan = -1
        while len(taken) < num_wanted:
            if not self._victims:
                if len(taken) == num_at_scan:
                    break
                num_at_scan = len(taken)
                self._find_victims(num_wanted - len(taken), taken | protected)
                continue
            found = [self._victims.popleft() for _ in range(min(num_wanted - len(taken), len(self._victims)))]
            slots, last_uses = zip(*found, strict=True)
            records = self._file.records[list(slots)]
            is_unchanged = records[:, STATE_AND_OWNER] == SlotState.STORED
            is_unchanged &= records[:, LAST_USE] == np.asarray(last_uses, dtype=np.uint64)
            unchanged = [slot for slot in itertools.compress(slots, is_unchanged.tolist()) if slot not in protected]
            evicted = self._policy.allowed(self._file.records, unchanged, taken)
            taken.update(evicted)
            self._policy.note_evicted(self._file.records, evicted)
        self.num_evictions += len(taken) - num_before

    def coldest_runs(self, num_wanted: int, *, with_pinned: bool = False) -> list[list[bytes]]:
        """The blocks that would be evicted next, the first to go first; in each run, parents before their followers."""
        candidates = np.flatnonzero(self._is_stored()) if with_pinned else self._evictable()
        slots = self._policy.order(self._file.records, candidates, num_wanted, 0)
        self._victims.clear()  # they belong to the order before
        records = self._file.records[slots]
        runs: list[list[bytes]] = []
        parent = 0
        for name, own, link in zip(hashes_of(records), records[:, HASH_LOW].tolist(), records[:, PARENT].tolist(), strict=True):
            if runs and own == parent:  # tails go first
                runs[-1].insert(0, name)
            else:
                runs.append([name])
            parent = link
        return runs

    def _find_victims(self, num_now: int, without: set[int]) -> None:
        slots = self._evictable()
        if without:
            slots = slots[~np.isin(slots, np.fromiter(without, dtype=np.int64, count=len(without)))]
        num_ahead = min(self._policy.max_batch, self._file.num_slots // 8)
        slots = self._policy.order(self._file.records, slots, num_now, num_ahead)
        self._victims.extend(zip(slots.tolist(), self._file.records[slots, LAST_USE].tolist(), strict=True))

    def _evictable(self) -> Slots:
        """Slots with blocks that are stored and not pinned."""
        records = self._file.records
        is_stored = self._is_stored()
        is_pinned = (records[:, LAST_USE] & np.uint64(PINNED)) != 0
        if np.count_nonzero(is_pinned) > self._max_pinned:  # damage, which must not fill the store for good
            logger.warning("dropped all pins: there were more than can be")
            records[:, LAST_USE] &= ~np.uint64(PINNED)
            is_pinned[:] = False
        return np.flatnonzero(is_stored & ~is_pinned)

    def _is_stored(self) -> npt.NDArray[np.bool_]:
        is_stored: npt.NDArray[np.bool_] = (self._file.records[:, STATE_AND_OWNER] & np.uint64(0xFFFFFFFF)) == SlotState.STORED
        return is_stored
