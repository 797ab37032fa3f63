"""The medium of the lmcache connector: LMCache's own StorageManager, called directly, on its native file tier."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.media.medium import BYTES_PER_ROUND, Medium
from connectors.lmcache.connector import LMCacheConnector
from connectors.lmcache.library import api
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT
from connectors.lmcache.objects import LMCacheObjects
from core.kv.connector import KVConnector, TransferDirection
from core.kv.layout import KVLayout

MEMORY_BYTES = 512 * 1024 * 1024
BATCH_BYTES = 24 * 1024 * 1024  # as the bench moves


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """Two folders: the connector's, and one for the direct calls."""
    return LMCacheMedium(folder, block_bytes)


class LMCacheMedium(Medium):
    """The limit is what objects of the same size take that are filled from, and copied to, memory of ours; nothing verified."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        layout = KVLayout(block_bytes // 1024, 16, 1, 16, "bfloat16")
        self._objects = LMCacheObjects(str(folder / "direct"), layout, 8 * BYTES_PER_ROUND, MEMORY_BYTES, False, 30.0, 2)
        self._manager = self._objects._manager
        self._object_bytes = MAX_BLOCKS_PER_OBJECT * self._objects.unit_bytes
        self._per_batch = max(1, BATCH_BYTES // self._object_bytes)
        self._memory = np.zeros((self._per_batch, self._object_bytes), dtype=np.uint8)
        self._names: list[list[Any]] = []
        self._count = 0

    def options(self) -> dict[str, Any]:
        return {
            "path": str(self._folder / "ours"),
            "capacity_bytes": 8 * BYTES_PER_ROUND,
            "memory_bytes": MEMORY_BYTES,
            "cache_in_memory": False,
        }

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        move = self._save if direction is TransferDirection.SAVE else self._load
        num_batches = max(1, num_bytes // (self._per_batch * self._object_bytes))
        started_s = time.perf_counter()
        for number in range(num_batches):
            move(number)
        return num_batches * self._per_batch * self._object_bytes / (time.perf_counter() - started_s) / 1e9

    def _save(self, number: int) -> None:
        self._count += 1
        keys = [api.ObjectKey((self._count * 1000 + index).to_bytes(96, "big"), "kvrelay", 0) for index in range(self._per_batch)]
        if number == 0:
            self._names.clear()
        self._names.append(keys)
        listener, names = self._objects._stored, {key.chunk_hash for key in keys}
        for index, memory in enumerate(self._manager.reserve_write(keys, self._objects._layouts[-1]).values()):
            np.copyto(np.frombuffer(memory.byte_array.cast("B"), dtype=np.uint8), self._memory[index])
        listener.expect(names)
        self._manager.finish_write(keys)
        deadline_s = time.monotonic() + 30.0
        while listener.wait(names, deadline_s, lambda: False) != names:
            if time.monotonic() > deadline_s:
                raise SystemExit("LMCache has not stored all")
        listener.forget(names)
        self._objects._drop_from_memory([key.chunk_hash for key in keys], 0.5)

    def _load(self, number: int) -> None:
        keys = self._names[number]
        rows = [api.GroupedObjectKeys(keys, 0, self._objects._layouts[-1])]
        handle = self._manager.submit_prefetch_task(api.PrefetchTaskSpec(rows))
        if not self._manager.wait_prefetch_status(handle, 30.0):
            raise SystemExit("LMCache has not loaded in time")
        self._manager.query_prefetch_status(handle)
        with self._manager.read_prefetched_results(keys) as memories:
            for index, memory in enumerate(memories):
                np.copyto(self._memory[index], np.frombuffer(memory.byte_array.cast("B"), dtype=np.uint8))
        self._manager.finish_read_prefetched(keys)
        self._objects._drop_from_memory([key.chunk_hash for key in keys], 0.5)

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        assert isinstance(connector, LMCacheConnector)
        connector._known.add(block_hashes, connector._known.epoch)

    def empty(self) -> None:
        for folder in self._folder.glob("*/*"):
            for path in folder.glob("*.data"):
                path.unlink()

    def close(self) -> None:
        self._objects.close()
        shutil.rmtree(self._folder, ignore_errors=True)
