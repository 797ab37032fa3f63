"""Looking into real stores: what `kvrelay cache` finds, judges, moves and removes, while engines use the same store."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, chain
from connectors.registry import open_browser
from connectors.slots.shm import MemoryPools
from core.errors import ConnectorError
from core.kv.connector import TransferOutcome
from core.kv.layout import KVLayout
from deploy.cache_blocks import export_blocks, import_blocks, verify_blocks
from deploy.cli import main
from tests.contract.browser_contract import QUIET, BrowserContract, Store, names
from tests.contract.test_nvme import NvmeHarness
from tests.contract.test_redis import RedisHarness
from tests.contract.test_shm import ShmHarness
from tests.contract.test_tiered import ShmOverNvmeHarness
from tests.support.redis_server import EXECUTABLE


class TestNvmeBrowser(BrowserContract):
    harness_type = NvmeHarness

    def test_browser_of_a_damaged_index_says_so_and_leaves_it(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        store.harness.open_node().save(chain(1, 2))
        store.harness.close_nodes()  # an engine would replace it
        store.harness.damage_index("store")
        for _ in range(2):
            assert store.command("stat") == 1
            assert re.search("no index of this version", capsys.readouterr().err)

    def test_browser_of_a_store_that_nobody_has_open_keeps_its_capacity(self, store: Store) -> None:
        store.harness.open_node(num_blocks=64).save(chain(1, 6))
        for node in store.harness.close_nodes():
            assert node.stats().num_open_references == 0
        browser = open_browser("nvme", {**store.harness.options("store", 64), "capacity_bytes": "1GiB"})
        store.browsers.append(browser)
        assert browser.capacity_bytes < 128 * (4096 + LAYOUT.block_stride_bytes)
        assert verify_blocks(browser, browser.entries(), QUIET).num_ok == 6

    def test_browser_of_a_folder_that_is_not_there_makes_none(self, store: Store, tmp_path: Path) -> None:
        browser = open_browser("nvme", {"path": str(tmp_path / "nothing")})
        assert list(browser.entries()) == [] and "there is no store" in browser.missing[0]
        assert not (tmp_path / "nothing").exists()

    def test_import_of_blocks_of_another_size_is_refused(self, store: Store) -> None:
        store.harness.open_node().save(chain(1, 2))
        browser, file = store.browse(), io.BytesIO()
        export_blocks(browser, browser.entries(), file, QUIET)
        store.harness.open_node("other", layout=Larger(LAYOUT)).save(chain(2, 2))
        report = import_blocks(store.browse("other"), io.BytesIO(file.getvalue()), QUIET)
        assert report.counts == {"other size": 2} and report.num_refused == 2


class Larger(KVLayout):
    """A layout with another one's fingerprint and larger blocks."""

    def __init__(self, layout: KVLayout) -> None:
        super().__init__(layout.num_layers * 4, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype)

    @property
    def fingerprint(self) -> bytes:
        return LAYOUT.fingerprint


