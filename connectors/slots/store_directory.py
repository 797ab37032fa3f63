"""Joining and leaving a store's directory: its index is opened, created, resized or replaced, and a lease taken.

<root>/lock                      held by whoever joins, leaves or cleans up
<root>/<store>/index, segment    the blocks
<root>/<store>/lease-N           one per user of the store, locked while its process lives
"""

from __future__ import annotations

import errno
import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from connectors.file_lock import Lease, has_live_lease, is_lease_alive, locked_directory
from connectors.slots.index import SlotIndex, take_lease_number
from connectors.slots.index_file import IndexFile, create_index_file, read_index_identity, resize_index_file
from connectors.slots.read_only_index import ReadOnlyIndexFile, ReadOnlySlotIndex
from connectors.slots.store import (
    HEADER_PAGE_BYTES,
    SlotLayout,
    SlotMedium,
    SlotStore,
    StoredLayout,
    num_slots_within,
    slot_bytes,
    warn_of_other_capacity,
)
from core.errors import ConfigError, ConnectorError

logger = logging.getLogger(__name__)

_INDEX_NAME = "index"
_SEGMENT_NAME = "segment"


@dataclass(frozen=True, slots=True)
class Segment:
    """What a medium is opened from. is_alone: nobody else uses the store now. is_new: it was just created."""

    path: Path
    index_file: IndexFile
    layout: SlotLayout
    is_alone: bool
    is_new: bool


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """The place of one store."""

    root: Path
    name: str
    layout: SlotLayout

    @property
    def path(self) -> Path:
        """The store's own directory."""
        return self.root / self.name

    def open(
        self, capacity_bytes: int, open_medium: Callable[[Segment], SlotMedium], grow_bytes: int, eviction: str = "lru"
    ) -> SlotStore:
        """Join the store, or create it. The caller holds the root's lock.

        A store in use keeps its capacity; an idle one takes ours. A damaged index is replaced: its blocks are lost, which costs
        misses. Raises OSError, ConnectorError, or ConfigError for a capacity below one block.
        """
        num_slots = num_slots_within(capacity_bytes, self.layout)
        if num_slots < 1:
            needed = f"room for a block of {slot_bytes(self.layout)} bytes and its index"
            raise ConfigError("connector.options.capacity_bytes", capacity_bytes, needed)
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_alone = not has_live_lease(self.path)
        file, is_new = self._open_index(num_slots, is_alone)
        if file.num_slots != num_slots:
            warn_of_other_capacity(f"the store in {self.path}", file.num_slots * slot_bytes(self.layout), capacity_bytes)
        return self._join(file, is_alone, is_new, open_medium, grow_bytes, eviction)

    def open_existing(self, open_medium: Callable[[Segment], SlotMedium], grow_bytes: int) -> SlotStore:
        """Join the store as it is, whatever its capacity. The caller holds the root's lock.

        Raises OSError (FileNotFoundError where there is none) or ConnectorError where it is damaged; neither changes it.
        """
        is_alone = not has_live_lease(self.path)
        file = IndexFile(self.path / _INDEX_NAME, self.layout.fingerprint, slot_bytes(self.layout))
        if not file.is_sane():
            file.close()
            raise ConnectorError(f"{self.path / _INDEX_NAME} has words in its header that no writer leaves")
        return self._join(file, is_alone, False, open_medium, grow_bytes, "lru")

    def open_read_only(self, open_medium: Callable[[Segment], SlotMedium]) -> SlotStore:
        """The store as it is, where nothing can be written: without a lock and without a lease.

        It is not intact any more once its folder can be written. Raises as open_existing does.
        """
        file = ReadOnlyIndexFile(self.path / _INDEX_NAME, self.layout.fingerprint, slot_bytes(self.layout))
        try:
            if not file.is_sane():
                raise ConnectorError(f"{self.path / _INDEX_NAME} has words in its header that no writer leaves")
            medium = open_medium(Segment(self.path / _SEGMENT_NAME, file, self.layout, is_alone=False, is_new=False))
            store = SlotStore(ReadOnlySlotIndex(file), medium, lambda: None)
        except BaseException:
            file.close()
            raise
        store.is_read_only_still = lambda: not os.access(self.path, os.W_OK)
        return store

    def _join(
        self,
        file: IndexFile,
        is_alone: bool,
        is_new: bool,
        open_medium: Callable[[Segment], SlotMedium],
        grow_bytes: int,
        eviction: str,
    ) -> SlotStore:
        lease = None
        try:
            lease = self._take_lease(file)
            medium = open_medium(Segment(self.path / _SEGMENT_NAME, file, self.layout, is_alone, is_new))
            grow_step = max(1, grow_bytes // slot_bytes(self.layout))
            is_alive = partial(is_lease_alive, self.path)
            index = SlotIndex(file, lease.number, is_alive, medium.grow, grow_step, eviction)
            index.recover(is_alone)
        except BaseException:
            if lease is not None:
                lease.release()
            file.close()
            raise
        return SlotStore(index, medium, lambda: self._leave(lease))

    def _take_lease(self, file: IndexFile) -> Lease:
        """A lease that nobody has: an index that is new or was damaged counts from the start, while older leases live on."""
        number = take_lease_number(file)
        while is_lease_alive(self.path, number):
            number = take_lease_number(file)
        return Lease(self.path, number)

    def _open_index(self, num_slots: int, is_alone: bool) -> tuple[IndexFile, bool]:
        path = self.path / _INDEX_NAME
        try:
            file = IndexFile(path, self.layout.fingerprint, slot_bytes(self.layout))
            if not file.is_sane():
                file.close()
                raise ConnectorError(f"{path} has words in its header that no writer leaves")
            if is_alone and file.num_slots != num_slots:
                file.close()
                resize_index_file(path, num_slots)
                file = IndexFile(path, self.layout.fingerprint, slot_bytes(self.layout))
            return file, False
        except FileNotFoundError:
            pass
        except ConnectorError as error:
            logger.warning("the store in %s starts empty: %s", self.path, str(error))
        for name in (_INDEX_NAME, _SEGMENT_NAME):  # whoever still has them open sees that they were removed, and joins again
            (self.path / name).unlink(missing_ok=True)
        create_index_file(path, self.layout.fingerprint, num_slots, slot_bytes(self.layout))
        return IndexFile(path, self.layout.fingerprint, slot_bytes(self.layout)), True

    def _leave(self, lease: Lease) -> None:
        """Give up the lease. Raises OSError; it is gone anyway."""
        try:
            with locked_directory(self.root):
                lease.release()
                has_live_lease(self.path)  # sweeps up the leases of processes that were killed
        finally:
            lease.release()


@dataclass(frozen=True, slots=True)
class StoreRoot:
    """A folder of stores, one per layout at rest, each in a folder `prefix` + fingerprint: what is there, how it is opened."""

    root: Path
    prefix: str
    capacity_bytes: int
    open_medium: Callable[[Segment], SlotMedium]
    grow_bytes: int

    def layouts(self) -> tuple[list[StoredLayout], list[str]]:
        """The stores that are there, and in words those that cannot be opened. Raises FileNotFoundError where the root is not."""
        try:
            folders = sorted(path.name for path in self.root.iterdir())  # a glob would be silent about what it may not read
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(f"there is no store in {self.root}") from error
        found: list[StoredLayout] = []
        problems: list[str] = []
        for folder in folders:
            name, path = folder.removeprefix(self.prefix), self.root / folder / _INDEX_NAME
            if not folder.startswith(self.prefix) or not re.fullmatch("[0-9a-f]{32}", name):
                continue  # another prefix may begin like ours
            try:
                if not path.exists():
                    continue
                fingerprint, num_bytes = read_index_identity(path)
                if fingerprint.hex() != name:
                    raise ConnectorError(f"{path} is of another layout than its folder's name says")
                found.append(StoredLayout(fingerprint, num_bytes - HEADER_PAGE_BYTES))
            except (OSError, ConnectorError) as error:
                problems.append(str(error))
        return found, problems

    def open(self, layout: SlotLayout, *, create: bool) -> SlotStore:
        """Join a store that is there, or with `create` also make it. Raises OSError, ConnectorError or ConfigError."""
        place = StoreDirectory(self.root, f"{self.prefix}{layout.fingerprint.hex()}", layout)
        try:
            with locked_directory(self.root):
                if create and not (place.path / _INDEX_NAME).exists():
                    return place.open(self.capacity_bytes, self.open_medium, self.grow_bytes)
                return place.open_existing(self.open_medium, self.grow_bytes)
        except OSError as error:
            if create or error.errno not in (errno.EROFS, errno.EACCES, errno.EPERM):
                raise
            return place.open_read_only(self.open_medium)
