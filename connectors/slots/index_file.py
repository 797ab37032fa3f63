"""The file under a slot index: a header, a ring of recent changes and one 64-byte record per slot, mapped by every process.

Only layout, checksums, the lock and integrity live here; what the records mean is the slot index's business.

    | header 4096 | recent changes: NUM_RECENT_CHANGES slot numbers of 4 bytes | num_slots records of 64 bytes |
"""

from __future__ import annotations

import contextlib
import enum
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from connectors.file_lock import lock_descriptor, unlock_descriptor
from connectors.slots.bus_guard import GuardedMapping
from core.errors import ConnectorError

Words = npt.NDArray[np.uint64]

NUM_RECENT_CHANGES = 16384
MAX_COUNTER = 2**62  # a larger one is damage
MAX_LEASES = 2**31
MAX_SLOT_BYTES = 2**40
RECORD_BYTES = 64
HASH_BYTES = 16
FORMAT_VERSION = 1  # of index and slots; of whatever a process of another version would misread
USE_TIMES = range(64, 512)  # words of the header, for connectors/slots/use_times.py
_HEADER_BYTES = 4096
_RECORDS_OFFSET = _HEADER_BYTES + 4 * NUM_RECENT_CHANGES
_MAGIC_AND_VERSION = int.from_bytes(b"KVRIDX" + FORMAT_VERSION.to_bytes(2, "little"), "little")

# Words of a record. LAST_USE is only a hint (see eviction_policy) and changes without notice, so the checksum leaves it out.
# PARENT: HASH_LOW of the block before this one in its prefix, DEPTH: its position there, from 1 (0: not known).
STATE_AND_OWNER, HASH_LOW, HASH_HIGH, SEQUENCE, LAST_USE, PARENT, DEPTH, CHECKSUM = range(8)
_MULTIPLIERS: Words = np.array(
    [
        0x9E3779B97F4A7C15,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0xD6E8FEB86659FD93,
        0,
        0xFF51AFD7ED558CCD,
        0xC4CEB9FE1A85EC53,
        0,
    ],
    dtype=np.uint64,
)


class SlotState(enum.IntEnum):
    """FREE: holds nothing. WRITING: its owner fills it. STORED: readable by all."""

    FREE = 0
    WRITING = 1
    STORED = 2


def record_checksums(records: Words) -> Words:
    """The checksums, [n], that the given records, [n, 8], should carry. An all-zero record is a valid FREE one."""
    total = records @ _MULTIPLIERS
    mixed: Words = total ^ (total >> np.uint64(32))
    return mixed


def hashes_of(records: Words) -> list[bytes]:
    """Block hashes of records, [n, 8]."""
    packed = records[:, HASH_LOW : HASH_HIGH + 1].tobytes()
    return [packed[start : start + HASH_BYTES] for start in range(0, len(packed), HASH_BYTES)]


class _HeaderWord:
    """One 8-byte word of the header, shared by all processes."""

    def __init__(self, position: int) -> None:
        self._position = position

    def __get__(self, file: IndexFile, owner: type[IndexFile]) -> int:
        return int(file.header[self._position])

    def __set__(self, file: IndexFile, value: int) -> None:
        file.header[self._position] = value


