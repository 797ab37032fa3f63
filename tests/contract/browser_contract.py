"""What `kvrelay cache` needs of every store: it finds, judges, moves and removes, while engines use the same store."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, PAGES_LAYOUT, chain, wait_until
from connectors.registry import open_browser
from connectors.store_browser import BlockEntry, StoreBrowser
from core.kv.connector import TransferOutcome
from deploy.cache_blocks import Progress, choose_to_prune, export_blocks, import_blocks, remove_blocks, summarize, verify_blocks
from deploy.cli import main

QUIET = Progress("did")


def names(entries: Sequence[BlockEntry]) -> set[bytes]:
    return {entry.block_hash for entry in entries}


class Store:
    """A harness' stores and the browsers on them."""

    def __init__(self, harness: ConnectorHarness) -> None:
        self.harness = harness
        self.browsers: list[StoreBrowser] = []

    def browse(self, store: str = "store") -> StoreBrowser:
        browser = open_browser(self.harness.connector_name, self.harness.options(store, 256))
        self.browsers.append(browser)
        return browser

    def command(self, *argv: str, store: str = "store") -> int:
        options = [f"{key}={value}" for key, value in self.harness.options(store, 256).items()]
        flags = [part for option in options for part in ("--connector-option", option)]
        return main(["cache", argv[0], "--connector", self.harness.connector_name, *flags, *argv[1:]])


