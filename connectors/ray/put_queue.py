"""Makes and drops the objects of a directory, one at a time: what waits meanwhile becomes one object, since each costs the same.

A writer's thread makes its object itself, along with those of the writers that wait, and a thread of ours drops objects. When Ray
hangs, so does one of them, and other writers are refused; readers go on.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connectors.ray.index import StoredObject, StoreIndex

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.25


class ObjectMedium(ABC):
    """Where objects are made. descriptor: a file of all of its memory, num_bytes long, for reading."""

    descriptor: int
    num_bytes: int

    @abstractmethod
    def make(self, runs: Sequence[memoryview], block_bytes: int) -> tuple[Any, list[int]] | None:
        """One object of these runs of blocks: what keeps it, and where each block begins. None: there is no room.

        May raise anything."""

    @abstractmethod
    def prepare(self) -> bool:
        """Make later objects faster, a little at a time; whether there is more to do."""


@dataclass(eq=False, slots=True)
class PutJob:
    """Blocks of one writer, for which room is reserved. Once is_done: their object and their position in it, or None, and the
    object is pinned for the writer. Of the lock of the indexes."""

    index: StoreIndex
    runs: Sequence[memoryview]  # of blocks that lie together in the pool
    num_blocks: int
    block_bytes: int
    max_object_bytes: int
    is_done: bool = False
    stored: StoredObject | None = None
    first: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.index.bytes_per_block


class PutQueue:
    """mutex: of all indexes of the directory."""

    def __init__(self, medium: ObjectMedium, mutex: threading.Lock) -> None:
        self._medium = medium
        self._mutex = mutex
        self._wakeup = threading.Condition(mutex)
        self._ray_turn = threading.Lock()  # whoever calls Ray; taken before the mutex
        self._jobs: deque[PutJob] = deque()
        self._dropped: list[StoredObject] = []
        self._has_to_prepare = True
        threading.Thread(target=self._run, name="ray-drop", daemon=True).start()

    def run(self, job: PutJob, timeout_s: float) -> bool:
        """Make an object of this job and of those that wait. False: Ray is busy that long with another one, and the job is void.

        Once begun it takes as long as it takes. The caller does not hold the mutex."""
        with self._mutex:
            self._jobs.append(job)
        if not self._ray_turn.acquire(timeout=timeout_s):
            with self._mutex:
                if job in self._jobs:
                    self._jobs.remove(job)
                    job.index.cancel(job.num_blocks)
                    return False
        else:
            try:
                while not job.is_done:
                    with self._mutex:
                        jobs = self._take_jobs()
                    self._make(jobs)
            finally:
                self._ray_turn.release()
        with self._mutex:
            if not job.is_done:  # taken by a writer with whom Ray hangs; what may still become of it is nobody's
                job.is_done = True
                return False
        return True

    # -- with the mutex held -------------------------------------------------------------------------------------------
    def drop(self, index: StoreIndex) -> None:
        """Let go of the objects that an index has dropped."""
        if index.dropped:
            self._dropped += index.dropped
            index.dropped.clear()
            self._wakeup.notify()

    def _take_jobs(self) -> list[PutJob]:
        """Those of one store, up to the size of an object."""
        jobs: list[PutJob] = []
        num_bytes = 0
        while self._jobs:
            job = self._jobs[0]
            if jobs and (job.index is not jobs[0].index or num_bytes + job.num_bytes > job.max_object_bytes):
                break
            jobs.append(self._jobs.popleft())
            num_bytes += job.num_bytes
        return jobs

    # -- whose turn it is with Ray -------------------------------------------------------------------------------------
    def _make(self, jobs: list[PutJob]) -> None:
        try:
            made = self._medium.make([run for job in jobs for run in job.runs], jobs[0].block_bytes)
        except Exception as error:  # the boundary to Ray: whatever it raises, these blocks are not stored
            logger.warning("no object could be made: %r", error)
            made = None
        with self._mutex:
            index = jobs[0].index
            if made is None:
                for job in jobs:
                    index.cancel(job.num_blocks)
            else:
                handle, offsets = made
                stored = StoredObject(handle, offsets, sum(job.num_bytes for job in jobs), num_pins=len(jobs))
                index.add_object(stored)
                first = 0
                for job in jobs:
                    job.stored, job.first = stored, first
                    first += job.num_blocks
                    if job.is_done:  # its writer has given up
                        index.unpin(stored)
                self.drop(index)
            for job in jobs:
                job.is_done = True
                job.runs = ()
            self._has_to_prepare = True
            self._wakeup.notify()

    def _run(self) -> None:
        while True:
            with self._mutex:
                if not (self._dropped or self._has_to_prepare):
                    self._wakeup.wait(_IDLE_WAIT_S)
                dropped, self._dropped = self._dropped, []
                has_to_prepare, self._has_to_prepare = self._has_to_prepare, False
            with self._ray_turn:
                for stored in dropped:
                    stored.handle = None  # the last reference: Ray frees it
            if has_to_prepare and self._medium.prepare():
                self._has_to_prepare = True
