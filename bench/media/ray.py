"""The medium of the ray connector: memory. The limit is memcpy of the same blocks by one thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.media.medium import BYTES_PER_ROUND, Medium
from connectors.ray.connector import RayConnector
from core.kv.connector import KVConnector, TransferDirection
from tests.support.ray_node import MIB, RayNode

_CAPACITY_BYTES = 256 * MIB


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """A Ray of its own."""
    return RayMedium(block_bytes)


class RayMedium(Medium):
    """A Ray of its own, with a store of some rounds: in a full one memory is recycled, as it is after some minutes of work."""

    num_warmup_rounds = 8  # by then the store is full, and its objects are in huge pages

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pool = np.ones(24 * MIB, dtype=np.uint8)
        self._store = np.ones(BYTES_PER_ROUND, dtype=np.uint8)
        self._node = RayNode(object_store_bytes=2 * _CAPACITY_BYTES)
        try:
            self._node.make_directory()
        except BaseException:
            self._node.end()
            raise

    def options(self) -> dict[str, Any]:
        return {**self._node.options, "capacity_bytes": _CAPACITY_BYTES}

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        size, num_pool_blocks = self._block_bytes, len(self._pool) // self._block_bytes
        started_s = time.perf_counter()
        for number in range(num_bytes // size):
            outer = self._store[number * size : (number + 1) * size]
            inner = self._pool[number % num_pool_blocks * size :][:size]
            if direction is TransferDirection.LOAD:
                np.copyto(inner, outer)
            else:
                np.copyto(outer, inner)
        return num_bytes // size * size / (time.perf_counter() - started_s) / 1e9

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        assert isinstance(connector, RayConnector)
        connector._known.add(block_hashes, connector._known.epoch)

    def hang(self, connector: KVConnector) -> bool:
        self._node.pause("directory")
        return True

    def resume(self) -> None:
        self._node.resume("directory")

    def empty(self) -> None:
        """Blocks of earlier rounds are evicted."""

    def close(self) -> None:
        self._node.end()
