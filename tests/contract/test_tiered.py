"""The contract, for tiers: shared memory over real files, and over a real Redis server."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from tests.contract.test_nvme import NvmeHarness
from tests.contract.test_redis import RedisHarness
from tests.contract.test_shm import ShmHarness
from tests.support.redis_server import EXECUTABLE


class TieredHarness(ConnectorHarness):
    """shm over `lower_type`, half its size. Damage is done to every copy, so that no tier can stand in for another."""

    connector_name = "tiered"
    is_persistent = True
    lower_type: type[ConnectorHarness]
    more_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._upper, self._lower = ShmHarness(directory), self.lower_type(directory)

    @property
    def _harnesses(self) -> list[ConnectorHarness]:
        """Of the tiers that have the blocks now: shared memory is gone when nobody uses it."""
        is_upper_open = any(node.stats().tiers[0].store_blocks for node in self._nodes)
        return [self._upper, self._lower] if is_upper_open else [self._lower]

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        lower_name = self._lower.connector_name
        upper, lower = self._upper.options(store, max(16, num_blocks // 2)), self._lower.options(store, num_blocks)
        return {"tiers": f"shm,{lower_name}", "shm": upper, lower_name: lower, **self.more_options}

    def leftovers(self) -> list[str]:
        return [*self._upper.leftovers(), *self._lower.leftovers()]

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        for harness in self._harnesses:
            harness.flip_bit(store, block_hash, where)

    def truncate(self, store: str, block_hash: bytes) -> None:
        for harness in self._harnesses:
            if harness is self._upper:  # memory cannot be cut
                harness.delete(store, block_hash)
            else:
                harness.truncate(store, block_hash)

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        for harness in self._harnesses:
            harness.swap(store, first_hash, second_hash)

    def delete(self, store: str, block_hash: bytes) -> None:
        for harness in self._harnesses:
            harness.delete(store, block_hash)

    def wipe(self, store: str) -> None:
        self._upper.wipe(store)
        self._lower.wipe(store)

    def close(self) -> None:
        super().close()
        self._upper.close()
        self._lower.close()


class ShmOverNvmeHarness(TieredHarness):
    """Two slot stores; when nobody has the tiers open, only the files are left to be damaged."""

    lower_type = NvmeHarness

    def damage_index(self, store: str) -> None:
        self._lower.damage_index(store)


class ShmOverRedisHarness(TieredHarness):
    lower_type = RedisHarness
    min_usable_fraction = RedisHarness.min_usable_fraction


class WriteBackHarness(ShmOverNvmeHarness):
    """All blocks are in shared memory until that is nearly full, and go with its last user."""

    is_persistent = False
    more_options = MappingProxyType({"write": "back", "prefetch": True, "staging_bytes": "1MiB"})

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {**super().options(store, num_blocks), "shm": self._upper.options(store, num_blocks)}

    def leftovers(self) -> list[str]:
        return self._upper.leftovers()  # the files' leases of killed processes are found at the next start

    @property
    def _harnesses(self) -> list[ConnectorHarness]:
        return [self._upper]


class TestShmOverNvme(ConnectorContract):
    harness_type = ShmOverNvmeHarness


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
class TestShmOverRedisWhereAServerIsInstalled(ConnectorContract):
    harness_type = ShmOverRedisHarness


class TestWriteBackWithPrefetch(ConnectorContract):
    harness_type = WriteBackHarness
