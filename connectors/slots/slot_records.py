"""The records of a slot index as one process changes them: states are written, freed, and repaired after a crash.

Which slots are taken for what is decided elsewhere. The caller holds the index's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from connectors.slots.eviction_policy import TICK_MASK
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

logger = logging.getLogger(__name__)

NO_HASH = bytes(16)
_REPAIR_RECORDS = 65536  # per numpy call


class SlotRecords:
    """Changes of `file`'s records, which `mirror` learns of at once."""

    def __init__(self, file: IndexFile, mirror: IndexMirror, lease_number: int) -> None:
        """lease_number: this process's, which slots in WRITING carry."""
        self._file = file
        self._mirror = mirror
        self._lease_number = lease_number

    def write(self, slots: Sequence[int], state: SlotState, block_hashes: Sequence[bytes], links: Words | None = None) -> None:
        """Give slots a new state. Order matters for readers without the lock: records, then the ring, then the counter.

        links, [n, 2]: PARENT and DEPTH of each.
        """
        if not slots:
            return
        where = np.asarray(slots, dtype=np.int64)
        sequences = np.arange(1, len(slots) + 1, dtype=np.uint64) + np.uint64(self._file.change_counter)
        records: Words = np.zeros((len(slots), 8), dtype=np.uint64)
        records[:, STATE_AND_OWNER] = state if state is not SlotState.WRITING else state | self._lease_number << 32
        records[:, HASH_LOW : HASH_HIGH + 1] = np.frombuffer(b"".join(block_hashes), dtype=np.uint64).reshape(-1, 2)
        records[:, SEQUENCE] = sequences
        records[:, LAST_USE] = self._file.records[where, LAST_USE] & np.uint64(TICK_MASK)
        if links is not None:
            records[:, PARENT : DEPTH + 1] = links
        records[:, CHECKSUM] = record_checksums(records)
        self._file.records[where] = records
        self._file.recent_changes[(sequences % np.uint64(NUM_RECENT_CHANGES)).astype(np.int64)] = where
        self._file.change_counter += len(slots)
        self._mirror.note_own_change(slots, block_hashes if state is SlotState.STORED else None)

    def free(self, slots: Sequence[int]) -> None:
        """Make slots FREE."""
        if not slots:
            return
        self._file.num_frees += 1  # before the records, so that a death in between loses no slot
        self.write(slots, SlotState.FREE, [NO_HASH] * len(slots))

    def are_ours(self, slots: Sequence[int]) -> list[bool]:
        """Which slots this process is writing."""
        if not slots:
            return []
        states = self._file.records[np.asarray(slots), STATE_AND_OWNER]
        are_ours: list[bool] = (states == np.uint64(SlotState.WRITING | self._lease_number << 32)).tolist()
        return are_ours

    def in_state(self, state: SlotState, num_slots: int) -> npt.NDArray[np.int64]:
        """Those of the first num_slots slots that are in it, whoever put them there."""
        states = self._file.records[:num_slots, STATE_AND_OWNER] & np.uint64(0xFFFFFFFF)
        return np.flatnonzero(states == state)

    def torn(self) -> list[int]:
        """Slots whose records are damaged."""
        found: list[int] = np.flatnonzero(~_are_possible(self._file.records)).tolist()
        return found

    def repair(self) -> None:
        """Drop torn records and announce changes whose writer died before it did."""
        records = self._file.records
        torn: list[int] = []
        highest = highest_tick = 0
        for start in range(0, self._file.num_slots, _REPAIR_RECORDS):
            part = records[start : start + _REPAIR_RECORDS].copy()
            is_valid = _are_possible(part)
            torn.extend((np.flatnonzero(~is_valid) + start).tolist())
            highest = max(highest, int(part[is_valid, SEQUENCE].max(initial=0)))
            has_odd_tick = part[:, LAST_USE] >= MAX_COUNTER  # damage: no checksum covers it
            records[np.flatnonzero(has_odd_tick) + start, LAST_USE] = 0
            ticks = part[~has_odd_tick, LAST_USE] & np.uint64(TICK_MASK)
            highest_tick = max(highest_tick, int(ticks.max(initial=0)))
        # A jump of the counter past the ring sends every mirror through a full scan.
        self._file.change_counter = max(highest, self._file.change_counter) + NUM_RECENT_CHANGES + 1
        self._file.tick = max(highest_tick, self._file.tick)
        self._file.num_frees += 1
        self.write(torn, SlotState.FREE, [NO_HASH] * len(torn))
        if torn:
            logger.info("repaired the slot index: %d torn records", len(torn))


def _are_possible(records: Words) -> npt.NDArray[np.bool_]:
    """Which records, [n, 8], are whole and say something that a writer says."""
    states, owners = records[:, STATE_AND_OWNER] & np.uint64(0xFFFFFFFF), records[:, STATE_AND_OWNER] >> np.uint64(32)
    has_state = (states == SlotState.WRITING) | ((states <= SlotState.STORED) & (owners == 0))
    possible: npt.NDArray[np.bool_] = (
        (record_checksums(records) == records[:, CHECKSUM]) & has_state & (records[:, SEQUENCE] < MAX_COUNTER)
    )
    return possible
