"""The contract, for ray: one real Ray for the module, each test's stores in a namespace of their own."""

from __future__ import annotations

import io
import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, chain, content_of
from connectors.contract.peer import Peer
from connectors.registry import open_browser
from connectors.store_browser import RawBlock, WriteOutcome
from connectors.stored_block import BLOCK_HEADER_BYTES, CODED_VERSION, pack_block_header
from core.errors import ConnectorError
from core.kv.connector import TransferOutcome
from deploy.cache_blocks import export_blocks, import_blocks, verify_blocks
from tests.contract.browser_contract import QUIET, BrowserContract, Store, names
from tests.contract.test_nvme import NvmeHarness
from tests.support.ray_node import MIB, RayNode

_NUMBERS = itertools.count()
_BLOCK_BYTES = LAYOUT.block_bytes + BLOCK_HEADER_BYTES
_ROOMY_BYTES = 32 * MIB
_PATIENCE_S = 30.0


class RayHarness(ConnectorHarness):
    """A store is a namespace. Headers are in the directory's own memory, out of reach; payloads are in the object store."""

    connector_name = "ray"
    is_persistent = True
    node: ClassVar[RayNode]

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._prefix = f"test{next(_NUMBERS)}"

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        capacity_bytes = num_blocks * _BLOCK_BYTES + (_ROOMY_BYTES if num_blocks > 1000 else 0)  # it may get larger ones
        return {**self.node.options, "namespace": f"{self._prefix}-{store}", "capacity_bytes": capacity_bytes, "linger_s": 10.0}

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        if where == "header":
            pytest.skip("headers are in the directory's own memory")
        offset = 0 if where == "payload" else LAYOUT.block_bytes - 1
        self._change(lambda name, content: _with_flipped_bit(content, offset) if name == block_hash else content, block_hash)

    def truncate(self, store: str, block_hash: bytes) -> None:
        """Objects cannot be cut: what would be behind the cut becomes zeros."""
        self._change(lambda _, content: content[:100] + bytes(len(content) - 100), block_hash)

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        self._change(lambda name, _: content_of(second_hash if name == first_hash else first_hash), first_hash, second_hash)

    def delete(self, store: str, block_hash: bytes) -> None:
        self._change(lambda _, content: bytes(len(content)), block_hash)

    def _change(self, change: Callable[[bytes, bytes], bytes], *names: bytes) -> None:
        """Blocks are found by their content. Those of the same name in stores of earlier tests are changed, too."""
        descriptor = self.node.open_object_store()
        with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as memory:
            os.close(descriptor)
            starts = {name: list(_occurrences(memory, content_of(name))) for name in names}
            for name, found in starts.items():
                assert found, "the block is not in the object store"
                for start in found:
                    memory[start : start + LAYOUT.block_bytes] = change(name, content_of(name))

    def wipe(self, store: str) -> None:
        """kill -9 of the directory, and with it of all that it owns."""
        self.node.kill_one("directory")


def _occurrences(memory: mmap.mmap, content: bytes) -> Iterator[int]:
    start = memory.find(content)
    while start >= 0:
        yield start
        start = memory.find(content, start + 1)


def _with_flipped_bit(content: bytes, offset: int) -> bytes:
    return content[:offset] + bytes([content[offset] ^ 0x10]) + content[offset + 1 :]


@pytest.fixture(scope="module", autouse=True)
def ray_node() -> Iterator[RayNode]:
    """A Ray with a directory that stays for the module, because another process keeps a store open."""
    node = RayNode()
    RayHarness.node = node
    keeper = Peer("ray", {**node.options, "namespace": "keeper"})
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while keeper.ask("save", seed=1, num_blocks=2) != [2, "ok"]:
            assert time.monotonic() < deadline_s, "there is no directory"
            time.sleep(0.05)
        yield node
    finally:
        keeper.kill()
        node.end()


class TestRay(ConnectorContract):
    harness_type = RayHarness


class TestRayBrowser(BrowserContract):
    harness_type = RayHarness
    fault_of_swapped = "its payload does not match"  # headers are out of the damage's reach

    def test_blocks_go_to_disk_and_into_a_namespace_that_nobody_uses_and_stay_for_who_comes(
        self, store: Store, tmp_path: Path
    ) -> None:
        store.harness.open_node().save(chain(1, 6))
        browser, file = store.browse(), io.BytesIO()
        order = [entry.block_hash for entry in sorted(browser.entries(), key=lambda entry: entry.eviction_order)]
        assert order == chain(1, 6)[::-1]
        export_blocks(browser, browser.entries(), file, QUIET)
        disk = NvmeHarness(tmp_path)
        on_disk = open_browser("nvme", disk.options("disk", 256))
        store.browsers.append(on_disk)
        assert import_blocks(on_disk, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 6}
        unused = store.browse("unused")
        assert import_blocks(unused, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 6}
        assert "what is written goes 10 s after this command" in unused.notes[0]
        assert verify_blocks(unused, unused.entries(), QUIET).num_ok == 6
        unused.close()
        assert store.harness.open_node("unused").load(chain(1, 6)).outcome is TransferOutcome.OK
        assert disk.open_node("disk").load(chain(1, 6)).outcome is TransferOutcome.OK
        disk.close()

    def test_looking_in_is_no_use_and_keeps_no_store(self, store: Store) -> None:
        options = {**store.harness.options("store", 256), "linger_s": 0.1}
        node = store.harness.open_node_with(options)
        node.save(chain(1, 4))
        node.save(chain(2, 4))
        browser = store.browse()
        order = [entry.block_hash for entry in sorted(browser.entries(), key=lambda entry: entry.eviction_order)]
        assert verify_blocks(browser, sorted(browser.entries(), key=lambda entry: entry.block_hash), QUIET).num_ok == 8
        assert order == [entry.block_hash for entry in sorted(browser.entries(), key=lambda entry: entry.eviction_order)]
        node.connector.close()
        deadline_s = time.monotonic() + _PATIENCE_S
        while names(list(browser.entries())):
            assert time.monotonic() < deadline_s, "a visitor keeps a store"
            time.sleep(0.05)

    def test_encoded_blocks_are_refused_rather_than_called_plain(self, store: Store) -> None:
        store.harness.open_node().save(chain(1, 2))
        browser, name = store.browse(), chain(2, 1)[0]
        payload = content_of(name)
        coded = RawBlock(pack_block_header(LAYOUT.fingerprint, name, payload, CODED_VERSION), payload)
        plain = RawBlock(pack_block_header(LAYOUT.fingerprint, name, payload), payload)
        assert browser.write([coded]) == [WriteOutcome.OTHER_FORM]
        assert browser.find(LAYOUT.fingerprint, [name]) == [False]
        assert browser.write([coded, plain]) == [WriteOutcome.OTHER_FORM, WriteOutcome.WRITTEN]

    def test_pins_are_refused_and_a_ray_without_a_directory_is_a_clear_error(self, store: Store) -> None:
        store.harness.open_node().save(chain(1, 2))
        browser = store.browse()
        with pytest.raises(ConnectorError, match="this kind of store has no pins"):
            browser.pin(LAYOUT.fingerprint, chain(1, 2))
        with pytest.raises(ConnectorError, match=r"no directory for the Ray at 127\.0\.0\.3:6379 runs on this host"):
            open_browser("ray", {"address": "127.0.0.3:6379"})