class TestShmBrowser(BrowserContract):
    harness_type = ShmHarness

    def test_browser_of_a_damaged_index_says_so_and_leaves_it(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        options = store.harness.options("store", 64)
        member = MemoryPools(options["name"], options["capacity_bytes"]).open(LAYOUT)  # an engine would give the pool up
        try:
            store.harness.damage_index("store")
            for _ in range(2):
                assert store.command("stat") == 1
                assert re.search("no index of this version", capsys.readouterr().err)
        finally:
            member.close()

    def test_import_where_no_engine_would_keep_the_blocks_says_so(
        self, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        store.harness.open_node().save(chain(1, 2))
        assert store.command("export", str(tmp_path / "blocks")) == 0
        assert store.command("import", str(tmp_path / "blocks"), store="unused") == 1
        assert "what is written would go at once" in capsys.readouterr().err


class TestTieredBrowser:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        harness = ShmOverNvmeHarness(tmp_path)
        store = Store(harness)
        yield store
        harness.close_nodes()
        for browser in store.browsers:
            browser.close()
        leftovers = harness.leftovers()
        harness.close()
        assert leftovers == []

    def test_blocks_are_listed_per_tier_verified_and_removed_there(self, store: Store) -> None:
        node, hashes = store.harness.open_node(), chain(1, 4)
        node.save(hashes)
        browser = store.browse()
        entries = sorted(browser.entries(), key=lambda entry: (entry.place.partition(":")[0], entry.block_hash))
        assert [entry.place.partition(":")[0] for entry in entries] == ["nvme"] * 4 + ["shm"] * 4
        assert browser.find(LAYOUT.fingerprint, [*hashes, chain(2, 1)[0]]) == [True] * 4 + [False]
        store.harness.flip_bit("store", hashes[1], "payload")
        report = verify_blocks(browser, entries, QUIET)
        assert (report.num_ok, len(report.faults)) == (6, 2)
        assert browser.remove([entry for entry in entries if entry.block_hash == hashes[1]]) == 2
        assert browser.find(LAYOUT.fingerprint, hashes) == [True, False, True, True]
        assert node.load(hashes).num_blocks_ok == 1

    def test_export_writes_once_what_several_tiers_have(self, store: Store) -> None:
        hashes = chain(1, 6)
        store.harness.open_node().save(hashes)
        browser, file = store.browse(), io.BytesIO()
        in_slow = {entry.block_hash: entry for entry in browser.entries() if browser.tier_of(entry) == "nvme"}
        assert browser.remove([in_slow[hashes[4]], in_slow[hashes[5]]]) == 2
        report = export_blocks(browser, browser.entries(), file, QUIET)
        assert (report.num_ok, report.num_copies, report.faults) == (6, 4, [])
        assert import_blocks(store.browse("other"), io.BytesIO(file.getvalue()), QUIET).counts == {"written": 6}

    def test_import_goes_to_the_slowest_tier_and_a_tier_that_cannot_be_looked_into_is_a_problem(self, store: Store) -> None:
        store.harness.open_node().save(chain(1, 3))
        browser, file = store.browse(), io.BytesIO()
        export_blocks(browser, browser.entries(), file, QUIET)
        other = open_browser("tiered", {**store.harness.options("other", 64), "tiers": "tcp,shm,nvme"})
        store.browsers.append(other)
        assert "tier tcp" in other.problems[0]
        assert import_blocks(other, io.BytesIO(file.getvalue()), QUIET).num_refused == 0
        assert {entry.place.partition(":")[0] for entry in other.entries()} == {"nvme"}
        assert names(list(other.entries())) == set(chain(1, 3))
        with pytest.raises(ConnectorError, match="none of the tiers"):
            open_browser("tiered", {"tiers": "tcp"})


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
class TestRedisBrowserWhereAServerIsInstalled(BrowserContract):
    harness_type = RedisHarness

    def test_blocks_go_from_disk_to_redis_and_back(self, store: Store, tmp_path: Path) -> None:
        disk = NvmeHarness(tmp_path / "disk")
        first = disk.open_node()
        first.save(chain(1, 6))
        source = open_browser("nvme", disk.options("store", 256))
        store.browsers.append(source)
        file = io.BytesIO()
        export_blocks(source, source.entries(), file, QUIET)
        node = store.harness.open_node()
        browser = store.browse()
        assert import_blocks(browser, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 6}
        assert node.load(chain(1, 6)).outcome is TransferOutcome.OK
        back = io.BytesIO()
        export_blocks(browser, browser.entries(), back, QUIET)
        second = open_browser("nvme", disk.options("back", 256))
        store.browsers.append(second)
        assert import_blocks(second, io.BytesIO(back.getvalue()), QUIET).counts == {"written": 6}
        assert disk.open_node("back").load(chain(1, 6)).outcome is TransferOutcome.OK
        disk.close()

    def test_garbage_in_the_namespace_is_told_and_left_alone(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        store.harness.open_node().save(chain(1, 2))
        assert isinstance(store.harness, RedisHarness)
        prefix = f"kvrelay:1:{LAYOUT.fingerprint.hex()}:"
        with store.harness.servers["store"].client() as client:
            client.set("kvrelay:1:nonsense", "x")
            client.set(f"{prefix}{'0' * 32}", "short")
            client.rpush(f"{prefix}{'1' * 32}", "a list")
            client.set(f"{prefix}{'2' * 32}", bytes(70), px=3_600_000)
        assert store.command("verify") == 1
        said = capsys.readouterr()
        assert "a key of this namespace is no block's" in said.err
        assert "2 blocks are intact, 3 are bad" in said.out


def test_ls_into_a_pipe_that_closes_ends_quietly(tmp_path: Path) -> None:
    harness = NvmeHarness(tmp_path)
    node = harness.open_node(num_blocks=600)
    for seed in range(8):  # more than a pipe holds
        node.save(chain(seed, 64))
    command = f"{sys.executable} -m deploy.cli cache ls --connector nvme --connector-option path={harness.store_root('store')}"
    ran = subprocess.run(
        f"{command} --json | head -c 1", shell=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    harness.close()
    assert ran.stdout == "{" and ran.stderr == ""


def test_export_to_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags: list[Any] = ["--connector", "nvme", "--connector-option", f"path={tmp_path}"]
    assert main(["cache", "export", *flags, str(tmp_path / "no" / "file")]) == 2
    assert "FILE: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["look"], "COMMAND: got 'look'; allowed: one of ls, stat"),
        (["ls", "--sort", "age"], "--sort: got 'age'; allowed: one of recent"),
        (["ls", "--limit", "-1"], "--limit: got -1"),
        (["ls", "--layout", "xyz"], "--layout: got 'xyz'"),
        (["prune"], "one of --older-than AGE"),
        (["prune", "--all", "--to-size", "1GiB"], "one of --older-than AGE"),
        (["prune", "--older-than", "soon"], "--older-than: got 'soon'; allowed: a number with a unit"),
        (["prune", "--to-size", "much"], "--to-size: got 'much'"),
        (["import", "/nowhere/blocks"], "FILE: got '/nowhere/blocks'; allowed: a readable export"),
        (["stat", "--connector-option", "pfad=x"], "connector.options.pfad: got 'x'; allowed: one of the options"),
    ],
)
def test_cache_command_mistakes_are_one_line(
    argv: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [] if argv[0] == "look" else ["--connector", "nvme"]
    if "--connector-option" not in argv and flags:
        flags += ["--connector-option", f"path={tmp_path}"]
    assert main(["cache", argv[0], *flags, *argv[1:]]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_store_of_a_connector_without_a_browser_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls", "--connector", "none"]) == 2
    assert "connector.name: got 'none'; allowed: a connector whose store can be looked into" in capsys.readouterr().err
