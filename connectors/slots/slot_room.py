"""Room for new blocks in a slot index: free slots, more of the medium, those of dead writers, at last what is evicted.

The caller holds the index's lock, with an up-to-date mirror.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import numpy as np

from connectors.slots.index_file import STATE_AND_OWNER, IndexFile, SlotState
from connectors.slots.recency import SlotRecency
from connectors.slots.runs import in_few_runs
from connectors.slots.slot_records import SlotRecords

logger = logging.getLogger(__name__)

_RUN_WINDOW = 1024  # free slots among which neighbours are looked for


class SlotRoom:
    """As one process sees it. See SlotIndex for grow and grow_step."""

    def __init__(
        self,
        file: IndexFile,
        records: SlotRecords,
        recency: SlotRecency,
        is_lease_alive: Callable[[int], bool],
        grow: Callable[[int, int], None],
        grow_step: int,
    ) -> None:
        self.num_failed_growths = 0
        self.num_freed_ahead = 0  # evicted beyond what a full store needs now, so that there is a choice of neighbours
        self._file = file
        self._records = records
        self._recency = recency
        self._is_lease_alive = is_lease_alive
        self._grow_medium = grow
        self._grow_step = grow_step
        self._free_hints: deque[int] = deque()
        self._num_frees_scanned = -1

    def take(self, num_wanted: int, protected: set[int]) -> list[int]:
        """Up to num_wanted slots: free ones, else by growing, else slots of dead writers, else the least recently used."""
        taken: set[int] = set()
        self._take_free(num_wanted, taken)
        while len(taken) < num_wanted and self.grow(num_wanted - len(taken)):
            self._take_free(num_wanted, taken)
        if (
            len(taken) < num_wanted and not self._recency.has_victims and self.reclaim_dead_writers()
        ):  # one scan per batch of victims
            self._take_free(num_wanted, taken)
        if len(taken) < num_wanted and self.num_freed_ahead:
            victims: set[int] = set()
            self._recency.evict(num_wanted - len(taken) + self.num_freed_ahead, victims, protected)
            self._records.free(sorted(victims))
            self._free_hints.extend(sorted(victims))
            self._num_frees_scanned = self._file.num_frees  # all free slots are hints: no scan would find more
            self._take_free(num_wanted, taken)
        self._recency.evict(num_wanted, taken, protected)
        if len(taken) < num_wanted:  # nothing to evict either: look for what damage has made of records
            self._free_torn_records(taken)
            self._num_frees_scanned = -1
            self._take_free(num_wanted, taken)
        return sorted(taken)  # neighbours for one I/O

    def _take_free(self, num_wanted: int, taken: set[int]) -> None:
        self._put_neighbours_first(num_wanted - len(taken))
        while len(taken) < num_wanted:
            if not self._free_hints:
                if self._num_frees_scanned == self._file.num_frees:
                    break
                self._num_frees_scanned = self._file.num_frees
                self._free_hints.extend(self._records.in_state(SlotState.FREE, self._file.num_ready_slots).tolist())
                self._put_neighbours_first(num_wanted - len(taken))
                continue
            slot = self._free_hints.popleft()
            if int(self._file.records[slot, STATE_AND_OWNER]) == SlotState.FREE:  # another process may have been faster
                taken.add(slot)  # a set: what was taken just now is still marked FREE, and a scan finds it again

    def _put_neighbours_first(self, num_wanted: int) -> None:
        """Have the first num_wanted hints be few runs, for few and large I/Os."""
        if not self.num_freed_ahead or num_wanted < 2:
            return
        window = [self._free_hints.popleft() for _ in range(min(len(self._free_hints), max(_RUN_WINDOW, num_wanted)))]
        slots = np.unique(np.asarray(window, dtype=np.int64))
        slots = slots[(self._file.records[slots, STATE_AND_OWNER] == SlotState.FREE)]
        self._free_hints.extendleft(reversed(in_few_runs(slots, num_wanted)))

    def grow(self, num_needed: int) -> bool:
        """Allocate more of the medium, for num_needed slots if possible; False where it has no more."""
        first, num_left = self._file.num_ready_slots, self._file.num_slots - self._file.num_ready_slots
        if num_left == 0:
            return False
        wanted = min(max(self._grow_step, num_needed), num_left)
        for step in sorted({wanted, max(1, wanted // 8), 1}, reverse=True):  # a nearly full disk may have room for less
            try:
                self._grow_medium(first, first + step)
            except OSError as error:
                reason = str(error)
            else:
                self._file.num_ready_slots = first + step
                self._file.num_frees += 1
                return True
        self.num_failed_growths += 1
        if self.num_failed_growths == 1:
            logger.warning("the store stays at %d of %d slots for now: %s", first, self._file.num_slots, reason)
        return False

    def _free_torn_records(self, taken: set[int]) -> None:
        """Take back slots whose records are damaged: nobody else can use them."""
        torn = [slot for slot in self._records.torn() if slot not in taken]
        if torn:
            logger.warning("took back %d slots with damaged records", len(torn))
            self._records.free(torn)

    def reclaim_dead_writers(self) -> bool:
        """Free what processes were writing whose lease is gone; whether there was something."""
        writing = self._records.in_state(SlotState.WRITING, self._file.num_slots)
        owners = (self._file.records[writing, STATE_AND_OWNER] >> np.uint64(32)).astype(np.int64)
        is_dead_by_owner = {owner: not self._is_lease_alive(owner) for owner in set(owners.tolist())}
        dead = [slot for slot, owner in zip(writing.tolist(), owners.tolist(), strict=True) if is_dead_by_owner[owner]]
        if dead:
            logger.info("reclaimed %d slots of writers that died", len(dead))
            self._records.free(dead)
        return bool(dead)
