"""A store on disk that cannot be written: engines load from it, `kvrelay cache` reads it, and it is written once it can be."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import connectors.slots.nvme
import connectors.slots.store_directory
from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector, open_browser
from connectors.store_browser import find_fault
from core.errors import ConnectorError
from core.kv.connector import TransferOutcome


@contextmanager
def _refused_lock(directory: Path, timeout_s: float = 0.0) -> Iterator[None]:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(directory / "lock"))
    yield


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Of a store with eight blocks, in a folder that answers as on a read-only mount, which only root can make."""
    found: dict[str, object] = {"path": str(tmp_path / "kv"), "capacity_bytes": 4 * 1024**2}
    clock = SteppedClock()
    writer = Node(create_connector("nvme", found, clock), clock, LAYOUT)
    assert writer.save(chain(1, 8)).outcome is TransferOutcome.OK
    writer.connector.close()
    for module in (connectors.slots.nvme, connectors.slots.store_directory):
        monkeypatch.setattr(module, "locked_directory", _refused_lock)
    is_allowed = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and is_allowed(path, mode))
    return found


def _tree(options: dict[str, object]) -> dict[str, tuple[int, int]]:
    paths = Path(str(options["path"])).rglob("*")
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in paths if path.is_file()}


def test_read_only_store_serves_loads_refuses_saves_and_is_written_when_it_can_be(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, before = SteppedClock(), _tree(options)
    node = Node(create_connector("nvme", options, clock), clock, LAYOUT)
    try:
        assert node.stats().is_reachable and node.lookup(chain(1, 8)) == 8
        assert node.load(chain(1, 8)).num_blocks_ok == 8
        assert node.save(chain(2, 4)).outcome is TransferOutcome.MISS
        assert node.lookup(chain(1, 8)) == 8 and node.stats().num_errors == 0
        assert _tree(options) == before
        monkeypatch.undo()
        clock.offset_s += 2.0
        wait_until(lambda: node.save(chain(2, 4)).outcome is TransferOutcome.OK)
        assert node.load(chain(1, 8)).num_blocks_ok == 8
    finally:
        node.connector.close()


def test_read_only_store_is_listed_read_and_verified_but_not_changed(options: dict[str, object]) -> None:
    before = _tree(options)
    browser = open_browser("nvme", options)
    try:
        entries = list(browser.entries())
        assert len(entries) == 8 and not browser.problems
        for entry, block in browser.read(entries):
            assert block is not None and not find_fault(block, entry.layout_fingerprint, entry.block_hash)
        assert browser.why_read_only == "its folder cannot be written"
        with pytest.raises(ConnectorError, match="Read-only file system"):
            browser.remove(entries)
    finally:
        browser.close()
    assert _tree(options) == before
