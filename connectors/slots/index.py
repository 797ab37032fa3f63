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

from connectors.slots.eviction_policy import PINNED
from connectors.slots.index_file import LAST_USE, SEQUENCE, STATE_AND_OWNER, IndexFile, SlotState, Words
from connectors.slots.index_mirror import IndexMirror
from connectors.slots.recency import SlotRecency
from connectors.slots.slot_records import NO_HASH, SlotRecords
from connectors.slots.slot_room import SlotRoom
from connectors.slots.use_times import UseTimes
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

_UNUSED_RECORDS = 4096  # per look for slots that were never written


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
        self._use_times = UseTimes(file)
        self._mutex = threading.RLock()
        self._is_closed = False
        self._own_writing: set[int] = set()
        self._to_release: set[int] = set()
        self._num_used = 0  # slots before this one were written or are being written
        self._untold_uses: deque[tuple[Sequence[bytes], Sequence[bytes]]] = deque()
        with file.locked():
            self.mirror = IndexMirror(file)
        self.recency = SlotRecency(file, self.mirror, eviction)
        self._records = SlotRecords(file, self.mirror, lease_number)
        self.room = SlotRoom(file, self._records, self.recency, is_lease_alive, grow, grow_step)

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
            slots = self.room.take(len(missing), protected)
            self._records.write(slots, SlotState.WRITING, list(missing)[: len(slots)])
            self._own_writing.update(slots)
        positions = list(missing.values())
        num_covered = positions[len(slots)] if len(slots) < len(positions) else len(block_hashes)
        return Reservation(num_covered=num_covered, new_slots=dict(zip(positions, slots, strict=False)))

    def publish(self, written: dict[bytes, int], chain: Sequence[bytes], hits: Iterable[bytes] = ()) -> None:
        """Make written slots (by block hash) visible and touch `chain`, given first block to last. hits: see touch.

        A block that another saver published meanwhile keeps that one's slot, and ours becomes free.
        """
        with self._changing():
            are_ours = self._records.are_ours(list(written.values()))
            ours = written if all(are_ours) else dict(itertools.compress(written.items(), are_ours))
            winners = {name: ours[name] for name in self.mirror.missing(ours)}
            self._records.write(list(winners.values()), SlotState.STORED, list(winners), _links(chain, list(winners)))
            if len(winners) < len(ours):
                self._records.free([slot for name, slot in ours.items() if name not in winners])
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
            self._records.free(unchanged)
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
                self._records.repair()
            self.room.reclaim_dead_writers()

    def grow_ahead(self) -> bool:
        """Allocate the next piece of the medium; True while there is more to do."""
        with self._changing():
            return self.room.grow(1) and self.file.num_ready_slots < self.file.num_slots

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
                    self._records.write(slots, SlotState.WRITING, [NO_HASH] * len(slots))
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
                    self._records.repair()
                self.file.is_changing = 1
                to_release = list(self._to_release)
                self._records.free(list(itertools.compress(to_release, self._records.are_ours(to_release))))
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
