"""nvme on real file systems that hang, stutter, fail, turn read-only or lose power: right bytes or none, one result each, and
the store is used again soon after. Skipped where this user may not mount."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector
from core.kv.connector import TransferOutcome
from tests.contract.small_disk import Ext4Disk

MIB = 1024 * 1024
OpenNode = Callable[..., Node]


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Callable[[str, Path | None], Ext4Disk]]:
    """Make disks by name, inside another one if wanted; all are unmounted at the end, inner ones first."""
    mounted: list[Ext4Disk] = []

    def make(name: str, inside: Path | None = None) -> Ext4Disk:
        num_bytes = 48 * MIB if inside else 96 * MIB
        mounted.append(Ext4Disk((inside or tmp_path) / f"{name}.img", tmp_path / name, num_bytes))
        return mounted[-1]

    yield make
    for disk in reversed(mounted):
        with contextlib.suppress(subprocess.CalledProcessError):  # it is away already
            disk.unmount()


@pytest.fixture
def open_node() -> Iterator[OpenNode]:
    nodes: list[Node] = []

    def open_it(disk: Ext4Disk, **options: Any) -> Node:
        clock = SteppedClock()
        options = {"path": str(disk.path / "store"), "capacity_bytes": 4 * MIB, **options}
        nodes.append(Node(create_connector("nvme", options, clock), clock))
        return nodes[-1]

    yield open_it
    for node in nodes:
        node.connector.close()
        assert node.connector.poll_transfers() == []
    wait_until(lambda: not any(thread.name.startswith("kv-nvme") for thread in threading.enumerate()))


def wait_quiet(node: Node) -> None:
    """Until the store is not written any more: growth and zeros are done."""
    (segment,) = (Path(node.connector._options.path)).glob("*/segment")  # type: ignore[attr-defined]
    wait_until(lambda: time.time() - segment.stat().st_mtime > 0.2)


def wait_used(node: Node, seed: int) -> None:
    """Save and load until both work, on a clock that goes by itself: within seconds, or it hangs."""
    started_s = time.monotonic()
    wait_until(lambda: node.save(chain(seed, 8)).outcome is TransferOutcome.OK)
    assert node.load(chain(seed, 8)).num_blocks_ok == 8
    print(f"used after {time.monotonic() - started_s:.2f} s")
    assert time.monotonic() - started_s < 5.0  # what is promised; it takes one, the pause between tries to open a store


def test_hung_disk_lookups_answer_close_returns_and_every_transfer_ends_once(disks: Any, open_node: OpenNode) -> None:
    outer = disks("outer")
    inner = disks("inner", outer.path)
    node, other = open_node(inner), open_node(inner)
    node.save(chain(1, 16))
    wait_quiet(node)
    with outer.frozen():
        saves = [node.start_save(chain(seed, 8), first_block=8 * seed) for seed in range(2, 6)]
        doomed = [other.start_save(chain(20, 8)), other.start_save(chain(21, 8), first_block=8)]
        for _ in range(100):
            assert node.lookup(chain(1, 16)) == 16
            time.sleep(0.005)
        assert node.connector.poll_transfers() == []  # it hangs indeed
        other.connector.close()
        assert [result.outcome for result in other.results(doomed)] == [TransferOutcome.CANCELLED] * 2
    assert {result.outcome for result in node.results(saves)} == {TransferOutcome.OK}
    wait_used(node, 30)
    assert node.load(chain(1, 16)).num_blocks_ok == 16
    assert node.stats().num_open_references == 0


def test_stuttering_disk_every_transfer_ends_once_with_right_bytes(disks: Any, open_node: OpenNode) -> None:
    outer = disks("outer")
    inner = disks("inner", outer.path)
    node = open_node(inner)
    for round_number in range(8):
        with outer.frozen():
            transfers = [node.start_save(chain(10 * round_number + seed, 8), first_block=8 * seed) for seed in range(1, 4)]
            transfers += [node.start_load(chain(10 * round_number - 9, 8), first_block=40)]
            time.sleep(0.05)
        assert {result.outcome for result in node.results(transfers)} <= {TransferOutcome.OK, TransferOutcome.MISS}
    assert node.stats().num_open_references == 0
    wait_used(node, 500)


@pytest.mark.parametrize("fault", [Ext4Disk.cut_power, Ext4Disk.make_read_only], ids=["dead", "read_only"])
def test_failed_disk_costs_misses_and_its_replacement_under_the_same_path_is_used(
    disks: Any, open_node: OpenNode, tmp_path: Path, fault: Callable[[Ext4Disk], None]
) -> None:
    disk = disks("disk")
    node = open_node(disk)
    node.save(chain(1, 8))
    wait_quiet(node)
    fault(disk)
    for seed in range(1, 30):
        assert node.save(chain(100 + seed, 20)).outcome in (TransferOutcome.ERROR, TransferOutcome.MISS)
        node.load(chain(1, 8))  # compared byte by byte
    assert node.stats().num_open_references == 0
    disk.unmount()
    shutil.copy(disk.image, tmp_path / "replacement.img")
    disk.image = tmp_path / "replacement.img"
    disk.mount()
    wait_used(node, 2)
    node.load(chain(1, 8))


def test_disk_read_only_at_start_costs_misses_and_is_used_when_it_can_be_written(disks: Any, open_node: OpenNode) -> None:
    disk = disks("disk")
    disk.remount("ro")
    node = open_node(disk)
    for seed in range(1, 4):
        assert node.lookup(chain(seed, 8)) == 0
        assert node.save(chain(seed, 8)).outcome is TransferOutcome.ERROR
        assert node.load(chain(seed, 8)).num_blocks_ok == 0
    disk.remount("rw")
    wait_used(node, 2)


def test_store_on_a_read_only_disk_is_read_and_written_again_when_it_can_be(disks: Any, open_node: OpenNode) -> None:
    disk = disks("disk")
    writer = open_node(disk)
    wait_used(writer, 1)
    writer.save(chain(1, 8))
    writer.connector.close()
    disk.remount("ro")
    node = open_node(disk)
    assert node.lookup(chain(1, 8)) == 8 and node.load(chain(1, 8)).num_blocks_ok == 8
    assert node.save(chain(3, 8)).outcome is TransferOutcome.MISS
    disk.remount("rw")
    wait_used(node, 4)


def test_disk_that_comes_after_the_start_is_used_in_place_of_what_was_under_it(disks: Any, open_node: OpenNode) -> None:
    disk = disks("disk")
    disk.unmount()
    node = open_node(disk)  # in the empty folder where it is going to be
    node.save(chain(1, 8))
    disk.mount()
    wait_until(lambda: node.load(chain(1, 8)).num_blocks_ok == 0)
    wait_used(node, 2)
    assert (disk.path / "store").exists()


@pytest.mark.parametrize("sync_interval_s", [0.05, 0.0], ids=["synced", "unsynced"])
def test_power_cut_never_gives_wrong_bytes_and_what_was_synced_is_still_there(
    disks: Any, open_node: OpenNode, sync_interval_s: float
) -> None:
    disk = disks("disk")
    node = open_node(disk, sync_interval_s=sync_interval_s)
    for seed in range(1, 20):
        node.save(chain(seed, 20))
    if sync_interval_s:
        wait_quiet(node)  # and synced, several times
    disk.cut_power()
    node.connector.close()
    disk.unmount()
    disk.mount()
    reopened = open_node(disk)
    hits = [reopened.load(chain(seed, 20)).num_blocks_ok for seed in range(1, 20)]  # compared byte by byte
    if sync_interval_s:
        assert hits == [20] * 19
    wait_used(reopened, 500)
