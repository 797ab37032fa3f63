"""KV of several ranks' devices: each copies its heads' part of a block to and from the same slot of staging memory.

A slot holds a whole block in the layout of one rank, whichever number of ranks there are. So connectors see whole blocks, and
what a node of two ranks has saved, a node of one or of three can load.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait

from torch import Tensor

from core.kv.device_copies import DeviceCopies
from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import DevicePool, TorchCopies, memory_of, runs_of
from core.model.parallel import describe_failure
from core.model.runner import blocks_view
from core.ranks.messages import CopyBlocks, CopyDone
from core.ranks.processes import RankProcesses

_CLOSE_TIMEOUT_S = 5.0


def open_head_copies(pool: DevicePool, staging: KVPoolMemory, kv_heads: slice) -> TorchCopies:
    """One rank's copies. pool: of its heads alone; staging: of all, of which it has kv_heads."""
    blocks = blocks_view(pool.memory, pool.layout)
    slots = blocks_view(memory_of(staging), staging.layout)[..., kv_heads, :]

    def copy_in(block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        _copy(blocks, block_ids, slots, slot_ids)

    def copy_out(slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        _copy(slots, slot_ids, blocks, block_ids)

    return TorchCopies(pool.memory.device, pool.num_blocks, staging, copy_in, copy_out)


def _copy(source: Tensor, source_ids: Sequence[int], target: Tensor, target_ids: Sequence[int]) -> None:
    """Returns when it is done: a strided copy to or from a device passes through memory that must not go before."""
    for first, target_first, length in runs_of(source_ids, target_ids):
        target[target_first : target_first + length].copy_(source[first : first + length])


class RankedCopies(DeviceCopies):
    """On rank 0: a copy has ended when all ranks' parts have. own: rank 0's."""

    def __init__(self, own: TorchCopies, ranks: RankProcesses) -> None:
        self.num_blocks = own.num_blocks
        self._own = own
        self._ranks = ranks
        self._copy_ids = itertools.count()
        self._lock = threading.Lock()
        self._unfinished: dict[int, tuple[Future[None], list[str]]] = {}  # with what each part that has ended said
        ranks.on_copy_done = lambda _rank, message: self._end_part(message)

    def mark(self) -> object:
        """Of rank 0's device; the others set theirs when they hear of a copy, which is later."""
        return self._own.mark()

    def copy_in(self, block_ids: Sequence[int], slots: Sequence[int], after: object) -> Future[None]:
        """See DeviceCopies."""
        message, future = self._begin(block_ids, slots, is_save=True)
        self._follow_own(message, self._own.copy_in(block_ids, slots, after))
        return future

    def copy_out(self, slots: Sequence[int], block_ids: Sequence[int], after: object) -> Future[None]:
        """See DeviceCopies."""
        message, future = self._begin(block_ids, slots, is_save=False)
        self._follow_own(message, self._own.copy_out(slots, block_ids, after))
        return future

    def close(self) -> None:
        """See DeviceCopies."""
        self._own.close()
        with self._lock:
            futures = [future for future, _ in self._unfinished.values()]
        wait(futures, _CLOSE_TIMEOUT_S)

    def _begin(self, block_ids: Sequence[int], slots: Sequence[int], *, is_save: bool) -> tuple[CopyBlocks, Future[None]]:
        future: Future[None] = Future()
        message = CopyBlocks(next(self._copy_ids), list(block_ids), list(slots), is_save)
        with self._lock:
            self._unfinished[message.copy_id] = (future, [])
        self._ranks.send(message)
        return message, future

    def _follow_own(self, message: CopyBlocks, own: Future[None]) -> None:
        own.add_done_callback(lambda ended: self._end_part(CopyDone(message.copy_id, describe_failure(ended))))

    def _end_part(self, message: CopyDone) -> None:
        with self._lock:
            future, errors = self._unfinished[message.copy_id]
            errors.append(message.error)
            if len(errors) <= self._ranks.num_children:
                return
            del self._unfinished[message.copy_id]
        if any(errors):
            future.set_exception(RuntimeError("; ".join(filter(None, errors))))
        else:
            future.set_result(None)