class BrowserContract:
    """Of every store that can be looked into."""

    harness_type: type[ConnectorHarness]
    fault_of_swapped = "it is block"

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[Store]:
        harness = self.harness_type(tmp_path)
        store = Store(harness)
        yield store
        harness.close_nodes()
        for browser in store.browsers:  # after peers were killed: whoever leaves last cleans up
            browser.close()
        leftovers = harness.leftovers()
        harness.close()
        assert leftovers == []

    def test_browser_lists_what_an_engine_saved_and_reads_it_intact(self, store: Store) -> None:
        node = store.harness.open_node()
        node.save(chain(1, 6))
        node.save(chain(2, 3))
        browser = store.browse()
        entries = list(browser.entries())
        assert names(entries) == {*chain(1, 6), *chain(2, 3)}
        assert {entry.layout_fingerprint for entry in entries} == {LAYOUT.fingerprint}
        assert browser.find(LAYOUT.fingerprint, [*chain(1, 6), chain(3, 1)[0]]) == [True] * 6 + [False]
        assert browser.find(PAGES_LAYOUT.fingerprint, chain(1, 1)) == [False]
        report = verify_blocks(browser, entries, QUIET)
        assert (report.num_ok, report.num_gone, report.faults) == (9, 0, [])
        now_s = time.time()
        assert all(entry.last_used_s is not None and abs(now_s - entry.last_used_s) < 300 for entry in entries)

    def test_browser_sees_all_layouts_and_an_empty_store_has_none(self, store: Store) -> None:
        node = store.harness.open_node()
        assert store.command("stat") == 0
        node.save(chain(1, 2))
        store.harness.open_node(layout=PAGES_LAYOUT).save(chain(1, 3, PAGES_LAYOUT))
        browser = store.browse()
        summary = summarize(browser.entries(), browser.capacity_bytes, time.time())
        assert summary["num_blocks"] == 5 and summary["num_bytes"] >= 2 * LAYOUT.block_bytes + 3 * PAGES_LAYOUT.block_bytes
        counts = {layout: counts["num_blocks"] for layout, counts in summary["layouts"].items()}
        assert counts == {LAYOUT.fingerprint.hex(): 2, PAGES_LAYOUT.fingerprint.hex(): 3}
        assert verify_blocks(browser, browser.entries(), QUIET).num_ok == 5

    @pytest.mark.parametrize("where", ["header", "payload", "end"])
    def test_verify_flipped_bit_is_found_and_removed(self, store: Store, where: str, capsys: pytest.CaptureFixture[str]) -> None:
        node, hashes = store.harness.open_node(), chain(1, 6)
        node.save(hashes)
        store.harness.flip_bit("store", hashes[2], where)
        assert store.command("verify") == 1
        assert f"{hashes[2].hex()} of layout {LAYOUT.fingerprint.hex()}" in capsys.readouterr().out
        assert store.command("verify", "--remove") == 1
        assert "5 blocks are intact, 1 are bad, 1 removed" in capsys.readouterr().out
        assert store.command("verify") == 0
        assert node.load(hashes).num_blocks_ok == 2
        assert node.save(hashes).outcome is TransferOutcome.OK
        assert node.load(hashes).outcome is TransferOutcome.OK

    def test_verify_swapped_blocks_are_both_bad(self, store: Store) -> None:
        hashes = chain(1, 6)
        store.harness.open_node().save(hashes)
        store.harness.swap("store", hashes[1], hashes[4])
        browser = store.browse()
        report = verify_blocks(browser, browser.entries(), QUIET)
        assert names([entry for entry, _ in report.faults]) == {hashes[1], hashes[4]}
        assert all(self.fault_of_swapped in fault for _, fault in report.faults)

    def test_verify_cut_store_is_told_and_does_not_fail(self, store: Store) -> None:
        hashes = chain(1, 6)
        store.harness.open_node().save(hashes)
        store.harness.truncate("store", hashes[5])
        browser = store.browse()
        report = verify_blocks(browser, browser.entries(), QUIET)
        assert hashes[5] in names([entry for entry, _ in report.faults]) or report.num_ok + report.num_gone < 6

    def test_prune_takes_the_least_recently_used_prefix_from_its_end(self, store: Store) -> None:
        node = store.harness.open_node()
        node.save(chain(1, 40), "first")
        node.save(chain(2, 4), "second")
        wait_until(lambda: node.load(chain(2, 4), "third").outcome is TransferOutcome.OK)
        browser = store.browse()
        entries = list(browser.entries())
        each = entries[0].num_bytes
        chosen, _ = choose_to_prune(entries, None, sum(entry.num_bytes for entry in entries) - 20 * each, time.time())
        gone = names(chosen)
        assert len(gone) == 20 and gone <= set(chain(1, 40))
        steps = 8  # blocks of one millisecond, where a store's order is that coarse
        assert gone >= set(chain(1, 40)[20 + steps :]) and not gone & set(chain(1, 40)[: 20 - steps])
        assert remove_blocks(browser, chosen) == 20
        assert names(list(browser.entries())) == {*chain(1, 40), *chain(2, 4)} - gone
        assert node.load(chain(2, 4)).outcome is TransferOutcome.OK

    def test_prune_asks_for_yes_and_then_takes_everything(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        node = store.harness.open_node()
        node.save(chain(1, 6))
        assert store.command("prune", "--older-than", "1h", "--yes") == 0
        assert store.command("prune", "--all") == 0
        assert "6 blocks" in capsys.readouterr().out
        assert node.load(chain(1, 6)).outcome is TransferOutcome.OK
        assert store.command("prune", "--all", "--yes") == 0
        assert node.load(chain(1, 6)).num_blocks_ok == 0
        assert node.save(chain(1, 6)).outcome is TransferOutcome.OK

    def test_ls_prints_a_line_of_json_per_block(self, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
        store.harness.open_node().save(chain(1, 6))
        assert store.command("ls", "--json", "--limit", "4", "--sort", "hash") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["block_hash"] for line in lines] == sorted(name.hex() for name in chain(1, 6))[:4]
        assert store.command("ls", "--layout", "ffffffffffffffffffffffffffffffff") == 0
        assert capsys.readouterr().out == ""

    def test_export_and_import_bring_blocks_of_all_layouts_to_another_store(self, store: Store, tmp_path: Path) -> None:
        layouts = (LAYOUT, PAGES_LAYOUT)
        nodes = [store.harness.open_node(layout=layout) for layout in layouts]
        for node, layout in zip(nodes, layouts, strict=True):
            node.save(chain(1, 6, layout))
        file = tmp_path / "blocks"
        assert store.command("export", str(file)) == 0
        targets = [store.harness.open_node("other", layout=layout) for layout in layouts]
        assert store.command("import", str(file), store="other") == 0
        for target, layout in zip(targets, layouts, strict=True):
            assert target.load(chain(1, 6, layout)).outcome is TransferOutcome.OK
        assert store.command("import", str(file), store="other") == 0  # all are there

    def test_export_leaves_bad_blocks_out_and_import_takes_none(self, store: Store) -> None:
        hashes = chain(1, 6)
        store.harness.open_node().save(hashes)
        store.harness.flip_bit("store", hashes[3], "payload")
        browser, file = store.browse(), io.BytesIO()
        report = export_blocks(browser, browser.entries(), file, QUIET)
        assert (report.num_ok, len(report.faults)) == (5, 1)
        target = store.harness.open_node("other")
        damaged = bytearray(file.getvalue())
        damaged[-24 - 100] ^= 1  # in the last block's payload
        imported = import_blocks(store.browse("other"), io.BytesIO(bytes(damaged)), QUIET)
        assert imported.counts == {"written": 4, "bad": 1} and imported.error == "" and imported.num_refused == 1
        assert sum(target.load([name]).num_blocks_ok for name in hashes) == 4

    def test_import_of_a_cut_export_says_so(self, store: Store) -> None:
        store.harness.open_node().save(chain(1, 4))
        browser, file = store.browse(), io.BytesIO()
        export_blocks(browser, browser.entries(), file, QUIET)
        store.harness.open_node("other")
        whole = file.getvalue()
        record = (len(whole) - 8 - 20) // 4
        for end, num_whole in ((8 + 2 * record + 1, 2), (len(whole) - 20, 4), (len(whole) - 1, 4), (8, 0), (3, 0)):
            target = store.browse("other")
            report = import_blocks(target, io.BytesIO(whole[:end]), QUIET)
            assert report.error, end
            assert sum(report.counts.values()) == num_whole

    def test_browser_beside_a_writing_engine_never_calls_a_good_block_bad(self, store: Store) -> None:
        peer = store.harness.open_peer(num_blocks=128)
        peer.ask("ready")
        peer.send("save_for_ever", first_seed=1)
        assert peer.answer() == 1
        browser = store.browse()
        num_ok = num_removed = 0
        deadline_s = time.monotonic() + 1.5
        while time.monotonic() < deadline_s:
            entries = list(browser.entries())
            report = verify_blocks(browser, entries, QUIET)
            assert report.faults == []
            num_ok += report.num_ok
            chosen, _ = choose_to_prune(entries, None, sum(entry.num_bytes for entry in entries) // 2, time.time())
            num_removed += remove_blocks(browser, chosen)
        assert num_ok > 100 and num_removed > 10
        last_seed = peer.answer()
        while peer.answer() < last_seed + 20:  # it still saves
            pass
