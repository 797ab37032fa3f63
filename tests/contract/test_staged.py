"""The contract, with a staging pool between the engine's memory and a store: the engine's pool stands for a device's."""

from __future__ import annotations

from typing import Any

from connectors.contract.contract import ConnectorContract
from connectors.contract.node import HANG_S, LAYOUT, SteppedClock
from connectors.registry import create_connector
from connectors.staging.connector import StagedConnector
from core.kv.connector import KVConnector
from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import DevicePool, TorchCopies, memory_of
from tests.contract.test_nvme import NvmeHarness
from tests.contract.test_shm import ShmHarness

NUM_SLOTS = 64
PIECE_BYTES = 20 * LAYOUT.block_bytes  # so that the contract's larger transfers pass in pieces


class StagedOnHost(StagedConnector):
    """Copies between the engine's pool, as if that were elsewhere, and a staging pool of its own."""

    def __init__(self, inner: KVConnector, clock: SteppedClock) -> None:
        super().__init__(inner, self._open_host_copies, clock, save_wait_s=HANG_S, piece_bytes=PIECE_BYTES)

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        self._engine_pool = DevicePool(pool.layout, memory_of(pool))
        super().register_kv_cache(KVPoolMemory(pool.layout, NUM_SLOTS))

    def _open_host_copies(self, staging: KVPoolMemory) -> TorchCopies:
        return self._engine_pool.open_copies(staging)


class StagedShmHarness(ShmHarness):
    def create(self, options: dict[str, Any], clock: SteppedClock) -> KVConnector:
        return StagedOnHost(create_connector("shm", options, clock), clock)


class StagedNvmeHarness(NvmeHarness):
    def create(self, options: dict[str, Any], clock: SteppedClock) -> KVConnector:
        return StagedOnHost(create_connector("nvme", options, clock), clock)


class TestStagedShm(ConnectorContract):
    harness_type = StagedShmHarness


class TestStagedNvme(ConnectorContract):
    harness_type = StagedNvmeHarness
