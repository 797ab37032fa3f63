"""What shm and nvme each promise beyond the contract: capacity, joining, cleaning up, configuration faults."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from connectors.contract.node import LAYOUT, PAGES_LAYOUT, Node, SteppedClock, block_hashes, chain, wait_until
from connectors.registry import create_connector
from connectors.slots.index_file import SEQUENCE, index_bytes
from connectors.slots.nvme import NvmeConnector
from connectors.slots.store import HEADER_PAGE_BYTES, slot_bytes
from core.errors import ConfigError, ConnectorError
from core.kv.connector import TransferOutcome
from tests.support.memory_pools import pool_files

MIB = 1024 * 1024


class Opener:
    """Opens nodes of one connector, in one directory or pools of a name of its own, and closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pool_name = "-".join(directory.parts[-2:])[-60:]
        self.nodes: list[Node] = []

    def __call__(self, connector: str, **options: Any) -> Node:
        where = {"name": self.pool_name} if connector == "shm" else {"path": str(self.directory)}
        layout = options.pop("layout", LAYOUT)
        clock = SteppedClock()
        self.nodes.append(Node(create_connector(connector, {**where, **options}, clock), clock, layout))
        return self.nodes[-1]


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    for node in opener.nodes:
        node.connector.close()


def used_bytes(opener: Opener) -> int:
    """Bytes that files under its directory and memory of its pools may take."""
    pools = [path for kind in ("index", "segment") for path in pool_files(opener.pool_name, kind)]
    return sum(path.stat().st_size for path in [*opener.directory.rglob("*"), *pools] if path.is_file())


def test_shm_larger_than_what_is_free_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity_bytes: got 989560464998400; .* GiB of memory that are free"):
        Opener(tmp_path)("shm", capacity_bytes="900TiB")


@pytest.mark.parametrize("connector", ["shm", "nvme"])
def test_store_smaller_than_a_block_is_refused(tmp_path: Path, connector: str) -> None:
    with pytest.raises(ConfigError, match="room for a block"):
        Opener(tmp_path)(connector, capacity_bytes=70_000)


@pytest.mark.parametrize("connector", ["shm", "nvme"])
def test_files_stay_within_capacity(open_node: Opener, connector: str) -> None:
    node = open_node(connector, capacity_bytes=2 * MIB)
    for seed in range(10):
        node.save(chain(seed, 60))
    assert MIB < used_bytes(open_node) <= 2 * MIB


def test_shm_joining_a_pool_takes_its_capacity(open_node: Opener) -> None:
    first, second = open_node("shm", capacity_bytes=2 * MIB), open_node("shm", capacity_bytes=4 * MIB)
    assert second.stats().capacity_bytes == first.stats().capacity_bytes


def test_shm_pools_of_other_names_and_layouts_are_apart(open_node: Opener) -> None:
    nodes = [open_node("shm", capacity_bytes=MIB), open_node("shm", name=open_node.pool_name[1:], capacity_bytes=MIB)]
    stranger = open_node("shm", capacity_bytes=MIB, layout=PAGES_LAYOUT)
    nodes[0].save(chain(1, 4))
    assert nodes[1].lookup(chain(1, 4)) == 0
    assert stranger.lookup(chain(1, 4)) == 0


@pytest.mark.parametrize("capacity_mib", [1, 4])
def test_nvme_reopened_with_another_capacity_is_resized(open_node: Opener, capacity_mib: int) -> None:
    node = open_node("nvme", capacity_bytes=2 * MIB)
    for seed in range(6):
        node.save(chain(seed, 60))
    node.connector.close()
    node = open_node("nvme", capacity_bytes=capacity_mib * MIB)
    hits = [node.load(chain(seed, 60)).num_blocks_ok for seed in range(6)]
    assert sum(hits) > 0
    for seed in range(10, 20):
        assert node.save(chain(seed, 60)).outcome is TransferOutcome.OK
    assert (capacity_mib - 1) * MIB < used_bytes(open_node) <= capacity_mib * MIB


def test_nvme_segment_removed_between_starts_is_a_miss_per_block(open_node: Opener) -> None:
    node = open_node("nvme", capacity_bytes=2 * MIB)
    node.save(chain(1, 8))
    node.connector.close()
    (segment,) = open_node.directory.rglob("segment")
    segment.unlink()
    node = open_node("nvme", capacity_bytes=2 * MIB)
    assert node.load(chain(1, 8)).num_blocks_ok == 0
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    assert node.load(chain(1, 8)).num_blocks_ok >= 1


