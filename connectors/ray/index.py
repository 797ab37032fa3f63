"""What one store of a directory holds: blocks by name, in objects of several blocks, within a budget of bytes.

Plain state without Ray, sockets or threads; the caller holds a lock. An object goes as a whole, the least recently used first.
A prefix is touched from its end to its beginning, so that its tail goes first.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.ray.messages import StoreStatus
from connectors.stored_block import BLOCK_HEADER_BYTES


@dataclass(eq=False, slots=True)
class StoredObject:
    """One object: where its blocks begin in the object store's memory, and what keeps it there (opaque here)."""

    handle: Any
    offsets: Sequence[int]
    num_bytes: int
    names: set[bytes] = field(default_factory=set)  # of blocks that are found here
    num_pins: int = 0  # readers that copy, writers that have still to name their blocks
    number: int = 0  # in its store
    last_used_s: float = 0.0  # Unix time


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block is."""

    stored: StoredObject
    position: int
    header: bytes

    @property
    def offset(self) -> int:
        """In bytes, from the beginning of the object store's memory."""
        return self.stored.offsets[self.position]


class StoreIndex:
    """One store. `dropped` collects objects that hold nothing any more: the caller lets go of them, outside its lock."""

    def __init__(self, capacity_bytes: int, block_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.bytes_per_block = block_bytes + BLOCK_HEADER_BYTES
        self.dropped: list[StoredObject] = []
        self._place_by_name: dict[bytes, Place] = {}
        self._objects: OrderedDict[StoredObject, None] = OrderedDict()  # the least recently used first
        self._numbers = itertools.count(1)
        self._num_reserved_bytes = 0
        self._num_object_bytes = 0
        self._num_evicted = 0

    def status(self) -> StoreStatus:
        """For every answer."""
        return StoreStatus(len(self._place_by_name), self.num_bytes, self.capacity_bytes, self._num_evicted)

    @property
    def num_bytes(self) -> int:
        """Of objects, and of those that are being made."""
        return self._num_object_bytes + self._num_reserved_bytes

    # -- finding -------------------------------------------------------------------------------------------------------
    def find(self, name: bytes) -> Place | None:
        """Where a block is, if it is stored."""
        return self._place_by_name.get(name)

    def touch(self, chain: Sequence[bytes]) -> None:
        """These were used now; chain goes from a prefix's beginning to its end."""
        last: StoredObject | None = None
        now_s = time.time()
        for name in reversed(chain):
            place = self._place_by_name.get(name)
            if place is not None and place.stored is not last:
                last = place.stored
                last.last_used_s = now_s
                self._objects.move_to_end(last)

    def objects(self) -> list[StoredObject]:
        """All, the least recently used first."""
        return list(self._objects)

    def unpin(self, stored: StoredObject) -> None:
        """One reader or writer less."""
        stored.num_pins -= 1
        self._drop_if_unused(stored)

    # -- storing -------------------------------------------------------------------------------------------------------
    def reserve(self, num_blocks: int, kept: Iterable[bytes], max_bytes: int) -> int:
        """Make room for num_blocks blocks, or as many of them as can be had without the objects of `kept` and those in use, and
        with at most max_bytes more than now in all. The reservation ends with commit() or cancel()."""
        safe = {place.stored for name in kept if (place := self._place_by_name.get(name))}
        needed = num_blocks * self.bytes_per_block
        limit = min(self.capacity_bytes, self.num_bytes + max_bytes)
        if self.num_bytes + needed > limit:
            victims = (stored for stored in list(self._objects) if stored not in safe and not stored.num_pins)
            for victim in itertools.takewhile(lambda _: self.num_bytes + needed > limit, victims):
                self._num_evicted += len(victim.names)
                self.forget(list(victim.names))
        num_granted = max(0, min(num_blocks, (limit - self.num_bytes) // self.bytes_per_block))
        self._num_reserved_bytes += num_granted * self.bytes_per_block
        return num_granted

    def cancel(self, num_blocks: int) -> None:
        """Give back a reservation whose object was not made."""
        self._num_reserved_bytes -= num_blocks * self.bytes_per_block

    def add_object(self, stored: StoredObject) -> None:
        """An object for which room was reserved, with a pin of each writer that will commit() or unpin()."""
        self._num_reserved_bytes -= stored.num_bytes
        self._num_object_bytes += stored.num_bytes
        stored.number, stored.last_used_s = next(self._numbers), time.time()
        self._objects[stored] = None

    def commit(self, stored: StoredObject, first: int, names: Sequence[bytes], headers: Sequence[bytes]) -> None:
        """Blocks [first, first + len(names)) of an object are these; what another object has already stays there. Ends a pin."""
        for position, (name, header) in enumerate(zip(names, headers, strict=True), start=first):
            if name not in self._place_by_name:
                self._place_by_name[name] = Place(stored, position, header)
                stored.names.add(name)
        self.unpin(stored)

    def forget(self, names: Iterable[bytes]) -> None:
        """These blocks are not stored any more."""
        for name in names:
            place = self._place_by_name.pop(name, None)
            if place is not None:
                place.stored.names.discard(name)
                self._drop_if_unused(place.stored)

    def clear(self) -> None:
        """Forget everything."""
        self._num_evicted += len(self._place_by_name)
        self.forget(list(self._place_by_name))

    def _drop_if_unused(self, stored: StoredObject) -> None:
        if not stored.names and not stored.num_pins and stored in self._objects:
            del self._objects[stored]
            self._num_object_bytes -= stored.num_bytes
            self.dropped.append(stored)
