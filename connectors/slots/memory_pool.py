"""A pool of slots in anonymous shared memory: two memfds, for the index and for the blocks, which live as long as a member.

Both are sealed against changing their size, so that no access to a page of theirs can fail. Nothing here has a name in a file
system: pool_members.py is how others come by the descriptors.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from connectors.huge_pages import map_file, populate
from connectors.slots.index_file import IndexFile, read_index_identity, write_empty_index
from connectors.slots.store import HEADER_PAGE_BYTES, SlotLayout, SlotMedium, StoredLayout, slot_bytes
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConnectorError

_Bytes = npt.NDArray[np.uint8]

_TOUCH_BYTES = 4 * 1024 * 1024  # at a time: some 10 ms of a worker thread
_MFD_NOEXEC_SEAL = 8  # of Linux' memfd.h; since Linux 6.3, where an administrator may insist on it
_FILE_LOCK = struct.Struct("hhqqi4x")  # struct flock on 64 bits: type, whence, start, length, process id
_FIRST_LEASE_BYTE = 2**40  # beyond the index: a lock needs no byte to be there


@dataclass(slots=True)
class PoolDescriptors:
    """The memfds of one pool. These are only ever handed out and opened anew, never locked: a lock would be shared with them."""

    index: int
    slots: int

    @classmethod
    def create(cls, pool: str, layout: SlotLayout, num_slots: int) -> PoolDescriptors:
        """A new, empty pool. Memory is taken as slots are touched. Raises OSError."""
        created = cls(_new_memfd(f"{pool}-index"), -1)
        try:
            created.slots = _new_memfd(f"{pool}-segment")
            write_empty_index(created.index, layout.fingerprint, num_slots, slot_bytes(layout), num_ready_slots=num_slots)
            os.ftruncate(created.slots, num_slots * slot_bytes(layout))
            for descriptor in (created.index, created.slots):
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        except BaseException:
            created.close()
            raise
        return created

    def read_layout(self) -> StoredLayout:
        """What its index says. Raises OSError or ConnectorError."""
        fingerprint, num_bytes = read_index_identity(_reopening_path(self.index))
        return StoredLayout(fingerprint, num_bytes - HEADER_PAGE_BYTES)

    def close(self) -> None:
        """Safe to repeat."""
        for descriptor in (self.index, self.slots):
            if descriptor >= 0:
                os.close(descriptor)
        self.index = self.slots = -1

    def retire(self) -> None:
        """Give the pool up, because its index is damaged: all members see that, and join a new one. Raises OSError."""
        os.fchmod(self.index, 0)


class MemoryIndexFile(IndexFile):
    """The index of a pool. As it has no name that could be removed, its permissions tell that it was given up."""

    def __init__(self, descriptor: int, layout: SlotLayout) -> None:
        """Raises OSError, or ConnectorError where this is no index of the layout."""
        super().__init__(_reopening_path(descriptor), layout.fingerprint, slot_bytes(layout))

    def discard(self) -> None:
        """As PoolDescriptors.retire()."""
        os.fchmod(self._descriptor, 0)

    def _is_kept(self, found: os.stat_result) -> bool:
        return found.st_mode & 0o600 != 0


class MemoryLease:
    """Proof of life: a lock on one byte of the index, which the kernel releases when the process dies."""

    def __init__(self, descriptor: int, number: int) -> None:
        """descriptor: the index. Raises OSError when the number is taken."""
        self.number = number
        self._descriptor = os.open(_reopening_path(descriptor), os.O_RDWR)  # locks belong to open file descriptions
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _lock_of(number))
        except BaseException:
            os.close(self._descriptor)
            raise

    def release(self) -> None:
        """Drop the lease. Safe to repeat."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_memory_lease_alive(descriptor: int, number: int) -> bool:
    """Whether the process that took this lease still runs. descriptor: the index, with no lease of its own."""
    lock_type, *_ = _FILE_LOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _lock_of(number)))
    return bool(lock_type != fcntl.F_UNLCK)


class MemoryMedium(SlotMedium):
    """The mapped slots."""

    needs_neighbours = False
    piece_bytes = 4 * 1024 * 1024  # small enough for threads to end at about the same time

    def __init__(self, descriptor: int, layout: SlotLayout, num_slots: int) -> None:
        """Raises OSError, or ConnectorError where the memory is not what create() makes."""
        self._slot_bytes = slot_bytes(layout)
        self._block_bytes = layout.block_bytes
        self._num_bytes = num_slots * self._slot_bytes
        is_sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
        if not is_sealed or os.fstat(descriptor).st_size != self._num_bytes:
            raise ConnectorError("a pool of other processes is not sealed, or not as large as its index says")
        self._memory: _Bytes = map_file(descriptor, self._num_bytes, is_writable=True)
        self._bytes = self._memory.data
        by_slot = self._memory.reshape(num_slots, self._slot_bytes)
        self._payloads: _Bytes = by_slot[:, HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + layout.block_bytes]
        self._num_touched_bytes = 0

    def read(self, slots: Sequence[int], blocks: Sequence[memoryview]) -> Iterator[bytes]:
        for slot, block in zip(slots, blocks, strict=True):
            # Lets go of the GIL, unlike an assignment of slices of bytes.
            np.copyto(np.frombuffer(block, dtype=np.uint8, count=self._block_bytes), self._payloads[slot])
            start = slot * self._slot_bytes
            yield self._bytes[start : start + BLOCK_HEADER_BYTES].tobytes()

    def write(self, slots: Sequence[int], headers: Iterable[bytes], blocks: Sequence[memoryview]) -> None:
        """Headers last: by then the block they are made from is in the core's cache."""
        next_header = iter(headers)
        for slot, block in zip(slots, blocks, strict=True):
            self._payloads[slot] = np.frombuffer(block, dtype=np.uint8, count=self._block_bytes)  # lets go of the GIL
            start = slot * self._slot_bytes
            self._bytes[start : start + BLOCK_HEADER_BYTES] = next(next_header)

    def grow(self, first_slot: int, end_slot: int) -> None:
        """All slots are there from the start."""

    def is_intact(self) -> bool:
        """The kernel keeps it so."""
        return True

    def prepare(self, num_ready_slots: int) -> bool:
        """Touch what comes next: a page's first use costs ten times its copy, and several times for the second process."""
        first = self._num_touched_bytes
        self._num_touched_bytes = min(self._num_bytes, first + _TOUCH_BYTES)
        populate(self._memory[first : self._num_touched_bytes])
        return self._num_touched_bytes < self._num_bytes

    def close(self) -> None:
        del self._memory, self._bytes, self._payloads  # the mapping ends with the last array on it


def _new_memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, flags)


def _reopening_path(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _lock_of(number: int) -> bytes:
    return _FILE_LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _FIRST_LEASE_BYTE + number, 1, 0)