class IndexFile:
    """One open index file. Words and records may be read at any time and written only under locked().

    Readers without the lock may see a record half written: its checksum says so. Any word may be anything at any time, because
    the file may be damaged. Where it is cut, reads find zeros and is_intact() is False from then on.
    """

    is_read_only = False  # see connectors/slots/read_only_index.py

    num_ready_slots = _HeaderWord(5)  # slots whose place on the medium is allocated: only these are handed out
    change_counter = _HeaderWord(6)  # sequence number of the newest change
    tick = _HeaderWord(7)  # the newest LAST_USE
    num_frees = _HeaderWord(8)  # moves whenever slots may have become FREE
    next_lease = _HeaderWord(9)
    is_changing = _HeaderWord(10)  # 1 while a holder of the lock writes; found set by the next holder, it means repair

    def __init__(self, path: Path, layout_fingerprint: bytes, slot_bytes: int) -> None:
        """Map an existing file. Raises ConnectorError where it is of another kind or cut, OSError where it cannot be read."""
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY if self.is_read_only else os.O_RDWR)
        try:
            found = os.fstat(self._descriptor)
            if found.st_size <= _RECORDS_OFFSET:
                raise ConnectorError(f"{path} is cut: {found.st_size} bytes")
            self._mapping = GuardedMapping(self._descriptor, found.st_size, is_read_only=self.is_read_only)
            mapping = self._mapping.view
            self.header: Words = np.frombuffer(mapping, dtype=np.uint64, count=_HEADER_BYTES // 8)
            expected = _new_header(layout_fingerprint, 0, slot_bytes)
            if self.header[:3].tolist() != expected[:3].tolist() or int(self.header[4]) != slot_bytes:
                raise ConnectorError(f"{path} is no index of this version and layout")
            self._identity = self.header[:5].tolist()
            self.num_slots = int(self._identity[3])
            self._num_bytes = index_bytes(self.num_slots)
            self._inode = found.st_ino
            if self.num_slots < 1 or found.st_size < self._num_bytes:
                raise ConnectorError(f"{path} is cut: {found.st_size} bytes for {self.num_slots} slots")
        except BaseException:
            os.close(self._descriptor)
            raise
        self.recent_changes: npt.NDArray[np.uint32] = np.frombuffer(
            mapping, dtype=np.uint32, count=NUM_RECENT_CHANGES, offset=_HEADER_BYTES
        )
        records = np.frombuffer(mapping, dtype=np.uint64, count=8 * self.num_slots, offset=_RECORDS_OFFSET)
        self.records: Words = records.reshape(self.num_slots, 8)

    def is_intact(self) -> bool:
        """Whether the file still is in its directory and as long as its records need. Costs one fstat."""
        if self.has_lost_pages:
            return False
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return False
        return self._is_kept(found) and found.st_size >= self._num_bytes and found.st_ino == self._inode

    def _is_kept(self, found: os.stat_result) -> bool:
        return found.st_nlink > 0

    @property
    def has_lost_pages(self) -> bool:
        """True once a page could not be had: see bus_guard."""
        return self._mapping.has_lost_pages

    def is_sane(self) -> bool:
        """Whether the header's words can be what a writer left. The counters' limit leaves room for any number of changes."""
        counters = (self.change_counter, self.tick, self.num_frees)
        return (
            self.header[:5].tolist() == self._identity
            and max(counters) < MAX_COUNTER
            and self.num_ready_slots <= self.num_slots
            and self.next_lease < MAX_LEASES
        )

    def discard(self) -> None:
        """Remove a damaged index: whoever has it open sees that, and joins a new one. Raises OSError."""
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock that every writer takes; the kernel gives it back when the process dies. Raises OSError."""
        lock_descriptor(self._descriptor)
        try:
            yield
        finally:
            unlock_descriptor(self._descriptor)

    def sync(self) -> None:
        """Wait until what was written is on the disk. Raises OSError."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the descriptor. The mapping stays valid until the last array on it is gone."""
        os.close(self._descriptor)


def index_bytes(num_slots: int) -> int:
    """Size of the file for that many slots."""
    return _RECORDS_OFFSET + RECORD_BYTES * num_slots


def read_index_identity(path: Path) -> tuple[bytes, int]:
    """Layout fingerprint and bytes per slot of an existing index. Raises ConnectorError where it is none, OSError."""
    with path.open("rb") as file:
        words = np.frombuffer(file.read(40).ljust(40, b"\0"), dtype=np.uint64)
    slot_bytes = int(words[4])
    if int(words[0]) != _MAGIC_AND_VERSION or not _HEADER_BYTES < slot_bytes < MAX_SLOT_BYTES:
        raise ConnectorError(f"{path} is no index of this version")
    return words[1:3].tobytes(), slot_bytes


def create_index_file(path: Path, layout_fingerprint: bytes, num_slots: int, slot_bytes: int) -> None:
    """Write an index of FREE slots, at once complete or not there. Raises OSError.

    Its blocks are allocated now: a full disk must fail here and not in a store to mapped memory.
    """
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.touch(mode=0o600)
    with unfinished.open("r+b") as file:
        os.ftruncate(file.fileno(), 0)  # of somebody who died here
        write_empty_index(file.fileno(), layout_fingerprint, num_slots, slot_bytes)
    unfinished.replace(path)


def write_empty_index(
    descriptor: int, layout_fingerprint: bytes, num_slots: int, slot_bytes: int, num_ready_slots: int = 0
) -> None:
    """Make an empty file an index of FREE slots. Raises OSError."""
    os.posix_fallocate(descriptor, 0, index_bytes(num_slots))
    header = _new_header(layout_fingerprint, num_slots, slot_bytes)
    header[5] = num_ready_slots
    os.pwrite(descriptor, header.tobytes(), 0)


def resize_index_file(path: Path, num_slots: int) -> None:
    """Give an index that nobody has mapped another number of slots; records beyond the new end are dropped. Raises OSError."""
    with path.open("r+b") as file:
        header = np.frombuffer(file.read(_HEADER_BYTES), dtype=np.uint64).copy()
        if num_slots > int(header[3]):
            os.posix_fallocate(file.fileno(), 0, index_bytes(num_slots))
        header[3] = num_slots
        header[5] = min(int(header[5]), num_slots)
        file.seek(0)
        file.write(header.tobytes())
        file.truncate(index_bytes(num_slots))


def _new_header(layout_fingerprint: bytes, num_slots: int, slot_bytes: int) -> Words:
    header: Words = np.zeros(_HEADER_BYTES // 8, dtype=np.uint64)
    header[0] = _MAGIC_AND_VERSION
    header[1:3] = np.frombuffer(layout_fingerprint, dtype=np.uint64)
    header[3] = num_slots
    header[4] = slot_bytes
    header[9] = 1
    return header
