"""Looking into LMCache's files: without LMCache, on files that `kvrelay cache import` wrote, and beside its engines where it is
installed (`make test-lmcache`)."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, chain
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT
from connectors.registry import open_browser
from connectors.store_browser import StoreBrowser
from core.errors import ConfigError, ConnectorError
from core.kv.connector import TransferOutcome
from deploy.cache_blocks import choose_to_prune, export_blocks, import_blocks, remove_blocks, verify_blocks
from deploy.cli import main
from tests.contract.browser_contract import QUIET, BrowserContract, Store, names
from tests.contract.test_lmcache_where_installed import UNIT_BYTES, LMCacheHarness
from tests.contract.test_nvme import NvmeHarness


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[NvmeHarness]:
    harness = NvmeHarness(tmp_path)
    yield harness
    harness.close()


@pytest.fixture
def exported(disk: NvmeHarness, browsers: list[StoreBrowser]) -> bytes:
    """Two prompts of 20 and 3 blocks, as a store on disk had them."""
    node = disk.open_node("disk")
    node.save(chain(1, 20))
    node.save(chain(2, 3))
    browsers.append(browser := open_browser("nvme", disk.options("disk", 256)))
    file = io.BytesIO()
    assert export_blocks(browser, browser.entries(), file, QUIET).num_ok == 23
    return file.getvalue()


def test_blocks_come_from_disk_into_few_files_and_go_back(
    exported: bytes, disk: NvmeHarness, browsers: list[StoreBrowser], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "lmcache" not in sys.modules or importlib.util.find_spec("lmcache")
    options: dict[str, Any] = {"path": str(tmp_path / "lmcache"), "capacity_bytes": "1MiB"}
    browsers.append(browser := open_browser("lmcache", options))
    assert "there is no store" in browser.missing[0] and list(browser.entries()) == []
    assert import_blocks(browser, io.BytesIO(exported), QUIET).counts == {"written": 23}
    assert import_blocks(browser, io.BytesIO(exported), QUIET).counts == {"present": 23}
    folder = tmp_path / "lmcache" / LAYOUT.fingerprint.hex()
    assert len(list(folder.glob("*.data"))) == -(-23 // MAX_BLOCKS_PER_OBJECT)
    entries = sorted(browser.entries(), key=lambda entry: entry.eviction_order)
    assert [entry.block_hash for entry in entries] == [*chain(1, 20)[::-1], *chain(2, 3)[::-1]]
    assert browser.find(LAYOUT.fingerprint, [*chain(2, 3), chain(3, 1)[0]]) == [True] * 3 + [False]
    assert verify_blocks(browser, entries, QUIET).num_ok == 23
    browser.close()
    assert list(folder.glob("tmp-*")) == []

    flags = [part for key, value in options.items() for part in ("--connector-option", f"{key}={value}")]
    assert main(["cache", "ls", "--connector", "lmcache", *flags, "--json", "--limit", "1"]) == 0
    (line,) = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert line["block_hash"] == chain(2, 3)[0].hex() and line["num_bytes"] == UNIT_BYTES
    assert main(["cache", "pin", "--connector", "lmcache", *flags, "Hello"]) == 1
    assert "lmcache: this kind of store has no pins" in capsys.readouterr().err

    file = io.BytesIO()
    export_blocks(browser, browser.entries(), file, QUIET)
    browsers.append(back := open_browser("nvme", disk.options("back", 256)))
    assert import_blocks(back, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 23}
    assert disk.open_node("back").load(chain(1, 20)).outcome is TransferOutcome.OK


def test_removal_in_the_middle_of_a_file_keeps_the_rest_and_its_age(
    exported: bytes, browsers: list[StoreBrowser], tmp_path: Path
) -> None:
    browsers.append(browser := open_browser("lmcache", {"path": str(tmp_path / "lmcache")}))
    import_blocks(browser, io.BytesIO(exported), QUIET)
    before = {entry.block_hash: entry.last_used_s for entry in browser.entries()}
    (victim,) = [entry for entry in browser.entries() if entry.block_hash == chain(1, 20)[9]]
    assert remove_blocks(browser, [victim]) == 1
    assert remove_blocks(browser, [victim]) == 0  # its file is another one now
    assert list(browser.read([victim])) == [(victim, None)]
    after = {entry.block_hash: entry.last_used_s for entry in browser.entries()}
    assert after == {name: used_s for name, used_s in before.items() if name != victim.block_hash}
    assert verify_blocks(browser, browser.entries(), QUIET).num_ok == 22
    chosen, _ = choose_to_prune(list(browser.entries()), None, 8 * UNIT_BYTES, 0.0)
    assert remove_blocks(browser, chosen) == 14
    assert names(list(browser.entries())) == {*chain(1, 5), *chain(2, 3)}
    assert remove_blocks(browser, list(browser.entries())) == 8 and not list(tmp_path.rglob("*.data"))


def test_files_that_engines_evict_meanwhile_are_gone_and_no_error(
    disk: NvmeHarness, browsers: list[StoreBrowser], tmp_path: Path
) -> None:
    """Side by side, so that it meets every moment: a file is looked for, opened, read, or written anew with fewer blocks."""
    node = disk.open_node("disk")
    for seed in range(6):
        node.save(chain(seed, 30))
    browsers.append(source := open_browser("nvme", disk.options("disk", 256)))
    export_blocks(source, source.entries(), exported := io.BytesIO(), QUIET)
    options, num_rounds = {"path": str(tmp_path / "lmcache")}, 20

    def evict(listed: Iterable[str]) -> None:
        for text in listed:
            (tmp_path / "lmcache" / LAYOUT.fingerprint.hex() / text).unlink(missing_ok=True)

    for number in range(num_rounds):
        browsers.append(browser := open_browser("lmcache", options))
        assert import_blocks(browser, io.BytesIO(exported.getvalue()), QUIET).num_refused == 0
        entries = list(browser.entries())
        evicting = threading.Thread(target=evict, args=[dict.fromkeys(entry.handle.text for entry in entries)])
        evicting.start()
        if number % 2:
            assert verify_blocks(browser, entries, QUIET).faults == []
        remove_blocks(browser, entries[::3])
        evicting.join()


def test_import_into_a_full_store_evicts_what_was_used_longest_ago(
    exported: bytes, browsers: list[StoreBrowser], tmp_path: Path
) -> None:
    options = {"path": str(tmp_path / "lmcache"), "capacity_bytes": 12 * UNIT_BYTES}
    browsers.append(browser := open_browser("lmcache", options))
    report = import_blocks(browser, io.BytesIO(exported), QUIET)
    assert report.counts == {"written": 12, "no room": 11}
    assert names(list(browser.entries())) == {*chain(1, 9), *chain(2, 3)}


def test_server_mode_and_a_path_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"connector\.options\.mode: got 'server'; allowed: in_process.*its own tools"):
        open_browser("lmcache", {"mode": "server"})
    with pytest.raises(ConfigError, match=r"connector\.options\.path"):
        open_browser("lmcache", {})
    with pytest.raises(ConnectorError, match="the store cannot be used"):
        open_browser("lmcache", {"path": str(tmp_path / ("x" * 300))})


@pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed")
class TestLMCacheBrowserWhereInstalled(BrowserContract):
    harness_type: type[ConnectorHarness] = LMCacheHarness

    def test_engine_loads_what_was_imported_while_it_runs(self, store: Store, exported: bytes) -> None:
        node = store.harness.open_node()
        browser = store.browse()
        assert import_blocks(browser, io.BytesIO(exported), QUIET).counts == {"written": 23}
        assert node.load(chain(1, 20)).outcome is TransferOutcome.OK
        assert node.lookup(chain(2, 3)) == 3
