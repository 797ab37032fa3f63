"""The one thread of a directory that makes and drops objects: what waits for it becomes one object, since each costs the same.

It alone waits for Ray. When Ray hangs, so does this thread, and writers are refused; readers go on.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from connectors.ray_index import StoredObject, StoreIndex

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
    """Blocks of one writer, for which room is reserved. After is_done: their object and their position in it, or None.

    is_abandoned: the writer has gone. Both under the lock of the indexes.
    """

    index: StoreIndex
    runs: Sequence[memoryview]  # of blocks that lie together in the pool
    num_blocks: int
    block_bytes: int
    max_object_bytes: int
    is_done: threading.Event = field(default_factory=threading.Event)
    is_abandoned: bool = False
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
        self._jobs: deque[PutJob] = deque()
        self._dropped: list[StoredObject] = []
        self._busy_since_s: float | None = None
        threading.Thread(target=self._run, name="ray-put", daemon=True).start()

    # -- with the mutex held -------------------------------------------------------------------------------------------
    def is_stuck(self, timeout_s: float) -> bool:
        """Whether what is being done takes longer than that already."""
        return self._busy_since_s is not None and time.monotonic() - self._busy_since_s > timeout_s

    def add(self, job: PutJob) -> None:
        """Make an object of it, some time."""
        self._jobs.append(job)
        self._wakeup.notify()

    def drop(self, index: StoreIndex) -> None:
        """Let go of the objects that an index has dropped."""
        if index.dropped:
            self._dropped += index.dropped
            index.dropped.clear()
            self._wakeup.notify()

    def abandon(self, job: PutJob) -> None:
        """The writer gives up."""
        job.is_abandoned = True
        if job.stored is not None:
            job.index.unpin(job.stored)
            self.drop(job.index)

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        has_more = True
        while True:
            with self._mutex:
                if not (self._jobs or self._dropped or has_more):
                    self._wakeup.wait(_IDLE_WAIT_S)
                dropped, self._dropped = self._dropped, []
                jobs = self._take_jobs()
                self._busy_since_s = time.monotonic()
            if jobs:
                self._make(jobs)
                has_more = True
            elif has_more:
                has_more = self._medium.prepare()
            for stored in dropped:  # after the object, for which there is room without them: its writer waits
                stored.handle = None  # the last reference: Ray frees it
            with self._mutex:
                self._busy_since_s = None

    def _take_jobs(self) -> list[PutJob]:
        """Those of one store, up to the size of an object."""
        jobs: list[PutJob] = []
        num_bytes = 0
        while self._jobs:
            job = self._jobs[0]
            if job.is_abandoned:
                job.index.cancel(job.num_blocks)
                self._jobs.popleft()
                continue
            if jobs and (job.index is not jobs[0].index or num_bytes + job.num_bytes > job.max_object_bytes):
                break
            jobs.append(self._jobs.popleft())
            num_bytes += job.num_bytes
        return jobs

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
                    if job.is_abandoned:
                        index.unpin(stored)
                self.drop(index)
        for job in jobs:
            job.runs = ()
            job.is_done.set()
