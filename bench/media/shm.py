"""The medium of the shm connector: memory, as memcpy moves blocks between buffers that were touched before."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.media.medium import BYTES_PER_ROUND, HungLockHolder, Medium
from connectors.slots.connector import SlotConnector
from connectors.slots.shm import ShmConnector
from core.kv.connector import KVConnector, TransferDirection
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

CAPACITY_BYTES = 2 * BYTES_PER_ROUND + 32 * 1024 * 1024  # soon touched all over, and then recycled


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """Memory; the folder only names the pool."""
    return ShmMedium(folder.name, block_bytes)


class ShmMedium(Medium):
    """One thread that copies block by block, as many bytes as a round moves, to and from memory as far apart."""

    num_warmup_rounds = 15  # by then the idle threads have filled the pool with pages

    def __init__(self, name: str, block_bytes: int) -> None:
        self._name = name
        self._block_bytes = block_bytes
        layout = KVLayout(num_layers=block_bytes // 1024, block_size=16, num_kv_heads=1, head_dim=16, dtype="bfloat16")
        self._stride_bytes, self._num_blocks = layout.block_stride_bytes, BYTES_PER_ROUND // block_bytes
        self._pools = [KVPoolMemory(layout, self._num_blocks) for _ in range(2)]
        self._pools[0].buffer[:] = random.Random(2).randbytes(len(self._pools[0].buffer))
        self._source, self._target = (ctypes.addressof(ctypes.c_char.from_buffer(pool.buffer)) for pool in self._pools)

    def options(self) -> dict[str, Any]:
        return {"name": self._name, "capacity_bytes": CAPACITY_BYTES}

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        order = random.Random(3).sample(range(self._num_blocks), self._num_blocks)
        started_s = time.perf_counter()
        for number, other in enumerate(order):
            target, source = self._target + number * self._stride_bytes, self._source + other * self._stride_bytes
            ctypes.memmove(target, source, self._block_bytes)
        return self._num_blocks * self._block_bytes / (time.perf_counter() - started_s) / 1e9

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        assert isinstance(connector, ShmConnector) and connector._held.store is not None
        connector._held.store.index.mirror._slot_by_hash.update((name, 0) for name in block_hashes)

    def hang(self, connector: KVConnector) -> bool:
        assert isinstance(connector, SlotConnector) and connector._held.store is not None
        self._holder = HungLockHolder(connector._held.store.index.file._descriptor)
        return True

    def resume(self) -> None:
        self._holder.end()

    def empty(self) -> None:
        """The pool evicts by itself."""

    def close(self) -> None:
        """Nothing was started."""
