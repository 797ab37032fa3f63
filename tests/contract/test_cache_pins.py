"""`kvrelay cache pin` and `unpin`, with real stores in folders and memory, the real tokenizer and the real model's namespace."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import chain
from connectors.slots.store import slot_bytes
from core.config import ModelOptions
from core.model.description import ModelDescription, describe_model
from core.model_files import resolve_model
from deploy.cli import main
from tests.contract.test_cache_explain import PROMPT, UNREACHABLE, Explained
from tests.contract.test_coded_stores import KVNode

NUM_SLOTS = 40
NUM_BLOCKS = 6  # of PROMPT


@pytest.fixture(scope="module")
def described() -> ModelDescription:
    return describe_model(resolve_model("smollm2"), ModelOptions(), 16)


class Pinned(Explained):
    """A small store, and more than it has room for."""

    def flood(self, node: KVNode, first_seed: int) -> None:
        for seed in range(first_seed, first_seed + 2 * NUM_SLOTS // 8):
            node.save(chain(seed, 8, node.layout))

    def count(self, *argv: str) -> int:
        """Blocks that are listed."""
        code, said = self.run("ls", "--json", *argv)
        assert code == 0
        return said.count("block_hash")


@pytest.fixture
def pinned(
    tmp_path: Path, described: ModelDescription, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pinned]:
    monkeypatch.setattr("deploy.cache_prompt.DEFAULT_URL", UNREACHABLE)  # a cluster may run on this machine
    pinned = Pinned(tmp_path / "store", described, capsys)
    pinned.options["capacity_bytes"] = NUM_SLOTS * (slot_bytes(described.kv_layout) + 64) + 72 * 1024
    yield pinned


def test_pinned_prompt_outlives_a_restart_and_a_flood_until_it_is_unpinned(pinned: Pinned) -> None:
    hashes = pinned.hashes(PROMPT)
    assert len(hashes) == NUM_BLOCKS
    pinned.save(hashes)
    code, said = pinned.run("pin", PROMPT)
    assert code == 0 and "6 full blocks: 6 are stored, 6 are pinned" in said
    node = pinned.open_node()
    pinned.flood(node, 1)
    assert node.load(hashes).num_blocks_ok == NUM_BLOCKS
    assert pinned.count("--pinned") == NUM_BLOCKS < pinned.count()
    assert "pinned: 6 blocks" in pinned.run("stat")[1]
    code, said = pinned.run("prune", "--to-size", "0", "--yes")
    assert "6 blocks are pinned: they stay" in said and pinned.count() == NUM_BLOCKS
    assert pinned.run("unpin", PROMPT)[0] == 0 and pinned.count("--pinned") == 0
    pinned.flood(node, 100)
    assert node.lookup(hashes) == 0
    node.connector.close()


def test_pin_of_what_is_not_stored_or_too_much_says_so(pinned: Pinned) -> None:
    hashes = pinned.hashes(PROMPT)
    pinned.save(hashes[:4])
    code, said = pinned.run("pin", PROMPT)
    assert code == 1 and "4 are stored, 4 are pinned; what is not stored cannot be pinned" in said
    pinned.save(hashes)
    others = [PROMPT + "One. " * 64, "Two. " * 64]
    for other in others:
        pinned.save(pinned.hashes(other))
    code, said = pinned.run("pin", "--json", PROMPT, *others)
    reports = json.loads(said)
    assert code == 1 and reports[0]["num_pinned"] == NUM_BLOCKS
    assert pinned.count("--pinned") == NUM_SLOTS // 4
    assert "a quarter of its blocks at most" in pinned.run("pin", *others)[1]
    assert pinned.run("pin", "short")[0] == 1
    assert "10 blocks were pinned, and no longer are" in pinned.run("unpin", "--all")[1]
    assert pinned.count("--pinned") == 0


def test_pinned_chat_is_the_prefix_of_the_chats_that_go_on(pinned: Pinned) -> None:
    system = {"role": "system", "content": PROMPT}
    tokens = pinned.run("explain", "--json", "--chat", json.dumps([system, {"role": "user", "content": "Hello?"}]))[1]
    hashes = [bytes.fromhex(name) for name in json.loads(tokens)["block_hashes"]]
    pinned.save(hashes)
    code, said = pinned.run("pin", "--chat", json.dumps([system]))
    assert code == 0, said
    assert pinned.count("--pinned") >= NUM_BLOCKS


def test_pin_in_tiers_marks_each_tier_that_can(pinned: Pinned, tmp_path: Path) -> None:
    nvme, pinned.connector_name = dict(pinned.options), "tiered"
    name = f"pins-{os.getpid()}"
    pinned.options = {"tiers": "shm,nvme", "shm.name": name, "shm.capacity_bytes": nvme["capacity_bytes"]}
    pinned.options |= {f"nvme.{key}": value for key, value in nvme.items()}
    hashes = pinned.hashes(PROMPT)
    node = pinned.open_node()  # whose pool in memory is there as long as it is
    node.save(hashes)
    assert pinned.run("pin", PROMPT)[0] == 0
    assert pinned.count("--pinned") == 2 * NUM_BLOCKS
    node.connector.close()
    assert pinned.count("--pinned") == NUM_BLOCKS


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["pin"], 2, "PROMPT: got ''; allowed: one prompt or more"),
        (["unpin"], 2, "one prompt or more, or --all"),
        (["unpin", "--all", "hello"], 2, "PROMPT: got 'hello'"),
    ],
)
def test_pin_mistakes_are_one_line(
    argv: list[str], code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags: list[Any] = ["--connector", "nvme", "--connector-option", f"path={tmp_path}"]
    assert main(["cache", argv[0], *flags, *argv[1:]]) == code
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
