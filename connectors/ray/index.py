"""What one store of a directory holds: blocks by name, in slots of slabs, within a budget of bytes.

A slab is one object of Ray's, cut into slots of one block; a slot is known by its offset in the object store's memory.
Plain state without Ray, sockets or threads; the caller holds a lock. The least recently used block goes first, and a prefix
is touched from its end to its beginning, so that its tail goes first.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from connectors.ray.messages import StoreStatus
from connectors.stored_block import BLOCK_HEADER_BYTES

_ALIGNMENT = 64
_FIRST_SLAB_BYTES = 4 * 1024 * 1024  # then as much as there is, up to a whole object: a small store takes little


@dataclass(eq=False, slots=True)
class Place:
    """Where a block is, for as long as it is found under its name or somebody copies it."""

    offset: int
    header: bytes
    number: int  # in its store: a block that goes and comes again has another one
    last_used_s: float  # Unix time
    num_pins: int = 0
    is_forgotten: bool = False


class StoreIndex:
    """One store, of at most capacity_bytes, in slabs of at most object_bytes."""

    def __init__(self, capacity_bytes: int, block_bytes: int, object_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.block_bytes = block_bytes
        self.bytes_per_block = block_bytes + BLOCK_HEADER_BYTES
        self.slot_bytes = -(-block_bytes // _ALIGNMENT) * _ALIGNMENT
        self.slabs: list[Any] = []  # what keeps them (opaque here); empty again once the store has ended
        self.has_ended = False
        self._slots_per_object = max(1, object_bytes // self.slot_bytes)
        self._place_by_name: OrderedDict[bytes, Place] = OrderedDict()  # the least recently used first
        self._free_offsets: list[int] = []
        self._num_slots = 0
        self._numbers = itertools.count(1)
        self._num_evicted = 0

    def status(self) -> StoreStatus:
        """For every answer."""
        num_blocks = len(self._place_by_name)
        return StoreStatus(num_blocks, num_blocks * self.bytes_per_block, self.capacity_bytes, self._num_evicted)

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return self._num_slots * self.bytes_per_block

    # -- finding -------------------------------------------------------------------------------------------------------
    def find(self, name: bytes) -> Place | None:
        """Where a block is, if it is stored."""
        return self._place_by_name.get(name)

    def names(self) -> list[bytes]:
        """Of all blocks, the least recently used first."""
        return list(self._place_by_name)

    def touch(self, chain: Sequence[bytes]) -> None:
        """These were used now; chain goes from a prefix's beginning to its end."""
        now_s = time.time()
        for name in reversed(chain):
            place = self._place_by_name.get(name)
            if place is not None:
                place.last_used_s = now_s
                self._place_by_name.move_to_end(name)

    def unpin(self, place: Place) -> None:
        """One reader less."""
        place.num_pins -= 1
        self._free_if_unused(place)

    # -- storing -------------------------------------------------------------------------------------------------------
    def next_slab_slots(self, room_bytes: int) -> int:
        """How many slots another slab should have, with room_bytes left for all stores; 0: there is to be none."""
        num_first = max(1, _FIRST_SLAB_BYTES // self.slot_bytes)
        num_left = min(self.capacity_bytes - self.num_bytes, room_bytes) // self.bytes_per_block
        return 0 if self.has_ended else max(0, min(self._slots_per_object, max(num_first, self._num_slots), num_left))

    @property
    def num_free(self) -> int:
        """Slots."""
        return len(self._free_offsets)

    @property
    def is_short_of_slots(self) -> bool:
        """Whether another slab would be used soon."""
        return self._num_slots > 0 and len(self._free_offsets) < min(self._slots_per_object, self._num_slots) // 2

    def add_slab(self, handle: Any, offset: int, num_slots: int) -> None:
        """An object, and where it begins."""
        self.slabs.append(handle)
        self._num_slots += num_slots
        self._free_offsets += range(offset + (num_slots - 1) * self.slot_bytes, offset - 1, -self.slot_bytes)

    def take(self, num_slots: int) -> list[int]:
        """That many free slots, or those that there are, neighbours where possible. They come back by free() or commit()."""
        first = max(0, len(self._free_offsets) - num_slots)
        taken = sorted(self._free_offsets[first:])
        del self._free_offsets[first:]
        return taken

    def evict(self, num_slots: int, kept: Iterable[bytes]) -> None:
        """Free that many slots, or as many as can be had without the blocks of `kept` and those in use."""
        if num_slots <= 0:
            return
        safe = set(kept)
        unused = (name for name, place in self._place_by_name.items() if name not in safe and not place.num_pins)
        victims = list(itertools.islice(unused, num_slots))
        self._num_evicted += len(victims)
        self.forget(victims)

    def free(self, offsets: Iterable[int]) -> None:
        """Slots that were taken for nothing."""
        self._free_offsets += offsets

    def commit(self, names: Sequence[bytes], offsets: Sequence[int], headers: Sequence[bytes]) -> None:
        """Slots that were taken hold these blocks now, used as in a prefix; what another has stored meanwhile stays as it is."""
        now_s = time.time()
        for name, offset, header in reversed(list(zip(names, offsets, headers, strict=True))):
            if name in self._place_by_name:
                self._free_offsets.append(offset)
            else:
                self._place_by_name[name] = Place(offset, header, next(self._numbers), now_s)

    def forget(self, names: Iterable[bytes]) -> None:
        """These blocks are not stored any more."""
        for name in names:
            place = self._place_by_name.pop(name, None)
            if place is not None:
                place.is_forgotten = True
                self._free_if_unused(place)

    def end(self) -> list[Any]:
        """Forget everything, for good. Returns what keeps the slabs."""
        self.has_ended = True
        slabs, self.slabs, self._num_slots, self._free_offsets = self.slabs, [], 0, []
        self._place_by_name.clear()
        return slabs

    def _free_if_unused(self, place: Place) -> None:
        if place.is_forgotten and not place.num_pins:
            self._free_offsets.append(place.offset)