@pytest.mark.parametrize("is_empty", [False, True], ids=["full", "empty"])
def test_nvme_restarted_full_or_empty_serves_and_recycles(open_node: Opener, is_empty: bool) -> None:
    node = open_node("nvme", capacity_bytes=2 * MIB)
    for seed in range(20):
        node.save(chain(seed, 20))
    num_stored = node.stats().store_blocks
    node.connector.close()
    if is_empty:
        shutil.rmtree(open_node.directory)
    node = open_node("nvme", capacity_bytes=2 * MIB)
    assert node.stats().store_blocks == (0 if is_empty else num_stored)
    assert node.load(chain(19, 20)).num_blocks_ok == (0 if is_empty else 20)
    for seed in range(20, 40):
        assert node.save(chain(seed, 20)).outcome is TransferOutcome.OK
        assert node.load(chain(seed, 20)).num_blocks_ok == 20


@pytest.mark.parametrize("connector", ["shm", "nvme"])
def test_stores_of_two_versions_in_use_live_side_by_side(
    open_node: Opener, connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = open_node(connector, capacity_bytes=MIB)
    old.save(chain(1, 8))
    with monkeypatch.context() as patch:
        patch.setattr(f"connectors.slots.{connector}.FORMAT_VERSION", 99)
        patch.setattr("connectors.slots.index_file._MAGIC_AND_VERSION", 99)
        new = open_node(connector, capacity_bytes=MIB)
        assert new.lookup(chain(1, 8)) == 0
        new.save(chain(2, 8))
    for node, seed in ((old, 1), (new, 2), (old, 1)):
        assert node.load(chain(seed, 8)).num_blocks_ok == 8
        assert node.stats().num_errors == 0


def test_nvme_store_of_another_version_that_nobody_uses_is_removed(open_node: Opener) -> None:
    old = open_node("nvme", capacity_bytes=MIB)
    stranger = open_node("nvme", capacity_bytes=MIB, layout=PAGES_LAYOUT)
    stranger.save(block_hashes(1, 64, PAGES_LAYOUT))
    for node in (old, stranger):
        node.connector.close()
    (store,) = open_node.directory.glob(f"*-{LAYOUT.fingerprint.hex()}")
    store.rename(store.with_name(f"v99-{LAYOUT.fingerprint.hex()}"))
    open_node("nvme", capacity_bytes=MIB)
    assert [path.name for path in open_node.directory.glob(f"*-{LAYOUT.fingerprint.hex()}")] == [store.name]
    assert open_node("nvme", capacity_bytes=MIB, layout=PAGES_LAYOUT).load(block_hashes(1, 64, PAGES_LAYOUT)).num_blocks_ok == 8


def test_nvme_index_of_another_version_in_its_place_is_replaced(open_node: Opener) -> None:
    node = open_node("nvme", capacity_bytes=MIB)
    node.save(chain(1, 8))
    node.connector.close()
    (index,) = open_node.directory.glob("*/index")
    with index.open("r+b") as file:
        file.seek(6)
        file.write(b"\x63")
    node = open_node("nvme", capacity_bytes=MIB)
    assert node.lookup(chain(1, 8)) == 0
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    assert node.load(chain(1, 8)).num_blocks_ok == 8


def test_nvme_idle_store_is_written_once_and_its_blocks_are_left_alone(open_node: Opener) -> None:
    nodes = [open_node("nvme", capacity_bytes=8 * MIB) for _ in range(2)]
    for seed in range(10):
        assert nodes[seed % 2].save(chain(seed, 20)).outcome is TransferOutcome.OK
    (index,) = open_node.directory.glob("*/index")

    def num_unwritten() -> int:
        records = np.frombuffer(index.read_bytes(), dtype=np.uint64, offset=index_bytes(0)).reshape(-1, 8)
        return int((records[:, SEQUENCE] == 0).sum())

    wait_until(lambda: num_unwritten() < 8)
    for seed in range(10):
        assert nodes[1 - seed % 2].load(chain(seed, 20)).num_blocks_ok == 20
    assert nodes[0].stats().num_open_references == 0
    for seed in range(10, 60):
        assert nodes[seed % 2].save(chain(seed, 20)).outcome is TransferOutcome.OK


@pytest.mark.parametrize("num_new_bytes", [100, HEADER_PAGE_BYTES, HEADER_PAGE_BYTES + LAYOUT.block_bytes // 2])
def test_nvme_torn_write_is_a_miss_of_its_block_alone(open_node: Opener, num_new_bytes: int) -> None:
    """The beginning of a new block over the rest of an old one, under the name of either."""
    node = open_node("nvme", capacity_bytes=MIB)
    hashes = chain(1, 6)
    node.save(hashes)
    (segment,) = open_node.directory.glob("*/segment")
    slots = segment.read_bytes()
    starts = [slots.index(name) // slot_bytes(LAYOUT) * slot_bytes(LAYOUT) for name in hashes]
    with segment.open("r+b") as file:
        for source, target in ((0, 3), (5, 2)):
            file.seek(starts[target])
            file.write(slots[starts[source] : starts[source] + num_new_bytes])
    assert node.load(hashes).num_blocks_ok == 2
    assert node.load(hashes[3:]).num_blocks_ok == 0
    assert node.load(hashes[4:]).num_blocks_ok == 2
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 6


def test_nvme_memory_that_the_disk_refuses_goes_through_the_page_cache(open_node: Opener) -> None:
    """Misaligned memory stands for a file system that lets one open directly, but not read or write."""
    node = open_node("nvme", capacity_bytes=MIB, zero_fill=False)
    node.save(chain(1, 1))
    connector = node.connector
    assert isinstance(connector, NvmeConnector) and connector._held.store is not None
    memory = memoryview(bytearray(2 * LAYOUT.block_stride_bytes + 9))
    written, found = memory[3 : 3 + LAYOUT.block_stride_bytes], memory[-LAYOUT.block_stride_bytes :]
    written[:] = os.urandom(len(written))
    connector._held.store.medium.write([5], [b"h" * 64], [written])
    assert connector._held.store.medium.read([5], [found]) == [b"h" * 64]
    assert found == written


@pytest.mark.parametrize("sync_interval_s", [-1, 0.001, float("nan"), 1e9])
def test_nvme_sync_interval_out_of_range_is_refused(tmp_path: Path, sync_interval_s: float) -> None:
    with pytest.raises(ConfigError, match="sync_interval_s"):
        Opener(tmp_path)("nvme", sync_interval_s=sync_interval_s)


def test_nvme_path_that_is_a_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConnectorError, match="cannot be opened"):
        Opener(tmp_path / "file" / "below")("nvme")


def test_nvme_without_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="path"):
        create_connector("nvme", {}, SteppedClock())


@pytest.mark.parametrize("connector", ["shm", "nvme"])
def test_joining_a_store_of_another_capacity_warns_with_both(
    open_node: Opener, caplog: pytest.LogCaptureFixture, connector: str
) -> None:
    open_node(connector, capacity_bytes=8 * MIB)
    open_node(connector, capacity_bytes=8 * MIB)
    assert not caplog.records
    open_node(connector, capacity_bytes=64 * MIB)
    (line,) = [record.message for record in caplog.records]
    assert "keeps its 7." in line and "our capacity_bytes of 64.0 MiB is ignored" in line


def test_nvme_that_cannot_be_opened_is_unreachable_until_it_can_without_any_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SteppedClock()
    (tmp_path / "kv").touch()
    node = Node(create_connector("nvme", {"path": str(tmp_path / "kv"), "capacity_bytes": MIB}, clock), clock, LAYOUT)
    try:
        assert not node.stats().is_reachable
        assert node.stats().complaint == "it cannot be opened: File exists"
        for _ in range(5):
            clock.offset_s += 2.0
            assert node.save(chain(1, 2)).outcome is TransferOutcome.ERROR
        told = [record.message for record in caplog.records]
        assert sum("cannot be opened and is tried again" in line for line in told) == 1
        (tmp_path / "kv").unlink()
        clock.offset_s += 2.0
        wait_until(lambda: node.stats().is_reachable)
        assert node.save(chain(1, 2)).outcome is TransferOutcome.OK
    finally:
        node.connector.close()
