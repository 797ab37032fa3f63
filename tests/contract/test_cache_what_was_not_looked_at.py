"""`kvrelay cache` where a part of a store cannot be looked at, or not with the key given: it is said, and a failure."""

from __future__ import annotations

import json
import secrets
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from connectors import registry
from connectors.contract.node import PAGES_LAYOUT, Node, SteppedClock, chain
from connectors.registry import create_connector
from deploy.cli import main
from tests.contract.test_coded_stores import KEY, OTHER_KEY, key_file
from tests.contract.test_nvme import NvmeHarness


def cache(command: str, connector: str, options: dict[str, Any], *argv: str) -> int:
    flags = [part for key, value in options.items() for part in ("--connector-option", f"{key}={value}")]
    return main(["cache", command, "--connector", connector, *flags, *argv])


def save(options: dict[str, Any], num_blocks: int = 4) -> None:
    clock = SteppedClock()
    node = Node(create_connector("nvme", options, clock), clock)
    node.save(chain(1, num_blocks))
    node.connector.close()


@pytest.fixture
def disk(tmp_path: Path) -> dict[str, Any]:
    return {"path": str(tmp_path / "disk"), "capacity_bytes": "16MiB"}


READING = (("verify",), ("stat",), ("ls",), ("export", "FILE"), ("prune", "--all"), ("prune", "--all", "--yes"))


def test_layout_that_cannot_be_opened_is_counted_and_fails_each_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = NvmeHarness(tmp_path)
    harness.open_node().save(chain(1, 4))
    harness.open_node(layout=PAGES_LAYOUT).save(chain(1, 3, PAGES_LAYOUT))
    harness.close_nodes()
    harness.damage_index("store")
    monkeypatch.chdir(tmp_path)  # where the export's FILE comes to be
    for command, *argv in READING:
        assert cache(command, "nvme", harness.options("store", 64), *argv) == 1, command
        said = capsys.readouterr()
        assert "3 " in said.out + said.err and "; 1 part of the store could not be looked at" in said.out + said.err, command
        assert "no index of this version" in said.err
    harness.close()


def test_path_that_is_not_there_fails_all_but_an_import(
    disk: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the export's FILE comes to be
    for command, *argv in READING:
        assert cache(command, "nvme", disk, *argv) == 1, command
        said = capsys.readouterr()
        assert "there is no store in" in said.err and "1 part of the store" in said.out + said.err, command
    source = {**disk, "path": str(tmp_path / "source")}
    save(source)
    file = str(tmp_path / "blocks")
    assert cache("export", "nvme", source, file) == 0
    capsys.readouterr()
    assert cache("import", "nvme", disk, file) == 0
    assert capsys.readouterr().err == ""
    assert cache("verify", "nvme", disk) == 0 and cache("prune", "nvme", disk, "--all", "--yes") == 0
    assert cache("stat", "nvme", disk) == 0 and cache("ls", "nvme", disk) == 0, "it is empty, which is no failure"


def test_pool_that_nobody_uses_fails_and_those_in_use_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    clock, name = SteppedClock(), f"test-{secrets.token_hex(4)}"
    node = Node(create_connector("shm", {"name": name, "capacity_bytes": "1MiB"}, clock), clock)
    try:
        assert cache("stat", "shm", {"name": f"{name}-2"}) == 1
        said = capsys.readouterr()
        assert "0 blocks, 0 bytes; 1 part of the store could not be looked at" in said.out
        assert f"uses a pool {name}-2; those in use, by option name: " in said.err and f"{name}\n" in said.err.replace(", ", "\n")
        assert cache("stat", "shm", {"name": name}) == 0, "it is empty, which is no failure"
    finally:
        node.connector.close()


def test_import_of_what_is_no_export_says_that_nothing_was_imported(
    disk: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("no export at all")
    assert cache("import", "nvme", disk, str(tmp_path / "text")) == 1
    assert "; nothing was imported" in capsys.readouterr().err


def test_tier_that_is_down_is_counted_and_tiers_are_told_apart(disk: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    save(disk)
    options = {"tiers": "shm,nvme", "shm.name": "nobody-has-this", **{f"nvme.{key}": value for key, value in disk.items()}}
    assert cache("verify", "tiered", options) == 0
    capsys.readouterr()
    with_redis = {**options, "tiers": "shm,nvme,redis", "redis.url": "redis://127.0.0.1:1", "redis.connect_timeout_s": 1}
    assert cache("verify", "tiered", with_redis) == 1
    said = capsys.readouterr()
    assert "4 blocks are intact, 0 are bad; 1 part of the store could not be looked at" in said.out and "tier redis:" in said.err
    assert cache("stat", "tiered", with_redis, "--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert {name: tier["num_blocks"] for name, tier in summary["tiers"].items()} == {"shm": 0, "nvme": 4}
    assert "tier redis" in summary["not_looked_at"][0]
    assert cache("stat", "tiered", options) == 0
    assert "tier shm: 0 blocks" in (said := capsys.readouterr()).out and "tier nvme: 4 blocks" in said.out
    assert "tier shm: no process of this user and network namespace uses a pool nobody-has-this" in said.err


def test_verify_counts_what_the_key_reads_where_installed(
    disk: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong = ({**disk, "encryption_key_file": key_file(tmp_path, key)} for key in (KEY, OTHER_KEY))
    save(right)
    tiers = {"tiers": "nvme", **{f"nvme.{key}": value for key, value in right.items()}}
    for connector, options, code, expected in (
        ("nvme", right, 0, "4 can be read with the key given, 0 are of another key"),
        ("nvme", wrong, 1, "0 can be read with the key given, 4 are of another key"),
        ("nvme", disk, 0, "4 were checked at rest only"),
        ("tiered", tiers, 0, "4 can be read with the key given, 0 are of another key"),
    ):
        assert cache("verify", connector, options) == code
        said = capsys.readouterr().out
        assert "4 blocks are intact, 0 are bad" in said and expected in said
    (tmp_path / "broken").touch(mode=0o600)
    (tmp_path / "broken").write_bytes(b"broken")
    assert cache("verify", "nvme", {**disk, "encryption_key_file": str(tmp_path / "broken")}) == 2
    assert "a file of 32 bytes" in capsys.readouterr().err


def test_installed_connector_without_a_browser_is_told_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = ModuleType("kvrelay_theirs")
    exec("def create_connector(options, clock): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "kvrelay_theirs", module)
    entry = EntryPoint("theirs", "kvrelay_theirs:create_connector", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    assert cache("stat", "theirs", {}) == 2
    assert "its module kvrelay_theirs has none" in (said := capsys.readouterr().err) and "open_browser" in said


def test_prune_without_a_what_names_what_is_missing(disk: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cache("prune", "nvme", disk, "--yes") == 2
    assert "what to prune: got nothing of that; allowed: one of --older-than AGE" in capsys.readouterr().err
    assert cache("prune", "nvme", disk, "--all", "--to-size", "1GiB") == 2
    assert "got --to-size and --all;" in capsys.readouterr().err


def test_tier_that_is_no_connector_is_named_by_the_option_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert cache("stat", "tiered", {"tiers": "shm,foo"}) == 2
    assert "connector.options.tiers: got 'foo'; allowed: names of connectors" in capsys.readouterr().err
    assert cache("stat", "tiered", {"tiers": "shm,mine", "mine.connector": "foo"}) == 2
    assert "connector.options.mine.connector: got 'foo'" in capsys.readouterr().err
