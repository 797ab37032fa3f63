"""lmcache on disks that are read-only, dead, hung or replaced: right bytes or none, one result each, no hang, and it is used
again soon after. Skipped where lmcache is not installed or this user may not mount; `make test-lmcache` runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, content_of
from connectors.registry import create_connector
from connectors.stored_block import BLOCK_HEADER_BYTES, CODED_VERSION, PLAIN_VERSION, pack_block_header
from core.kv.connector import TransferOutcome
from tests.contract.small_disk import Ext4Disk

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed")

MIB = 1024 * 1024
OP_TIMEOUT_S = 0.3
# What is promised is 5 s; three times that is a hang, also on a machine with other work.
RECOVERY_HANG_S = 15.0
PATIENCE_S = 30.0  # what LMCache itself may take to end, and more
FAILURES = {TransferOutcome.ERROR, TransferOutcome.TIMEOUT, TransferOutcome.MISS}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Ext4Disk]:
    disk = Ext4Disk(tmp_path / "disk.img", tmp_path / "disk", 96 * MIB)
    yield disk
    with contextlib.suppress(subprocess.CalledProcessError):  # it is away already
        disk.unmount()


@pytest.fixture
def open_node(disk: Ext4Disk) -> Iterator[Callable[[], Node]]:
    nodes: list[Node] = []

    def open_it() -> Node:
        options = {"path": str(disk.path / "store"), "capacity_bytes": 8 * MIB, "memory_bytes": 8 * MIB}
        clock = SteppedClock()
        connector = create_connector("lmcache", {**options, "cache_in_memory": False, "op_timeout_s": OP_TIMEOUT_S}, clock)
        nodes.append(Node(connector, clock))
        return nodes[-1]

    yield open_it
    for node in nodes:
        started_s = time.monotonic()
        node.connector.close()
        assert time.monotonic() - started_s < PATIENCE_S
        assert node.stats().num_open_references == 0


def wait_used(node: Node, seed: int) -> None:
    """Until a save and a load work, which must be soon."""
    started_s = time.monotonic()
    while node.save(chain(seed, 8)).outcome is not TransferOutcome.OK:
        assert time.monotonic() - started_s < RECOVERY_HANG_S, "the store is not used again"
        time.sleep(0.02)
    assert node.load(chain(seed, 8)).num_blocks_ok == 8
    print(f"used after {time.monotonic() - started_s:.2f} s")


@pytest.mark.parametrize("fault", [Ext4Disk.cut_power, Ext4Disk.make_read_only], ids=["dead", "read_only"])
def test_failed_disk_costs_misses_and_its_replacement_under_the_same_path_is_used(
    disk: Ext4Disk, open_node: Callable[[], Node], tmp_path: Path, fault: Callable[[Ext4Disk], None]
) -> None:
    node = open_node()
    node.save(chain(1, 8))
    fault(disk)
    for seed in range(2, 8):
        assert node.save(chain(seed, 8)).outcome in FAILURES
        node.load(chain(1, 8))  # compared byte by byte
    assert node.stats().num_open_references == 0
    disk.unmount()
    shutil.copy(disk.image, tmp_path / "replacement.img")
    disk.image = tmp_path / "replacement.img"
    disk.mount()
    wait_used(node, 20)
    node.load(chain(1, 8))


def test_disk_read_only_at_start_costs_misses_and_is_used_when_it_can_be_written(
    disk: Ext4Disk, open_node: Callable[[], Node]
) -> None:
    disk.remount("ro")
    node = open_node()
    assert node.lookup(chain(1, 8)) == 0
    assert node.save(chain(1, 8)).outcome in FAILURES
    assert node.load(chain(1, 8)).num_blocks_ok == 0
    disk.remount("rw")
    wait_used(node, 2)


def test_hung_disk_lookups_answer_and_every_transfer_ends_once(disk: Ext4Disk, open_node: Callable[[], Node]) -> None:
    node = open_node()
    node.save(chain(1, 8))
    with disk.frozen():
        transfers = [node.start_save(chain(2, 8), first_block=8), node.start_load(chain(1, 8))]
        for _ in range(100):
            assert node.lookup(chain(1, 8)) == 8
            time.sleep(0.005)
    assert {result.outcome for result in node.results(transfers)} <= {TransferOutcome.OK, *FAILURES}
    wait_used(node, 3)
    assert node.load(chain(1, 8)).num_blocks_ok == 8


def test_hung_disk_does_not_keep_close_from_returning(disk: Ext4Disk, open_node: Callable[[], Node]) -> None:
    node = open_node()
    node.save(chain(1, 8))
    with disk.frozen():
        transfers = [node.start_save(chain(2, 8), first_block=8), node.start_load(chain(1, 8))]
        started_s = time.monotonic()
        node.connector.close()
        assert time.monotonic() - started_s < PATIENCE_S
        assert len(node.results(transfers)) == 2


@pytest.mark.parametrize("version", [PLAIN_VERSION, CODED_VERSION], ids=["model", "version"])
def test_value_of_another_model_or_version_is_never_loaded_and_replaced(
    disk: Ext4Disk, open_node: Callable[[], Node], version: int
) -> None:
    node, (name,) = open_node(), chain(1, 1)
    node.save([name])
    (path,) = disk.path.rglob("*.data")
    payload = content_of(name)
    fingerprint = LAYOUT.fingerprint if version == CODED_VERSION else b"another layout!!"
    path.write_bytes(pack_block_header(fingerprint, name, payload, version) + payload)
    assert path.stat().st_size == BLOCK_HEADER_BYTES + LAYOUT.block_bytes
    assert node.load([name]).num_blocks_ok == 0
    assert node.save([name]).outcome is TransferOutcome.OK
    assert node.load([name]).num_blocks_ok == 1
