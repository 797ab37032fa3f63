"""The interface to copies between an engine's KV, where that is not in host memory, and staging memory that connectors can use.

Implemented where the device's library is (core/model/device_pool.py); used by the stage in front of a connector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from core.kv.pool_memory import KVPoolMemory


class DeviceCopies(ABC):
    """Copies whole blocks between the engine's pool and the slots of a staging pool, in the background.

    Copies of one direction are carried out in the order of their start; those of the other direction do not wait for them. A
    future's callbacks come from a thread of this object's; it fails where the copy did.
    """

    num_blocks: int  # of the engine's pool

    @abstractmethod
    def mark(self) -> object:
        """This point in what the calling thread has the device compute; for `after`. Cheap: the step thread calls it."""

    @abstractmethod
    def copy_in(self, block_ids: Sequence[int], slots: Sequence[int], after: object) -> Future[None]:
        """Copy block block_ids[i] into slot slots[i], when the device has come to the mark `after`."""

    @abstractmethod
    def copy_out(self, slots: Sequence[int], block_ids: Sequence[int], after: object) -> Future[None]:
        """Copy slot slots[i] into block block_ids[i]; also after a mark, since the block's last user may still be computing."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies that run, cancel the others, let go of the staging memory. Safe to repeat."""


OpenCopies = Callable[[KVPoolMemory], DeviceCopies]
