"""Looking into running tcp nodes: `kvrelay cache` reads their memory over the wire, and changes nothing there."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.contract.node import HANG_S, LAYOUT, PAGES_LAYOUT, chain
from connectors.registry import open_browser
from connectors.store_browser import StoreBrowser
from core.errors import ConfigError, ConnectorError
from core.kv.connector import TransferOutcome
from core.wire.curve import create_keys, load_keys
from deploy.cache_blocks import export_blocks, import_blocks, verify_blocks
from deploy.cli import main
from tests.contract.browser_contract import QUIET, names
from tests.contract.tcp_bench import TcpBench, connector_of, free_port
from tests.contract.test_nvme import NvmeHarness
from tests.support.delaying_proxy import HOST


@pytest.fixture
def bench() -> Iterator[TcpBench]:
    bench = TcpBench()
    yield bench
    bench.close()


def command(*argv: str, peers: str) -> int:
    return main(["cache", argv[0], "--connector", "tcp", "--connector-option", f"peers={peers}", *argv[1:]])


def test_nodes_are_listed_in_their_order_and_exported_to_another_store(
    bench: TcpBench, browsers: list[StoreBrowser], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    bench.open_process(port).ask("save", seed=1, num_blocks=6)
    here = bench.open_node(layout=PAGES_LAYOUT)
    here.save(chain(2, 3, PAGES_LAYOUT))
    peers = f"{HOST}:{port},{here.connector.kv_address}"
    assert command("stat", peers=f"{peers},{HOST}:{free_port()}") == 1
    said = capsys.readouterr()
    assert "9 blocks" in said.out and "Connection refused" in said.err
    assert command("ls", "--json", "--layout", LAYOUT.fingerprint.hex(), "--sort", "oldest", peers=peers) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["block_hash"] for line in lines] == [name.hex() for name in reversed(chain(1, 6))]  # tails go first
    assert lines[0]["place"] == f"node {HOST}:{port}" and lines[0]["last_used_s"] is None

    assert command("export", str(tmp_path / "blocks"), peers=peers) == 0
    disk = NvmeHarness(tmp_path)
    for layout, seed, num_blocks in ((LAYOUT, 1, 6), (PAGES_LAYOUT, 2, 3)):
        node = disk.open_node("disk", layout=layout)
        browsers.append(target := open_browser("nvme", disk.options("disk", 256)))
        assert import_blocks(target, io.BytesIO((tmp_path / "blocks").read_bytes()), QUIET).num_refused == 0
        assert node.load(chain(seed, num_blocks, layout)).outcome is TransferOutcome.OK
    disk.close_nodes()


def test_looking_in_counts_as_no_use_and_finds_what_is_damaged(
    bench: TcpBench, browsers: list[StoreBrowser], capsys: pytest.CaptureFixture[str]
) -> None:
    node, hashes = bench.open_node(), chain(1, 6)
    node.save(hashes)
    node.save(chain(2, 4))
    address, memory = node.connector.kv_address, connector_of(node)._memory
    order = memory.eviction_order()
    browsers.append(browser := open_browser("tcp", {"peers": address}))
    assert verify_blocks(browser, browser.entries(), QUIET).num_ok == 10
    assert browser.find(LAYOUT.fingerprint, [*hashes, chain(3, 1)[0]]) == [True] * 6 + [False]
    assert browser.find(PAGES_LAYOUT.fingerprint, hashes[:1]) == [False]
    assert memory.eviction_order() == order and node.stats().num_open_references == 0

    memory._payload(memory._slot_by_hash[hashes[2]])[100] ^= 1
    assert command("verify", peers=address) == 1
    assert f"{hashes[2].hex()} of layout {LAYOUT.fingerprint.hex()}" in capsys.readouterr().out
    assert command("verify", "--remove", peers=address) == 1
    assert "9 blocks are intact, 1 are bad, 1 removed" in capsys.readouterr().out
    assert node.load(hashes).num_blocks_ok == 2 and command("verify", peers=address) == 0


def test_what_would_change_a_node_is_refused_and_says_why(
    bench: TcpBench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = bench.open_node()
    node.save(chain(1, 2))
    address = node.connector.kv_address
    assert command("export", str(tmp_path / "blocks"), peers=address) == 0
    capsys.readouterr()
    for argv, why in (
        (("prune", "--all", "--yes"), "prune cannot be done with tcp: a node's own memory is written and evicted by that node"),
        (("import", str(tmp_path / "blocks")), "import cannot be done with tcp: a node's own memory"),
        (("pin", "Hello"), "tcp: a node's own memory has no pins"),
    ):
        assert command(*argv, peers=address) == 1
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1
    assert node.load(chain(1, 2)).outcome is TransferOutcome.OK


def test_browser_beside_a_writing_node_never_calls_a_good_block_bad(bench: TcpBench, browsers: list[StoreBrowser]) -> None:
    port = free_port()
    peer = bench.open_process(port, capacity_bytes=160 * 1024)
    peer.send("save_for_ever", first_seed=1)
    assert peer.answer() == 1
    browsers.append(browser := open_browser("tcp", {"port": port}))
    num_ok = num_gone = 0
    deadline_s = time.monotonic() + HANG_S
    while num_ok < 200 or not num_gone:
        assert time.monotonic() < deadline_s
        report = verify_blocks(browser, list(browser.entries()), QUIET)
        assert report.faults == []
        num_ok += report.num_ok
        num_gone += report.num_gone


def test_only_who_has_the_nodes_secret_may_look(bench: TcpBench, browsers: list[StoreBrowser], tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    keys = load_keys(str(tmp_path / "keys"), "node")
    assert keys is not None
    node = bench.open_node(secret=keys.derive_secret("connector"))
    node.save(chain(1, 2))
    address = node.connector.kv_address
    assert command("verify", "--keys", str(tmp_path / "keys"), peers=address) == 0
    for secret in (b"", b"another one"):
        with pytest.raises(ConnectorError, match="it has another secret"):
            open_browser("tcp", {"peers": address}, lambda secret=secret: secret)  # type: ignore[misc]
    with pytest.raises(ConnectorError, match="there is no secret"):
        open_browser("tcp", {"peers": "192.0.2.1:8100"})


def test_nodes_that_are_not_named_or_not_there_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"connector\.options\.peers.*kv_address"):
        open_browser("tcp", {})
    with pytest.raises(ConnectorError, match=rf"the node at {HOST}:.*Connection refused"):
        open_browser("tcp", {"peers": f"{HOST}:{free_port()}"})


def test_tier_of_a_node_is_read_and_an_import_goes_to_the_slowest_that_takes_it(
    bench: TcpBench, browsers: list[StoreBrowser], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = bench.open_node()
    node.save(chain(1, 3))
    options = {"tiers": "nvme,tcp", "nvme.path": str(tmp_path / "kv"), "tcp.peers": node.connector.kv_address}
    browsers.append(browser := open_browser("tiered", options))
    file = io.BytesIO()
    assert export_blocks(browser, browser.entries(), file, QUIET).num_ok == 3
    assert import_blocks(browser, io.BytesIO(file.getvalue()), QUIET).counts == {"written": 3}
    assert sorted(entry.place.partition(":")[0] for entry in browser.entries()) == ["nvme"] * 3 + ["tcp"] * 3
    assert names(list(browser.entries())) == set(chain(1, 3))
    assert browser.pin(LAYOUT.fingerprint, chain(1, 3)) == [True] * 3  # on disk
    flags = [part for key, value in options.items() for part in ("--connector-option", f"{key}={value}")]
    assert main(["cache", "prune", "--connector", "tiered", *flags, "--all", "--yes"]) == 0
    assert "3 blocks were removed" in capsys.readouterr().out
    assert [entry.place.partition(":")[0] for entry in browser.entries()] == ["tcp"] * 3
