"""The index of a store on a disk that cannot be written: lookups and loads work, whatever would change it is refused.

Takes neither a lock nor a lease, both of which are files that would have to be written. Somebody else may have the same store
writable, as through another mount: records and blocks are verified by whoever reads them, and changes are seen in the ring.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

from connectors.slots.index import SlotIndex
from connectors.slots.index_file import IndexFile


class ReadOnlyIndexFile(IndexFile):
    """Mapped for reading only: an attempt to write into it raises."""

    is_read_only = True

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nothing to lock."""
        yield


class ReadOnlySlotIndex(SlotIndex):
    """What readers need of a SlotIndex."""

    def __init__(self, file: ReadOnlyIndexFile) -> None:
        super().__init__(file, 0, lambda _lease: True, _refuse_growth, 1)

    def catch_up(self) -> None:
        """From the ring alone; a change that has not arrived is passed over, which costs a miss."""
        self.mirror.refresh(is_locked=True)

    def touch_later(self, chain: Sequence[bytes], hits: Sequence[bytes] = ()) -> None:
        """Uses cannot be told to anybody."""

    def grow_ahead(self) -> bool:
        """There is nothing to grow."""
        return False

    def reserve_unused(self, max_slots: int) -> list[int]:
        """None."""
        return []

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        raise _read_only(self.file)
        yield


def _refuse_growth(first_slot: int, end_slot: int) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def _read_only(file: IndexFile) -> OSError:
    return OSError(errno.EROFS, os.strerror(errno.EROFS), str(file.path))
