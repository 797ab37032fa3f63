"""The contract, for shm: pools of each test's own, in the host's real memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.contract.contract import ConnectorContract
from tests.contract.slot_file_harness import SlotFileHarness
from tests.support.memory_pools import give_up_pools, pool_files, pool_holders


class ShmHarness(SlotFileHarness):
    """Damage goes through descriptors that the members of a pool hold."""

    connector_name = "shm"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._names: set[str] = set()

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        name = self._name(store)
        self._names.add(name)
        return {"name": name, "capacity_bytes": self.capacity_bytes(num_blocks)}

    def leftovers(self) -> list[str]:
        return [holder for name in self._names for holder in pool_holders(name)]

    def truncate(self, store: str, block_hash: bytes) -> None:
        with self._segment(store).open("r+b") as file, pytest.raises(PermissionError):
            file.truncate(0)
        pytest.skip("a pool's memory cannot be cut")

    def wipe(self, store: str) -> None:
        give_up_pools(self._name(store))

    def _name(self, store: str) -> str:
        return f"{store}-{self.directory.parent.name[-12:]}-{self.directory.name[-30:]}"

    def _segment(self, store: str) -> Path:
        return pool_files(self._name(store), "segment")[0]

    def damage_index(self, store: str) -> None:
        with pool_files(self._name(store), "index")[0].open("r+b") as file:
            file.write(b"\xff" * 5000)


class TestShm(ConnectorContract):
    harness_type = ShmHarness
