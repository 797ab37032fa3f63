"""The contract, for nvme: real files in a temporary folder, and a small file system that is really full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from connectors.contract.contract import ConnectorContract
from connectors.contract.node import LAYOUT
from connectors.slots.store import slot_bytes
from tests.contract.slot_file_harness import SlotFileHarness
from tests.contract.small_disk import mounted_tmpfs


class NvmeHarness(SlotFileHarness):
    """One folder per store."""

    connector_name = "nvme"
    is_persistent = True
    max_file_bytes = 200 * slot_bytes(LAYOUT)

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {"path": str(self.store_root(store)), "capacity_bytes": self.capacity_bytes(num_blocks)}

    def store_root(self, store: str) -> Path:
        return self.directory / store

    def leftovers(self) -> list[str]:
        return [str(path) for path in self.directory.rglob("lease-*")]

    @contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        with mounted_tmpfs(self.directory / "disk", 8 * 1024 * 1024) as disk:
            filler = disk / "filler"
            filler.write_bytes(bytes(7 * 1024 * 1024))
            yield {"path": str(disk / "store"), "capacity_bytes": self.capacity_bytes(512)}, filler.unlink


class TestNvme(ConnectorContract):
    harness_type = NvmeHarness
