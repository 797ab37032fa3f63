"""An open store of equal slots, and the medium under it: what shm and nvme have to supply.

A slot is one header page and the block's stride, so that direct I/O can move both straight between medium and pool.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from connectors.byte_sizes import readable_bytes
from connectors.slots.index import SlotIndex
from connectors.slots.index_file import RECORD_BYTES, index_bytes
from core.kv.layout import PAGE_BYTES

logger = logging.getLogger(__name__)

HEADER_PAGE_BYTES = PAGE_BYTES
PIECE_BYTES = 3 * 1024 * 1024  # of one I/O: larger ones gain nothing (measured)


class SlotLayout(Protocol):
    """What a store of slots must know of its blocks. A KVLayout says it of blocks that are at rest as they are in the pool."""

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning of a block's bytes at rest differs."""

    @property
    def block_bytes(self) -> int:
        """Payload at rest, of every block."""

    @property
    def block_stride_bytes(self) -> int:
        """The same, rounded up to a page."""


@dataclass(frozen=True, slots=True)
class StoredLayout:
    """Blocks at rest, whatever they mean: encoded ones, or those of a store that is looked into without a model."""

    fingerprint: bytes
    block_bytes: int

    @property
    def block_stride_bytes(self) -> int:
        """Payload rounded up to a page, for direct I/O."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES


def slot_bytes(layout: SlotLayout) -> int:
    """Bytes of one slot on the medium."""
    return HEADER_PAGE_BYTES + layout.block_stride_bytes


def num_slots_within(capacity_bytes: int, layout: SlotLayout) -> int:
    """How many slots, with their index, fit into a capacity; 0 when none does."""
    return max(0, (capacity_bytes - index_bytes(0)) // (slot_bytes(layout) + RECORD_BYTES))


def warn_of_other_capacity(store: str, found_bytes: int, wanted_bytes: int) -> None:
    """Said by who joins a store in use, whose capacity stays as it is."""
    logger.warning(
        "%s is in use and keeps its %s of blocks: our capacity_bytes of %s is ignored. Give all engines that share a store the"
        " same, or this one a store of its own",
        store,
        readable_bytes(found_bytes),
        readable_bytes(wanted_bytes),
    )


class SlotMedium(ABC):
    """Slots by number, on memory or disk. Called by several threads at once, for different slots.

    Blocks are views of the pool, one block stride each. Every method may raise OSError.
    """

    needs_neighbours: bool  # slots of one read() or write() must follow one another
    piece_bytes = PIECE_BYTES  # one thread's share of a transfer

    @abstractmethod
    def read(self, slots: Sequence[int], blocks: Sequence[memoryview]) -> Iterable[bytes]:
        """Copy slots into blocks and give the blocks' headers, each once its block is there, so that memory is verified while the
        core's cache has it; fewer where the medium ends before them. Nothing is verified here."""

    @abstractmethod
    def write(self, slots: Sequence[int], headers: Iterable[bytes], blocks: Sequence[memoryview]) -> None:
        """Copy headers and blocks into slots. A header is made when it is asked for, at the cost of reading its block."""

    @abstractmethod
    def grow(self, first_slot: int, end_slot: int) -> None:
        """Allocate the place of these slots."""

    @abstractmethod
    def is_intact(self) -> bool:
        """Whether the medium still is where its name says, and safe to touch. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Let go of descriptors and mappings. No call is under way."""

    def prepare(self, num_ready_slots: int) -> bool:
        """Work ahead while idle, such as touching memory once; True while there is more to do."""
        return False


class SlotStore:
    """Index and medium of one open store. `leave` gives up the lease and whatever goes with the last user."""

    def __init__(self, index: SlotIndex, medium: SlotMedium, leave: Callable[[], None]) -> None:
        self.index = index
        self.medium = medium
        self._leave = leave
        self.stop_sharing: Callable[[], bool] = lambda: False  # see SlotConnector.stop_sharing; a file outlives its users
        self.is_read_only_still: Callable[[], bool] = lambda: True  # False once it is to be opened anew, to be written
        self.num_users = 0
        self.is_retired = False

    def is_intact(self) -> bool:
        """Whether index and medium can be used. Does not raise."""
        return self.index.file.is_intact() and self.medium.is_intact() and self.is_read_only_still()

    @property
    def is_read_only(self) -> bool:
        """Whether blocks can only be looked up and loaded."""
        return self.index.file.is_read_only

    def discard_if_unreadable(self) -> None:
        """Remove an index of which the medium has lost pages; joining it again would not help. Raises OSError."""
        if self.index.file.has_lost_pages:
            self.index.file.discard()

    def abandon(self) -> None:
        """Release slots and lease, but leave descriptors and mappings to a thread that hangs in them. Raises OSError."""
        self.index.close()
        self._leave()

    def close(self) -> None:
        """Release slots, lease, descriptors. Called once, when nobody uses the store. Raises OSError."""
        self.index.close()
        self.medium.close()
        try:
            self._leave()
        finally:
            self.index.file.close()
