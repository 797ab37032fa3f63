"""The contract, for shm: in the host's real shared memory, in a folder of this test's own."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from connectors.contract.contract import ConnectorContract
from tests.contract.slot_file_harness import SlotFileHarness


class ShmHarness(SlotFileHarness):
    """One folder of /dev/shm per test."""

    connector_name = "shm"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._memory = Path(tempfile.mkdtemp(prefix="kvrelay-test-", dir="/dev/shm"))

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {"directory": str(self._memory), "name": store, "capacity_bytes": self.capacity_bytes(num_blocks)}

    def store_root(self, store: str) -> Path:
        (root,) = self._memory.iterdir()
        return root

    def leftovers(self) -> list[str]:
        return [str(path) for path in self._memory.rglob("*")]

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._memory, ignore_errors=True)


class TestShm(ConnectorContract):
    harness_type = ShmHarness
