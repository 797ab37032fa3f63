"""Pinning a prefix through connectors: alone and in tiers, with real stores. The index' side is in test_eviction_policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector
from connectors.slots.connector import SlotConnector
from connectors.slots.store import slot_bytes
from connectors.tiered.connector import TieredConnector
from core.kv.connector import KVConnector

CAPACITY_BYTES = 48 * (slot_bytes(LAYOUT) + 64) + 72 * 1024
PROMPT = chain(0, 6)


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    """Of both stores, 48 blocks each."""
    return {
        "shm": {"name": f"{tmp_path.parent.name[-12:]}-{tmp_path.name[-30:]}", "capacity_bytes": CAPACITY_BYTES},
        "nvme": {"path": str(tmp_path / "kv"), "capacity_bytes": CAPACITY_BYTES},
    }


def open_node(name: str, options: dict[str, Any]) -> Node:
    clock = SteppedClock()
    return Node(create_connector(name, options, clock), clock)


def wait_pins_done(connector: KVConnector) -> None:
    """Pinning is done in the background."""
    children = [tier.connector for tier in connector._tiers.tiers] if isinstance(connector, TieredConnector) else [connector]
    wait_until(lambda: not any(isinstance(child, SlotConnector) and child._pins for child in children))


def fill(node: Node, first_seed: int) -> None:
    """Save three times what fits."""
    for seed in range(first_seed, first_seed + 18):
        node.save(chain(seed, 8))


@pytest.mark.parametrize("name", ["shm", "nvme"])
def test_pinned_prefix_stays_until_it_is_unpinned(options: dict[str, Any], name: str) -> None:
    node = open_node(name, options[name])
    node.save(PROMPT)
    assert node.connector.pin_prefix(PROMPT)
    wait_pins_done(node.connector)
    fill(node, 1)
    assert node.lookup(PROMPT) == node.load(PROMPT).num_blocks_ok == 6
    node.connector.pin_prefix(PROMPT, is_pinned=False)
    wait_pins_done(node.connector)
    fill(node, 100)
    assert node.lookup(PROMPT) == 0
    node.connector.close()


def test_prefix_pinned_in_tiers_stays_in_the_fastest(options: dict[str, Any]) -> None:
    node = open_node("tiered", {"tiers": "shm,nvme", **options})
    assert node.connector.pin_prefix(PROMPT)  # before it is there
    wait_pins_done(node.connector)
    node.save(PROMPT)
    fill(node, 1)
    assert node.load(PROMPT).num_blocks_ok == 6
    assert [tier.num_hit_blocks for tier in node.stats().tiers] == [6, 0]
    node.connector.close()


def test_store_that_cannot_pin_says_so() -> None:
    assert not open_node("none", {}).connector.pin_prefix(PROMPT)
