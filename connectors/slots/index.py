"""Which slot of a shared medium holds which block: reserve, publish, evict, forget.

Several processes share one index file; a process that dies at any instruction leaves at most slots in WRITING, which others
take back. Reading the medium needs no pin: whoever copies a slot verifies header, hash and checksum of the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connectors.slots.eviction_policy import PINNED, TICK_MASK
from connectors.slots.index_file import (
    CHECKSUM,
    DEPTH,
    HASH_HIGH,
    HASH_LOW,
    LAST_USE,
    MAX_COUNTER,
    NUM_RECENT_CHANGES,
    PARENT,
    SEQUENCE,
    STATE_AND_OWNER,
    IndexFile,
    SlotState,
    Words,
    record_checksums,
)
from connectors.slots.index_mirror import IndexMirror
from connectors.slots.recency import SlotRecency
from connectors.slots.runs import in_few_runs
from connectors.slots.use_times import UseTimes
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

_NO_HASH = bytes(16)
_REPAIR_RECORDS = 65536  # per numpy call
_UNUSED_RECORDS = 4096  # per look for slots that were never written
_RUN_WINDOW = 1024  # free slots among which neighbours are looked for


@dataclass(frozen=True, slots=True)
class Reservation:
    """What a save may do: its first num_covered blocks are stored already or have a slot, new_slots[position], to be filled."""

    num_covered: int
    new_slots: dict[int, int]


class SlotIndex:
    """The index of one store, as one process sees it.

    The mirror answers lookups. Everything here comes from worker threads and holds the file's lock for a short time; it raises
    OSError (TimeoutError included) or ConnectorError where the index cannot be used. grow(first_slot, end_slot) allocates the
    slots' place on the medium, grow_step of them where possible, and raises OSError when it cannot. eviction: a policy's name.
    """

    def __init__(
        self,
        file: IndexFile,
        lease_number: int,
        is_lease_alive: Callable[[int], bool],
        grow: Callable[[int, int], None],
        grow_step: int,
        eviction: str = "lru",
    ) -> None:
        """The caller holds the lock under which processes join, and took `lease_number` from take_lease_number."""
        self.file = file
        self.num_failed_growths = 0
        self.num_freed_ahead = 0  # evicted beyond what a full store needs now, so that there is a choice of neighbours
        self._lease_number = lease_number
        self._is_lease_alive = is_lease_alive
        self._use_times = UseTimes(file)
        self._grow_medium = grow
        self._grow_step = grow_step
        self._mutex = threading.RLock()
        self._is_closed = False
        self._own_writing: set[int] = set()
        self._to_release: set[int] = set()
        self._free_hints: deque[int] = deque()
        self._num_frees_scanned = -1
        self._num_used = 0  # slots before this one were written or are being written
        self._untold_uses: deque[tuple[Sequence[bytes], Sequence[bytes]]] = deque()
        with file.locked():
            self.mirror = IndexMirror(file)
        self.recency = SlotRecency(file, self.mirror, eviction)

    @property
    def num_evictions(self) -> int:
        """Blocks that this process evicted."""
        return self.recency.num_evictions

    @property
    def num_writing(self) -> int:
        """Slots that this process is filling."""
        return len(self._own_writing)

    # -- saving --------------------------------------------------------------------------------------------------------
    def reserve(self, block_hashes: Sequence[bytes], ancestors: Sequence[bytes]) -> Reservation:
        """Get slots for the blocks that are not stored yet, evicting what the policy says, as far as there is room.

        Neither pinned blocks nor blocks of the same prefix (ancestors and block_hashes themselves) nor slots in WRITING are
        evicted. Every new slot must end in publish or release.
        """
        with self._changing():
            absent = set(self.mirror.missing(block_hashes))
            missing: dict[bytes, int] = {}
            for position, name in enumerate(block_hashes if absent else ()):
                if name in absent:
                    missing.setdefault(name, position)
            self.recency.note_missing(missing)
            protected = set(self.mirror.slots_of(block_hashes)) | set(self.mirror.slots_of(ancestors))
            slots = self._take_slots(len(missing), protected)
            self._write_records(slots, SlotState.WRITING, list(missing)[: len(slots)])
            self._own_writing.update(slots)
        positions = list(missing.values())
        num_covered = positions[len(slots)] if len(slots) < len(positions) else len(block_hashes)
        return Reservation(num_covered=num_covered, new_slots=dict(zip(positions, slots, strict=False)))

    def publish(self, written: dict[bytes, int], chain: Sequence[bytes], hits: Iterable[bytes] = ()) -> None:
        """Make written slots (by block hash) visible and touch `chain`, given first block to last. hits: see touch.

        A block that another saver published meanwhile keeps that one's slot, and ours becomes free.
        """
        with self._changing():
            are_ours = self._are_ours(list(written.values()))
            ours = written if all(are_ours) else dict(itertools.compress(written.items(), are_ours))
            winners = {name: ours[name] for name in self.mirror.missing(ours)}
            self._write_records(list(winners.values()), SlotState.STORED, list(winners), _links(chain, list(winners)))
            if len(winners) < len(ours):
                self._free([slot for name, slot in ours.items() if name not in winners])
            self.mirror.refresh(is_locked=True)
            self.recency.touch(chain, hits)
            self.recency.note_stored(winners)
        self._own_writing.difference_update(written.values())

    def unpublished(self, slots: Iterable[int]) -> list[int]:
        """Those of our new slots that await publish or release."""
        return [slot for slot in slots if slot in self._own_writing and slot not in self._to_release]

    def release(self, slots: Sequence[int]) -> None:
        """Give back slots in WRITING that will not be filled, now or with the next change."""
        self._to_release.update(slots)
        with self._changing():  # frees them; where the lock cannot be had now, whoever has it next does
            pass

    # -- loading -------------------------------------------------------------------------------------------------------
    def forget(self, sequence_by_slot: dict[int, int]) -> int:
        """Free slots whose bytes turned out to be bad, unless they changed since these sequence numbers were read; how many."""
        with self._changing():
            sequences = self.file.records[:, SEQUENCE]
            unchanged = [slot for slot, sequence in sequence_by_slot.items() if int(sequences[slot]) == sequence]
            self._free(unchanged)
        return len(unchanged)

    def catch_up(self) -> None:
        """Bring the mirror up to date under the lock, where a change that has not arrived never will."""
        with self._changing():
            pass

    def touch_later(self, chain: Sequence[bytes], hits: Sequence[bytes] = ()) -> None:
        """Mark blocks as just used, given first to last: tail first, head last, so that parents outlive children.

        hits: those that a request found here, rather than their ancestors, which it may only have been thought to need. Takes no
        lock. It is done before whatever next changes the index, such as an eviction, in any case by catch_up().
        """
        self._untold_uses.append((chain, hits))

    @property
    def has_untold_uses(self) -> bool:
        """Whether touch_later() was called, and no change came after it."""
        return bool(self._untold_uses)

    # -- pinning -------------------------------------------------------------------------------------------------------
    def pin(self, block_hashes: Sequence[bytes]) -> int:
        """See SlotRecency.pin."""
        with self._changing():
            return self.recency.pin(block_hashes)

    def unpin(self, block_hashes: Sequence[bytes]) -> None:
        """See SlotRecency.unpin."""
        with self._changing():
            self.recency.unpin(block_hashes)

    def is_pinned(self, block_hash: bytes) -> bool:
        """Whether it is stored and pinned, by whomever. Takes no lock."""
        slots = self.mirror.slots_of([block_hash])
        return bool(slots) and bool(int(self.file.records[slots[0], LAST_USE]) & PINNED)

    def coldest_runs(self, num_blocks: int, *, with_pinned: bool = False) -> list[list[bytes]]:
        """See SlotRecency.coldest_runs."""
        with self._changing():
            return self.recency.coldest_runs(num_blocks, with_pinned=with_pinned)

    # -- upkeep --------------------------------------------------------------------------------------------------------
    def recover(self, is_alone: bool) -> None:
        """Take back what dead processes left; is_alone: nobody else has the index open, and it may be torn by a power failure."""
        with self._changing():
            if is_alone:
                self._repair()
            self._reclaim_dead_writers()

    def grow_ahead(self) -> bool:
        """Allocate the next piece of the medium; True while there is more to do."""
        with self._changing():
            return self._grow(1) and self.file.num_ready_slots < self.file.num_slots

    def reserve_unused(self, max_slots: int) -> list[int]:
        """Up to max_slots neighbouring slots that were never written since the index was made; the caller must release them.

        Empty when there are hardly any. They do not count as being written, and are a small part of those left: no saver shall
        miss them.
        """
        with self._changing():
            while self._num_used < self.file.num_ready_slots:
                part = self.file.records[self._num_used : self.file.num_ready_slots][:_UNUSED_RECORDS]
                is_unused = (part[:, STATE_AND_OWNER] == SlotState.FREE) & (part[:, SEQUENCE] == 0)
                num_wanted = min(max_slots, int(is_unused.sum()) // 8)
                if num_wanted:
                    first = int(is_unused.argmax())
                    run = is_unused[first : first + num_wanted]
                    start = self._num_used + first
                    slots = list(range(start, start + (len(run) if run.all() else int(run.argmin()))))
                    self._write_records(slots, SlotState.WRITING, [_NO_HASH] * len(slots))
                    self._num_used = slots[-1] + 1
                    return slots
                self._num_used += len(part)
        return []

    def close(self) -> None:
        """Free what this process was writing and refuse further changes. Safe to repeat."""
        if self._is_closed:
            return
        try:
            if self._own_writing or self._untold_uses:
                self.release(list(self._own_writing))
        except (OSError, ConnectorError) as error:  # others take the slots back once the lease is gone
            logger.warning("slots in writing are left to be reclaimed: %s", str(error))
        self._is_closed = True

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the lock, with an up-to-date mirror. An exception in it, or the process' death, makes the next holder repair."""
        with self._mutex:
            if self._is_closed:
                raise ConnectorError("the store is closed")
            with self.file.locked():
                if not self.file.is_intact():
                    raise ConnectorError(f"{self.file.path} was removed or cut")
                if not self.file.is_sane():
                    self.file.discard()  # all who have it open see that, and join a new one
                    raise ConnectorError(f"{self.file.path} was damaged and is removed")
                if self.file.is_changing:
                    self._repair()
                self.file.is_changing = 1
                to_release = list(self._to_release)
                self._free([slot for slot, is_ours in zip(to_release, self._are_ours(to_release), strict=True) if is_ours])
                self._own_writing.difference_update(self._to_release)
                self._to_release.clear()
                self.mirror.refresh(is_locked=True)
                tick_before = self.file.tick
                while self._untold_uses:
                    self.recency.touch(*self._untold_uses.popleft())
                yield
                self._use_times.note(tick_before, self.file.tick)
                self.mirror.refresh(is_locked=True)
                self.file.is_changing = 0

    def _repair(self) -> None:
        """Drop torn records and announce changes whose writer died before it did."""
        records = self.file.records
        torn: list[int] = []
        highest = highest_tick = 0
        for start in range(0, self.file.num_slots, _REPAIR_RECORDS):
            part = records[start : start + _REPAIR_RECORDS].copy()
            is_valid = _are_possible(part)
            torn.extend((np.flatnonzero(~is_valid) + start).tolist())
            highest = max(highest, int(part[is_valid, SEQUENCE].max(initial=0)))
            has_odd_tick = part[:, LAST_USE] >= MAX_COUNTER  # damage: no checksum covers it
            records[np.flatnonzero(has_odd_tick) + start, LAST_USE] = 0
            ticks = part[~has_odd_tick, LAST_USE] & np.uint64(TICK_MASK)
            highest_tick = max(highest_tick, int(ticks.max(initial=0)))
        # A jump of the counter past the ring sends every mirror through a full scan.
        self.file.change_counter = max(highest, self.file.change_counter) + NUM_RECENT_CHANGES + 1
        self.file.tick = max(highest_tick, self.file.tick)
        self.file.num_frees += 1
        self._write_records(torn, SlotState.FREE, [_NO_HASH] * len(torn))
        if torn:
            logger.info("repaired the slot index: %d torn records", len(torn))

    def _write_records(
        self, slots: Sequence[int], state: SlotState, block_hashes: Sequence[bytes], links: Words | None = None
    ) -> None:
        """Give slots a new state. Order matters for readers without the lock: records, then the ring, then the counter.

        links, [n, 2]: PARENT and DEPTH of each.
        """
        if not slots:
            return
        where = np.asarray(slots, dtype=np.int64)
        sequences = np.arange(1, len(slots) + 1, dtype=np.uint64) + np.uint64(self.file.change_counter)
        records: Words = np.zeros((len(slots), 8), dtype=np.uint64)
        records[:, STATE_AND_OWNER] = state if state is not SlotState.WRITING else state | self._lease_number << 32
        records[:, HASH_LOW : HASH_HIGH + 1] = np.frombuffer(b"".join(block_hashes), dtype=np.uint64).reshape(-1, 2)
        records[:, SEQUENCE] = sequences
        records[:, LAST_USE] = self.file.records[where, LAST_USE] & np.uint64(TICK_MASK)
        if links is not None:
            records[:, PARENT : DEPTH + 1] = links
        records[:, CHECKSUM] = record_checksums(records)
        self.file.records[where] = records
        self.file.recent_changes[(sequences % np.uint64(NUM_RECENT_CHANGES)).astype(np.int64)] = where
        self.file.change_counter += len(slots)
        self.mirror.note_own_change(slots, block_hashes if state is SlotState.STORED else None)

    def _free(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        self.file.num_frees += 1  # before the records, so that a death in between loses no slot
        self._write_records(slots, SlotState.FREE, [_NO_HASH] * len(slots))

    def _are_ours(self, slots: Sequence[int]) -> list[bool]:
        if not slots:
            return []
        states = self.file.records[np.asarray(slots), STATE_AND_OWNER]
        are_ours: list[bool] = (states == np.uint64(SlotState.WRITING | self._lease_number << 32)).tolist()
        return are_ours

    # -- room ----------------------------------------------------------------------------------------------------------
    def _take_slots(self, num_wanted: int, protected: set[int]) -> list[int]:
        """Up to num_wanted slots: free ones, else by growing, else slots of dead writers, else the least recently used."""
        taken: set[int] = set()
        self._take_free(num_wanted, taken)
        while len(taken) < num_wanted and self._grow(num_wanted - len(taken)):
            self._take_free(num_wanted, taken)
        if (
            len(taken) < num_wanted and not self.recency.has_victims and self._reclaim_dead_writers()
        ):  # one scan per batch of victims
            self._take_free(num_wanted, taken)
        if len(taken) < num_wanted and self.num_freed_ahead:
            victims: set[int] = set()
            self.recency.evict(num_wanted - len(taken) + self.num_freed_ahead, victims, protected)
            self._free(sorted(victims))
            self._free_hints.extend(sorted(victims))
            self._num_frees_scanned = self.file.num_frees  # all free slots are hints: no scan would find more
            self._take_free(num_wanted, taken)
        self.recency.evict(num_wanted, taken, protected)
        if len(taken) < num_wanted:  # nothing to evict either: look for what damage has made of records
            self._free_torn_records(taken)
            self._num_frees_scanned = -1
            self._take_free(num_wanted, taken)
        return sorted(taken)  # neighbours for one I/O

    def _take_free(self, num_wanted: int, taken: set[int]) -> None:
        self._put_neighbours_first(num_wanted - len(taken))
        while len(taken) < num_wanted:
            if not self._free_hints:
                if self._num_frees_scanned == self.file.num_frees:
                    break
                self._num_frees_scanned = self.file.num_frees
                self._free_hints.extend(self._slots_in(SlotState.FREE, self.file.num_ready_slots).tolist())
                self._put_neighbours_first(num_wanted - len(taken))
                continue
            slot = self._free_hints.popleft()
            if int(self.file.records[slot, STATE_AND_OWNER]) == SlotState.FREE:  # another process may have been faster
                taken.add(slot)  # a set: what was taken just now is still marked FREE, and a scan finds it again

    def _put_neighbours_first(self, num_wanted: int) -> None:
        """Have the first num_wanted hints be few runs, for few and large I/Os."""
        if not self.num_freed_ahead or num_wanted < 2:
            return
        window = [self._free_hints.popleft() for _ in range(min(len(self._free_hints), max(_RUN_WINDOW, num_wanted)))]
        slots = np.unique(np.asarray(window, dtype=np.int64))
        slots = slots[(self.file.records[slots, STATE_AND_OWNER] == SlotState.FREE)]
        self._free_hints.extendleft(reversed(in_few_runs(slots, num_wanted)))

    def _slots_in(self, state: SlotState, num_slots: int) -> npt.NDArray[np.int64]:
        states = self.file.records[:num_slots, STATE_AND_OWNER] & np.uint64(0xFFFFFFFF)
        return np.flatnonzero(states == state)

    def _grow(self, num_needed: int) -> bool:
        first, num_left = self.file.num_ready_slots, self.file.num_slots - self.file.num_ready_slots
        if num_left == 0:
            return False
        wanted = min(max(self._grow_step, num_needed), num_left)
        for step in sorted({wanted, max(1, wanted // 8), 1}, reverse=True):  # a nearly full disk may have room for less
            try:
                self._grow_medium(first, first + step)
            except OSError as error:
                reason = str(error)
            else:
                self.file.num_ready_slots = first + step
                self.file.num_frees += 1
                return True
        self.num_failed_growths += 1
        if self.num_failed_growths == 1:
            logger.warning("the store stays at %d of %d slots for now: %s", first, self.file.num_slots, reason)
        return False

    def _free_torn_records(self, taken: set[int]) -> None:
        """Take back slots whose records are damaged: nobody else can use them."""
        torn = [slot for slot in np.flatnonzero(~_are_possible(self.file.records)).tolist() if slot not in taken]
        if torn:
            logger.warning("took back %d slots with damaged records", len(torn))
            self._free(torn)

    def _reclaim_dead_writers(self) -> bool:
        writing = self._slots_in(SlotState.WRITING, self.file.num_slots)
        owners = (self.file.records[writing, STATE_AND_OWNER] >> np.uint64(32)).astype(np.int64)
        is_dead_by_owner = {owner: not self._is_lease_alive(owner) for owner in set(owners.tolist())}
        dead = [slot for slot, owner in zip(writing.tolist(), owners.tolist(), strict=True) if is_dead_by_owner[owner]]
        if dead:
            logger.info("reclaimed %d slots of writers that died", len(dead))
            self._free(dead)
        return bool(dead)


def _are_possible(records: Words) -> npt.NDArray[np.bool_]:
    """Which records, [n, 8], are whole and say something that a writer says."""
    states, owners = records[:, STATE_AND_OWNER] & np.uint64(0xFFFFFFFF), records[:, STATE_AND_OWNER] >> np.uint64(32)
    has_state = (states == SlotState.WRITING) | ((states <= SlotState.STORED) & (owners == 0))
    possible: npt.NDArray[np.bool_] = (
        (record_checksums(records) == records[:, CHECKSUM]) & has_state & (records[:, SEQUENCE] < MAX_COUNTER)
    )
    return possible


def _links(chain: Sequence[bytes], names: Sequence[bytes]) -> Words:
    """For each of `names`, HASH_LOW of the block before it in the chain and its position there, from 1; 0, 0: not in it."""
    words: Words = np.zeros(len(chain) + 1, dtype=np.uint64)  # word i: of the block before the one at position i
    words[1:] = np.frombuffer(b"".join(chain), dtype=np.uint64)[::2]
    first = chain.index(names[0]) if names and names[0] in chain else 0
    if [*names] == [*chain[first : first + len(names)]]:  # a prefix' continuation, as nearly always
        positions: Sequence[int] = range(first, first + len(names))
    else:
        position_by_name = {name: position for position, name in reversed(list(enumerate(chain)))}
        positions = [position_by_name.get(name, -1) for name in names]
    depths = np.asarray(positions, dtype=np.int64) + 1
    links: Words = np.stack([words[np.maximum(depths - 1, 0)], depths.astype(np.uint64)], axis=1)
    return links


def take_lease_number(file: IndexFile) -> int:
    """A number that no process of this index has had. The caller holds the lock under which processes join. Raises OSError."""
    with file.locked():
        file.next_lease += 1
        return file.next_lease
