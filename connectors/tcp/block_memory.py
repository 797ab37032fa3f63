"""Blocks in memory of this process: equal slots, found by hash, the least recently used evicted first.

Knows nothing of networks. A pinned block is not evicted, and its slot is not used again, until the last pin is gone.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header
from core.kv.layout import KVLayout


def slot_bytes(layout: KVLayout) -> int:
    """What a block of this layout takes."""
    return layout.block_stride_bytes + BLOCK_HEADER_BYTES


class BlockMemory:
    """As many blocks of one layout as capacity_bytes holds, in page-aligned memory that is touched once, here.

    Any thread may call anything. Bytes are copied without the GIL and outside of the lock: a slot belongs to who has claimed
    or pinned it.
    """

    def __init__(self, layout: KVLayout, capacity_bytes: int) -> None:
        """Raises OSError when there is no such memory."""
        self.layout = layout
        self.num_slots = capacity_bytes // slot_bytes(layout)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        self._mapping = mmap.mmap(-1, max(1, self.num_slots) * layout.block_stride_bytes, flags=flags)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping, dtype=np.uint8)
        self._mutex = threading.Lock()  # of all below
        self._slot_by_hash: dict[bytes, int] = {}
        self._order: OrderedDict[bytes, None] = OrderedDict()  # of stored blocks without a pin; the next to go first
        self._hash_by_slot: list[bytes | None] = [None] * self.num_slots
        self._header_by_slot: list[bytes] = [b""] * self.num_slots
        self._num_pins_by_slot: dict[int, int] = {}
        self._free_slots = list(range(self.num_slots - 1, -1, -1))
        self.num_evictions = 0

    @property
    def stored(self) -> Collection[bytes]:
        """The hashes of what is here now; asking needs no lock."""
        return self._slot_by_hash.keys()

    @property
    def num_pinned(self) -> int:
        """Slots that somebody reads or has leased."""
        return len(self._num_pins_by_slot)

    # -- bytes ---------------------------------------------------------------------------------------------------------
    def read(self, slot: int, target: memoryview) -> BlockCheck:
        """Copy a pinned slot's payload and verify the copy."""
        block_hash = self._hash_by_slot[slot]
        np.copyto(np.frombuffer(target, dtype=np.uint8), self._payload(slot))  # lets go of the GIL, unlike a slice of bytes
        return check_block(self._header_by_slot[slot], target, self.layout.fingerprint, block_hash or b"")

    def parts(self, slot: int) -> tuple[bytes, memoryview]:
        """A pinned slot's header and payload, as they lie here."""
        return self._header_by_slot[slot], self._payload(slot).data

    def _payload(self, slot: int) -> npt.NDArray[np.uint8]:
        start = slot * self.layout.block_stride_bytes
        return self._bytes[start : start + self.layout.block_bytes]

    # -- slots ---------------------------------------------------------------------------------------------------------
    def claim(self, num_slots: int, protected: Collection[bytes]) -> list[int]:
        """Slots to fill() or give_back(), for which the least recently used blocks go. Fewer than asked for when the next to go
        is one of `protected`, or all are pinned."""
        slots: list[int] = []
        with self._mutex:
            while len(slots) < num_slots:
                if self._free_slots:
                    slots.append(self._free_slots.pop())
                    continue
                oldest = next(iter(self._order), None)
                if oldest is None or oldest in protected:
                    break
                del self._order[oldest]
                slot = self._slot_by_hash.pop(oldest)
                self._hash_by_slot[slot] = None
                self.num_evictions += 1
                slots.append(slot)
        return slots

    def fill(self, slot: int, block_hash: bytes, payload: memoryview) -> None:
        """Copy a block into a claimed slot; it is findable then. Where somebody else's copy is there already, that one stays."""
        np.copyto(self._payload(slot), np.frombuffer(payload, dtype=np.uint8))
        self._header_by_slot[slot] = pack_block_header(self.layout.fingerprint, block_hash, payload)
        with self._mutex:
            if block_hash in self._slot_by_hash:
                self._free_slots.append(slot)
            else:
                self._hash_by_slot[slot] = block_hash
                self._slot_by_hash[block_hash] = slot
                self._order[block_hash] = None

    def give_back(self, slots: Iterable[int]) -> None:
        """Claimed slots that were not filled."""
        with self._mutex:
            self._free_slots.extend(slots)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """These are in use, the first of them most: parents outlive their children."""
        with self._mutex:
            for block_hash in reversed(block_hashes):
                if block_hash in self._order:
                    self._order.move_to_end(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Remove a block. Its slot is free once nobody has it pinned. Unknown ones are ignored."""
        with self._mutex:
            slot = self._slot_by_hash.pop(block_hash, None)
            if slot is not None:
                self._order.pop(block_hash, None)
                self._hash_by_slot[slot] = None
                if slot not in self._num_pins_by_slot:
                    self._free_slots.append(slot)

    # -- pins ----------------------------------------------------------------------------------------------------------
    def pin_prefix(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Pin the leading blocks that are here; their slots."""
        slots: list[int] = []
        with self._mutex:
            for block_hash in block_hashes:
                slot = self._slot_by_hash.get(block_hash)
                if slot is None:
                    break
                self._pin(block_hash, slot)
                slots.append(slot)
        return slots

    def pin_present(self, block_hashes: Iterable[bytes], max_slots: int) -> list[int]:
        """Pin those that are here, at most max_slots of them; their slots."""
        slots: list[int] = []
        with self._mutex:
            for block_hash in block_hashes:
                slot = self._slot_by_hash.get(block_hash)
                if slot is not None and len(slots) < max_slots:
                    self._pin(block_hash, slot)
                    slots.append(slot)
        return slots

    def unpin(self, slots: Sequence[int]) -> None:
        """Give pins back, one per slot named. The blocks are then the most recently used, the first of them most."""
        with self._mutex:
            for slot in reversed(slots):
                num_left = self._num_pins_by_slot[slot] - 1
                if num_left:
                    self._num_pins_by_slot[slot] = num_left
                    continue
                del self._num_pins_by_slot[slot]
                block_hash = self._hash_by_slot[slot]
                if block_hash is None:  # forgotten meanwhile
                    self._free_slots.append(slot)
                else:
                    self._order[block_hash] = None

    def _pin(self, block_hash: bytes, slot: int) -> None:
        self._order.pop(block_hash, None)
        self._num_pins_by_slot[slot] = self._num_pins_by_slot.get(slot, 0) + 1

    # -- looking in: nothing here is a use -----------------------------------------------------------------------------
    def eviction_order(self) -> list[bytes]:
        """All blocks, the next to go first; those that are pinned last."""
        with self._mutex:
            pinned = [name for slot in self._num_pins_by_slot if (name := self._hash_by_slot[slot]) is not None]
            return [*self._order, *pinned]

    def copy_of(self, block_hash: bytes) -> tuple[bytes, bytearray] | None:
        """A block's header and a copy of its payload; None when it is not here, or has gone meanwhile."""
        slot = self._slot_by_hash.get(block_hash)
        if slot is None:
            return None
        header, payload = self._header_by_slot[slot], bytearray(self.layout.block_bytes)
        np.copyto(np.frombuffer(payload, dtype=np.uint8), self._payload(slot))
        is_same = self._slot_by_hash.get(block_hash) == slot and self._header_by_slot[slot] is header  # each fill makes its own
        return (header, payload) if is_same else None
