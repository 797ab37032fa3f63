"""Makes and drops the objects of Ray's that stores keep their blocks in, one at a time, mostly ahead of their use.

Blocks come and go in an object's slots without a call of Ray, which would cost more than the copy of a few blocks. Where a store
may grow and has no free slot, a writer's thread makes an object itself. When Ray hangs, so does the thread that calls it; others
go on with what they have.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.huge_pages import collapse
from connectors.ray.index import StoreIndex

logger = logging.getLogger(__name__)

# Of the object store: what is freed is not free at once, memory gets fragmented, and other nodes' blocks come.
USABLE_FRACTION = 0.8
_IDLE_WAIT_S = 0.25
_RETRY_S = 1.0  # after an object that could not be made


class ObjectMedium(ABC):
    """Where objects are made. memory: all of it, for writing; descriptor: a file of it, num_bytes long, for reading."""

    descriptor: int
    num_bytes: int
    memory: npt.NDArray[np.uint8]

    @abstractmethod
    def make(self, num_bytes: int) -> tuple[Any, int] | None:
        """One object: what keeps it, and where it begins in the memory. None: there is no room. May raise anything."""


class SlabMaker:
    """mutex: of all indexes of the directory. indexes: those that there are, called with the mutex held."""

    def __init__(
        self, medium: ObjectMedium, max_bytes: int, mutex: threading.Lock, indexes: Callable[[], Iterable[StoreIndex]]
    ) -> None:
        """max_bytes: of the objects of all stores."""
        self._medium = medium
        self._max_bytes = max_bytes
        self._mutex = mutex
        self._indexes = indexes
        self._wakeup = threading.Condition(mutex)
        self._ray_turn = threading.Lock()  # whoever calls Ray; taken before the mutex
        self._retry_at_s = 0.0
        self._dropped: list[Any] = []
        self._small_paged: list[tuple[int, int]] = []  # beginning and end of objects
        threading.Thread(target=self._run, name="ray-slabs", daemon=True).start()

    def grow(self, index: StoreIndex, num_slots: int, timeout_s: float) -> bool:
        """Make objects until this store has num_slots free slots or may not grow. False: Ray is busy that long with another one.

        Once begun it takes as long as it takes. The caller does not hold the mutex."""
        deadline_s = time.monotonic() + timeout_s
        while self._wanted_slots(index, num_slots):
            if not self._ray_turn.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
                self._retry_at_s = time.monotonic() + _RETRY_S  # the next writers need not wait as long
                return False
            try:
                self._make_slab(index, num_slots)
            finally:
                self._ray_turn.release()
        return True

    def drop(self, index: StoreIndex) -> None:
        """A store ends. The caller holds the mutex."""
        self._dropped += index.end()
        self._wakeup.notify()

    def wake(self) -> None:
        """Some store may be short of slots. The caller holds the mutex."""
        self._wakeup.notify()

    def _wanted_slots(self, index: StoreIndex, num_slots: int) -> int:
        """Of the next object; 0: none is wanted, or there is no room."""
        with self._mutex:
            return 0 if index.num_free >= num_slots else self._next_slots(index)

    def _next_slots(self, index: StoreIndex) -> int:
        """The caller holds the mutex."""
        if time.monotonic() < self._retry_at_s:
            return 0
        return index.next_slab_slots(self._max_bytes - sum(other.num_bytes for other in self._indexes()))

    def _make_slab(self, index: StoreIndex, num_slots: int) -> None:
        """The caller has Ray's turn."""
        wanted = self._wanted_slots(index, num_slots)
        if not wanted:  # another writer has made one meanwhile
            return
        try:
            made = self._medium.make(wanted * index.slot_bytes)
        except Exception as error:  # the boundary to Ray: whatever it raises, the store does not grow
            logger.warning("no object could be made: %r", error)
            made = None
        with self._mutex:
            if made is None:
                self._retry_at_s = time.monotonic() + _RETRY_S
            elif index.has_ended:
                self._dropped.append(made[0])
            else:
                index.add_slab(*made, wanted)
                self._small_paged.append((made[1], made[1] + wanted * index.slot_bytes))
                self._wakeup.notify()

    def _run(self) -> None:
        while True:
            with self._mutex:
                short = [index for index in self._indexes() if index.is_short_of_slots and self._next_slots(index)]
                if not (self._dropped or short or self._small_paged):
                    self._wakeup.wait(_IDLE_WAIT_S)
                small_paged, self._small_paged = self._small_paged, []
                dropped, self._dropped = self._dropped, []
            with self._ray_turn:
                dropped.clear()  # the last references: Ray frees these
                for index in short:
                    self._make_slab(index, index.num_free + 1)
            for begin, end in small_paged:
                collapse(self._medium.memory[begin:end])
