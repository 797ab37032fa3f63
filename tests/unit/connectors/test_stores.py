"""What shm and nvme each promise beyond the contract: capacity, joining, cleaning up, configuration faults."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, PAGES_LAYOUT, Node, SteppedClock, chain
from connectors.registry import create_connector
from core.errors import ConfigError, ConnectorError
from core.kv.connector import TransferOutcome

MIB = 1024 * 1024


class Opener:
    """Opens nodes of one connector in one directory, and closes them at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.nodes: list[Node] = []

    def __call__(self, connector: str, **options: Any) -> Node:
        where = {"shm": "directory", "nvme": "path"}[connector]
        layout = options.pop("layout", LAYOUT)
        clock = SteppedClock()
        self.nodes.append(Node(create_connector(connector, {where: str(self.directory), **options}, clock), clock, layout))
        return self.nodes[-1]


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[Opener]:
    opener = Opener(tmp_path)
    yield opener
    for node in opener.nodes:
        node.connector.close()


def used_bytes(directory: Path) -> int:
    """Bytes that files under a directory may take."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_shm_larger_than_what_is_free_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"capacity_bytes.*free in.*shm-size"):
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
    assert MIB < used_bytes(open_node.directory) <= 2 * MIB


def test_shm_joining_a_pool_takes_its_capacity(open_node: Opener) -> None:
    first, second = open_node("shm", capacity_bytes=2 * MIB), open_node("shm", capacity_bytes=4 * MIB)
    assert second.stats().capacity_bytes == first.stats().capacity_bytes


def test_shm_pools_of_other_names_and_layouts_are_apart(open_node: Opener) -> None:
    nodes = [open_node("shm", capacity_bytes=MIB), open_node("shm", name="b", capacity_bytes=MIB)]
    stranger = open_node("shm", capacity_bytes=MIB, layout=PAGES_LAYOUT)
    nodes[0].save(chain(1, 4))
    assert nodes[1].lookup(chain(1, 4)) == 0
    assert stranger.lookup(chain(1, 4)) == 0


def test_shm_pool_whose_processes_died_is_removed_at_the_next_start_of_any_name(open_node: Opener) -> None:
    dead = open_node.directory / f"kvrelay-{os.getuid()}" / "dead-pool"
    dead.mkdir(parents=True)
    (dead / "segment").write_bytes(bytes(100))
    (dead / "lease-7").touch()
    open_node("shm", capacity_bytes=MIB)
    assert not dead.exists()


def test_shm_last_user_removes_everything(open_node: Opener) -> None:
    nodes = [open_node("shm", capacity_bytes=MIB) for _ in range(2)]
    nodes[0].connector.close()
    assert used_bytes(open_node.directory) > 0
    nodes[1].connector.close()
    assert list(open_node.directory.iterdir()) == []


def test_shm_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a folder away")
    folder = tmp_path / "kvrelay-0"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(ConnectorError, match="another user"):
        Opener(tmp_path)("shm", capacity_bytes=MIB)


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
    assert (capacity_mib - 1) * MIB < used_bytes(open_node.directory) <= capacity_mib * MIB


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


def test_nvme_path_that_is_a_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConnectorError, match="cannot be opened"):
        Opener(tmp_path / "file" / "below")("nvme")


def test_nvme_without_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="path"):
        create_connector("nvme", {}, SteppedClock())
