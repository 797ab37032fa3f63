"""One process' own picture of a slot index: which slot holds which block, kept current from the ring of recent changes.

Lookups read a plain dict, so that they cost the same whatever other processes and the medium do.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from connectors.slots.index_file import (
    CHECKSUM,
    HASH_HIGH,
    HASH_LOW,
    MAX_COUNTER,
    NUM_RECENT_CHANGES,
    SEQUENCE,
    STATE_AND_OWNER,
    IndexFile,
    SlotState,
    hashes_of,
    record_checksums,
)

_RESCAN_RECORDS = 16384  # per numpy call, so that other threads get the GIL in between


class IndexMirror:
    """Stored blocks by hash, of one index file.

    Reading needs no lock, from any thread: one dict operation at a time. refresh() may run on several threads; it reads records
    without the file's lock and relies on their checksums.
    """

    def __init__(self, file: IndexFile) -> None:
        """Scan the whole index; the caller holds the file's lock."""
        self._file = file
        self._mutex = threading.Lock()
        self._num_changes_seen = file.change_counter
        records = file.records
        is_valid = record_checksums(records) == records[:, CHECKSUM]
        stored = np.flatnonzero((records[:, STATE_AND_OWNER] == SlotState.STORED) & is_valid)
        names = np.ascontiguousarray(records[stored, HASH_LOW : HASH_HIGH + 1]).view("V16").ravel().tolist()
        self._slot_by_hash: dict[bytes, int] = dict(zip(names, stored.tolist(), strict=True))
        hash_by_slot = np.full(file.num_slots, None, dtype=object)
        hash_by_slot[stored] = names
        self._hash_by_slot: list[bytes | None] = hash_by_slot.tolist()

    def __len__(self) -> int:
        return len(self._slot_by_hash)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._slot_by_hash

    def missing(self, block_hashes: Iterable[bytes]) -> list[bytes]:
        """Those of the blocks that are not stored."""
        return list(itertools.filterfalse(self._slot_by_hash.__contains__, block_hashes))

    def slots_of(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Slots of those of the blocks that are stored."""
        return [slot for slot in map(self._slot_by_hash.get, block_hashes) if slot is not None]

    def prefix_slots(self, block_hashes: Iterable[bytes]) -> list[int]:
        """Slots of the longest run of stored blocks from the first hash on."""
        slots = []
        for slot in map(self._slot_by_hash.get, block_hashes):
            if slot is None:
                break
            slots.append(slot)
        return slots

    def count_prefix(self, block_hashes: Iterable[bytes]) -> int:
        """Length of that run; the cheapest form, without a line of Python per hash."""
        return len(list(itertools.takewhile(self._slot_by_hash.__contains__, block_hashes)))

    def refresh(self, max_changes: int | None = None, *, is_locked: bool = False) -> bool:
        """Apply what has changed; True when the mirror is up to date.

        With max_changes it neither waits nor applies more than that many, and answers False where that is not enough. is_locked:
        the caller holds the file's lock, so that a change which has not arrived is damage and will not come.
        """
        if self._file.change_counter == self._num_changes_seen:
            return True
        if not self._mutex.acquire(blocking=max_changes is None):
            return False
        try:
            newest = self._file.change_counter
            if newest == self._num_changes_seen:  # another thread was faster
                return True
            first = self._num_changes_seen + 1
            num_behind = newest - self._num_changes_seen
            if num_behind < 0 or newest >= MAX_COUNTER:  # damage: nobody knows which changes we lack
                if max_changes is None:
                    self._rescan(newest, first=0)
                return max_changes is None
            if max_changes is not None and num_behind > max_changes:
                return False
            sequences = np.arange(first, first + min(num_behind, NUM_RECENT_CHANGES))
            slots = self._file.recent_changes[sequences % NUM_RECENT_CHANGES].astype(np.int64)
            # Asked after reading the ring: entries may have been overwritten meanwhile.
            if self._file.change_counter - self._num_changes_seen <= NUM_RECENT_CHANGES:
                self._apply(slots, sequences)
                if is_locked:
                    self._num_changes_seen = int(sequences[-1])
            elif max_changes is None:
                self._rescan(newest, first)
            return self._num_changes_seen >= newest
        finally:
            self._mutex.release()

    def note_own_change(self, slots: Sequence[int], block_hashes: Sequence[bytes] | None) -> None:
        """The caller, who holds the file's lock, has just given these slots to these blocks, or to none, as the newest changes.

        Spares refresh() from reading them. While changes of others are outstanding, it is left to that.
        """
        with self._mutex:
            newest = self._file.change_counter
            if self._num_changes_seen != newest - len(slots):
                return
            for slot, name in zip(slots, block_hashes or itertools.repeat(None), strict=False):
                self._assign(slot, name)
            self._num_changes_seen = newest

    def drop_stale(self, slots: Iterable[int]) -> None:
        """Forget what these slots' records do not say (any more). Should one be written just now, its announcement follows."""
        with self._mutex:
            for slot in slots:
                name = self._hash_by_slot[slot]
                if name is not None and sequences_of(self._file, [slot], [name]) == [-1]:
                    self._assign(slot, None)

    def _assign(self, slot: int, name: bytes | None) -> None:
        old = self._hash_by_slot[slot]
        if old == name:
            return
        if old is not None and self._slot_by_hash.get(old) == slot:  # the block may be in another slot by now
            del self._slot_by_hash[old]
        if name is not None:
            self._slot_by_hash[name] = slot
        self._hash_by_slot[slot] = name

    def _rescan(self, newest: int, first: int) -> None:
        for start in range(0, self._file.num_slots, _RESCAN_RECORDS):
            sequences = self._file.records[start : start + _RESCAN_RECORDS, SEQUENCE]
            self._apply(np.flatnonzero(sequences >= np.uint64(first)) + start, None)
        self._num_changes_seen = newest

    def _apply(self, slots: npt.NDArray[np.int64], sequences: npt.NDArray[np.int64] | None) -> None:
        """Bring these slots up to date. A torn record is skipped: its writer announces it again when it is whole.

        With sequences, count those as seen up to the first that has not arrived (another core's stores may arrive late).
        """
        is_slot = slots < self._file.num_slots  # a damaged ring may hold anything
        slots = np.where(is_slot, slots, 0)
        records = self._file.records[slots]
        is_valid = record_checksums(records) == records[:, CHECKSUM]
        is_stored = is_valid & (records[:, STATE_AND_OWNER] == SlotState.STORED)
        for slot in slots[is_valid & ~is_stored].tolist():
            self._assign(slot, None)
        for slot, name in zip(slots[is_stored].tolist(), hashes_of(records[is_stored]), strict=True):
            self._assign(slot, name)
        if sequences is not None:
            late = np.flatnonzero((records[:, SEQUENCE].astype(np.int64) < sequences) & is_slot)
            self._num_changes_seen = int(sequences[late[0]] - 1 if len(late) else sequences[-1])


def sequences_of(file: IndexFile, slots: Sequence[int], block_hashes: Sequence[bytes]) -> list[int]:
    """Sequence numbers of slots that hold these blocks now, -1 where one does not.

    Takes no lock: a reader calls it before and after it copies a slot, and equal answers mean that the slot was not recycled.
    """
    if not slots:
        return []
    records = file.records[np.asarray(slots)]
    is_stored = (records[:, STATE_AND_OWNER] == SlotState.STORED) & (record_checksums(records) == records[:, CHECKSUM])
    found = zip(records[:, SEQUENCE].tolist(), is_stored.tolist(), hashes_of(records), block_hashes, strict=True)
    return [sequence if stored and name == wanted else -1 for sequence, stored, name, wanted in found]
