"""A device that is not there: an ordinary pool in its place, and real copies to and from it, which a test can hold up."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import TorchCopies, copy_rows, memory_of


class HostDevice:
    """open_copies is for a StagedConnector. No copy is carried out while `gate` is clear, and none succeeds with an `error`."""

    def __init__(self, pool: KVPoolMemory) -> None:
        self.pool = pool
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def open_copies(self, staging: KVPoolMemory) -> TorchCopies:
        """Of the class that real devices use."""
        blocks, staged = memory_of(self.pool), memory_of(staging)

        def copy_in(block_ids: Sequence[int], slots: Sequence[int]) -> None:
            self._pass_gate()
            copy_rows(blocks, block_ids, staged, slots)

        def copy_out(slots: Sequence[int], block_ids: Sequence[int]) -> None:
            self._pass_gate()
            copy_rows(staged, slots, blocks, block_ids)

        return TorchCopies(torch.device("cpu"), self.pool.num_blocks, staging, copy_in, copy_out)

    def _pass_gate(self) -> None:
        self.gate.wait()
        if self.error is not None:
            raise self.error
