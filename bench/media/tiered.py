"""The medium of the tiered connector: memory over a disk over Redis.

Loads come from memory, so that memcpy is their limit. A save ends when all tiers have it, so its limit is the slowest one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.media.medium import BYTES_PER_ROUND, Medium
from bench.media.redis import RedisMedium
from bench.media.shm import ShmMedium
from connectors.tiered.connector import TieredConnector
from core.kv.connector import KVConnector, TransferDirection


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """A server of its own, a folder for the disk."""
    return TieredMedium(folder, block_bytes)


class TieredMedium(Medium):
    """What is known is known of the last tier alone: a lookup has asked all others before."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._memory = ShmMedium(folder.name, block_bytes)
        self._server = RedisMedium(folder, block_bytes)

    def options(self) -> dict[str, Any]:
        return {
            "tiers": ["shm", "nvme", "redis"],
            "shm": self._memory.options(),
            "nvme": {"path": str(self._folder / "kv"), "capacity_bytes": 8 * BYTES_PER_ROUND},
            "redis": self._server.options(),
        }

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        medium = self._memory if direction is TransferDirection.LOAD else self._server
        return medium.limit_gbps(direction, num_bytes)

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        self._server.make_known(_tier(connector, -1), block_hashes)

    def hang(self, connector: KVConnector) -> bool:
        return self._memory.hang(_tier(connector, 0)) and self._server.hang(_tier(connector, -1))

    def resume(self) -> None:
        self._memory.resume()
        self._server.resume()

    def empty(self) -> None:
        """Each recycles its room."""

    def close(self) -> None:
        self._server.close()


def _tier(connector: KVConnector, number: int) -> KVConnector:
    assert isinstance(connector, TieredConnector)
    child = connector._tiers.tiers[number].connector
    assert child is not None
    return child
