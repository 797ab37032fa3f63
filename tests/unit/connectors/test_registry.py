"""Connectors by name, their options, and the connector that stores nothing."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from connectors import registry
from connectors.byte_sizes import parse_byte_size, readable_bytes
from connectors.contract.node import Node, SteppedClock, chain
from connectors.none import NoneConnector
from connectors.registry import create_connector
from core.clock import Clock
from core.errors import ConfigError
from core.kv.connector import TransferOutcome


def third_party_connector(options: Mapping[str, Any], clock: Clock) -> NoneConnector:
    """What another project's entry point loads."""
    return NoneConnector()


def test_create_connector_unknown_name_lists_what_exists() -> None:
    with pytest.raises(ConfigError, match=r"connector\.name.*'rediss'.*none.*nvme.*shm"):
        create_connector("rediss", {}, SteppedClock())


def test_create_connector_of_an_entry_point_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", f"{__name__}:third_party_connector", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry] if group == registry.ENTRY_POINT_GROUP else [])
    assert isinstance(create_connector("theirs", {}, SteppedClock()), NoneConnector)
    assert "theirs" in registry.connector_names()


def test_create_connector_whose_library_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("theirs", "no_such_library:create", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    with pytest.raises(ConfigError, match="no_such_library"):
        create_connector("theirs", {}, SteppedClock())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("none", {"path": "/x"}),
        ("shm", {"name": "../escape"}),
        ("shm", {"directory": "/no/such/folder"}),
        ("shm", {"capacity_bytes": "lots"}),
        ("shm", {"capacity_bytes": "1KiB"}),
        ("nvme", {"path": "/kv", "capacity_bytes": -5}),
        ("nvme", {"path": "/kv", "capacity_bytes": "2000TiB"}),
        ("tcp", {"capacity_bytes": -5}),
        ("shm", {"num_threads": 0}),
        ("nvme", {"path": ""}),
        ("nvme", {"path": "/x", "num_threads": 1000}),
    ],
)
def test_create_connector_bad_option_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    (bad,) = [key for key in options if len(options) == 1 or key != "path"]
    with pytest.raises(ConfigError, match=rf"connector\.options\.{bad}"):
        create_connector(name, options, SteppedClock())


def test_none_connector_finds_and_stores_nothing() -> None:
    clock = SteppedClock()
    node = Node(create_connector("none", {}, clock), clock)
    wakes: list[int] = []
    node.connector.on_result = lambda: wakes.append(1)
    assert node.save(chain(1, 2)).outcome is TransferOutcome.MISS
    assert node.lookup(chain(1, 2)) == 0
    assert node.load(chain(1, 2)).outcome is TransferOutcome.MISS
    assert len(wakes) == 2
    node.connector.close()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1024, 1024),
        ("1024", 1024),
        ("2GiB", 2 * 1024**3),
        ("1.5 gib", 3 * 512 * 1024**2),
        ("10G", 10**10),
        ("3KB", 3000),
        ("1TiB", 1024**4),
    ],
)
def test_parse_byte_size_of_readable_sizes(value: object, expected: int) -> None:
    assert parse_byte_size("size", value) == expected


@pytest.mark.parametrize("value", ["", "GiB", "-1", "1 XB", "1iB", "9" * 400, None, True, 1.5])
def test_parse_byte_size_of_anything_else_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="size"):
        parse_byte_size("size", value)


def test_readable_bytes_names_the_unit() -> None:
    assert [readable_bytes(size) for size in (5, 2048, 64 * 1024**2, 3 * 1024**4)] == [
        "5 bytes",
        "2.0 KiB",
        "64.0 MiB",
        "3.0 TiB",
    ]
