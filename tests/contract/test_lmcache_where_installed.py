"""The contract, for lmcache: its file tier in a temporary folder. `make test-lmcache` installs what this needs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, chain
from connectors.lmcache.object_directory import StoredObject
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConfigError
from tests.architecture.source_tree import ROOT
from tests.contract.small_disk import mounted_tmpfs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed")

UNIT_BYTES = BLOCK_HEADER_BYTES + LAYOUT.block_bytes
MEMORY_BYTES = 32 * 1024 * 1024


class LMCacheHarness(ConnectorHarness):
    """One folder per store. Without the cache in memory, which would hide damage to files."""

    connector_name = "lmcache"
    is_persistent = True

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {
            "path": str(self.directory / store),
            "capacity_bytes": num_blocks * UNIT_BYTES if num_blocks < 1024 else 64 * MEMORY_BYTES,
            "memory_bytes": MEMORY_BYTES,
            "cache_in_memory": False,
        }

    def leftovers(self) -> list[str]:
        def find_scratch() -> list[Path]:
            return list(self.directory.rglob("tmp-*"))

        for store in {path.parent.parent.name for path in find_scratch()}:
            self.open_node(store).connector.close()  # cleans up after killed processes
        return [str(path) for path in find_scratch()]

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        path, start = self._find(store, block_hash)
        content = bytearray(path.read_bytes())
        content[start + {"header": 20, "payload": BLOCK_HEADER_BYTES + 100, "end": UNIT_BYTES - 1}[where]] ^= 1
        path.write_bytes(content)

    def truncate(self, store: str, block_hash: bytes) -> None:
        path, start = self._find(store, block_hash)
        path.write_bytes(path.read_bytes()[: start + UNIT_BYTES // 2])

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        (first, first_start), (second, second_start) = self._find(store, first_hash), self._find(store, second_hash)
        one, other = first.read_bytes(), second.read_bytes()
        for path, start, block in (
            (first, first_start, other[second_start : second_start + UNIT_BYTES]),
            (second, second_start, one[first_start : first_start + UNIT_BYTES]),
        ):
            content = bytearray(path.read_bytes())
            content[start : start + UNIT_BYTES] = block
            path.write_bytes(content)

    def delete(self, store: str, block_hash: bytes) -> None:
        path, start = self._find(store, block_hash)
        content = bytearray(path.read_bytes())
        content[start : start + UNIT_BYTES] = bytes(UNIT_BYTES)
        path.write_bytes(content)

    def wipe(self, store: str) -> None:
        shutil.rmtree(self.directory / store)

    def damage_index(self, store: str) -> None:
        for path in (self.directory / store).rglob("*.data"):  # the names are the index
            path.rename(path.with_name(path.name.replace("kvrelay", "damaged")))

    @contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        with mounted_tmpfs(self.directory / "disk", 2 * 1024 * 1024) as disk:
            filler = disk / "filler"
            filler.write_bytes(bytes(1536 * 1024))
            options = {**self.options("store", 512), "path": str(disk / "store"), "op_timeout_s": 0.2}
            yield options, filler.unlink

    def _find(self, store: str, block_hash: bytes) -> tuple[Path, int]:
        """The file that holds a block, and where."""
        for path in (self.directory / store).rglob("*.data"):
            stored = StoredObject(bytes.fromhex(path.stem.rpartition("@")[2]))
            if block_hash in stored.block_hashes:
                return path, stored.block_hashes.index(block_hash) * UNIT_BYTES
        raise LookupError(f"{block_hash.hex()} is not stored")


class TestLMCache(ConnectorContract):
    harness_type = LMCacheHarness


class MemoryHarness(LMCacheHarness):
    """With the cache in memory."""

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {**super().options(store, num_blocks), "cache_in_memory": True, "memory_bytes": 2 * 1024 * 1024}


@pytest.fixture
def memory_harness(tmp_path: Path) -> Iterator[MemoryHarness]:
    harness = MemoryHarness(tmp_path)
    yield harness
    harness.close()


def test_cache_in_memory_answers_what_was_used_last_without_its_file(memory_harness: MemoryHarness) -> None:
    node, hashes = memory_harness.open_node(), chain(1, 6)
    node.save(hashes)
    memory_harness.flip_bit("store", hashes[2], "payload")
    assert node.load(hashes).num_blocks_ok == 6
    assert memory_harness.open_node().load(hashes).num_blocks_ok == 2  # who has no copy reads the file, and tells


def test_cache_in_memory_that_is_full_makes_room_and_stays_exact(memory_harness: MemoryHarness) -> None:
    node = memory_harness.open_node(num_blocks=2048)  # 2 MiB of memory for 5 MiB of blocks
    for seed in range(40):
        assert node.save(chain(seed, 60)).num_blocks_ok == 60
    for seed in reversed(range(40)):
        assert node.load(chain(seed, 60)).num_blocks_ok == 60


def test_memory_too_small_for_a_block_is_refused(memory_harness: MemoryHarness) -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        memory_harness.open_node_with({**memory_harness.options("store", 16), "memory_bytes": 4096})


@pytest.mark.parametrize(("name", "value"), [("mode", "elsewhere"), ("num_threads", 0), ("op_timeout_s", 0), ("path", "")])
def test_option_outside_what_is_allowed_is_refused(memory_harness: MemoryHarness, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        memory_harness.open_node_with({**memory_harness.options("store", 16), name: value})


def test_lmcache_changes_nothing_of_its_process_and_reports_to_nobody(tmp_path: Path) -> None:
    code = (
        "import multiprocessing, os, sys\n"
        "from connectors.lmcache.connector import create_connector\n"
        "from core.clock import MonotonicClock\n"
        "from core.kv.pool_memory import KVPoolMemory\n"
        "from connectors.contract.node import LAYOUT\n"
        "connector = create_connector({'path': sys.argv[1], 'memory_bytes': 2**24}, MonotonicClock())\n"
        "connector.register_kv_cache(KVPoolMemory(LAYOUT, 4))\n"
        "print(multiprocessing.get_start_method(allow_none=True), os.environ.get('PROMETHEUS_MULTIPROC_DIR'),"
        " os.environ['LMCACHE_TRACK_USAGE'])\n"
        "connector.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "None None false", done.stderr
