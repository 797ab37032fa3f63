"""An index whose words are anything: lookups never raise, no key is blocked for good, and the next users have a working store."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain
from connectors.slots.index_file import (
    CHECKSUM,
    LAST_USE,
    NUM_RECENT_CHANGES,
    RECORD_BYTES,
    SEQUENCE,
    STATE_AND_OWNER,
    index_bytes,
)
from connectors.slots.nvme import create_connector
from connectors.slots.store import HEADER_PAGE_BYTES, slot_bytes
from core.kv.connector import TransferOutcome

NUM_BLOCKS = 16
RECORDS_OFFSET = index_bytes(0)
OpenNode = Callable[[], Node]


@pytest.fixture
def open_node(tmp_path: Path) -> Iterator[OpenNode]:
    """Nodes of this process on one store."""
    nodes: list[Node] = []

    def open_it() -> Node:
        clock = SteppedClock()
        capacity_bytes = NUM_BLOCKS * (slot_bytes(LAYOUT) + 64) + 72 * 1024
        options = {"path": str(tmp_path / "store"), "capacity_bytes": capacity_bytes, "zero_fill": False}
        nodes.append(Node(create_connector(options, clock), clock))
        return nodes[-1]

    yield open_it
    for node in nodes:
        node.connector.close()


def write(tmp_path: Path, name: str, offset: int, data: bytes) -> None:
    (path,) = (tmp_path / "store").glob(f"*/{name}")
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def slot_of(tmp_path: Path, block_hash: bytes) -> int:
    (path,) = (tmp_path / "store").glob("*/index")
    records = path.read_bytes()[RECORDS_OFFSET:]
    return records.index(block_hash) // RECORD_BYTES


def check_works(node: Node) -> None:
    """New blocks can be stored, at most a few pauses later."""
    for seed in range(50, 55):
        node.clock.offset_s += 5.0
        node.lookup(chain(seed, 6))
        if node.save(chain(seed, 6)).outcome is TransferOutcome.OK and node.load(chain(seed, 6)).num_blocks_ok == 6:
            return
    raise AssertionError("the store does not come back")


@pytest.mark.parametrize("value", [0, 1, 2**61, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("word", [0, 2, 3, 4, 5, 6, 7, 8, 9, 10])
def test_index_with_any_word_of_its_header_changed_serves_again(
    tmp_path: Path, open_node: OpenNode, word: int, value: int
) -> None:
    node, other = open_node(), open_node()
    assert node.save(chain(1, 6)).outcome is TransferOutcome.OK
    write(tmp_path, "index", 8 * word, struct.pack("<Q", value))
    for user in (node, other):
        user.lookup(chain(1, 6))
        user.load(chain(1, 6))  # compared byte by byte
        check_works(user)
    node.connector.close()
    other.connector.close()
    write(tmp_path, "index", 8 * word, struct.pack("<Q", value))
    check_works(open_node())


@pytest.mark.parametrize("byte", [b"\x00", b"\xff", b"\x5a"])
@pytest.mark.parametrize("part", ["ring", "records"])
def test_index_with_all_of_a_part_overwritten_serves_again(tmp_path: Path, open_node: OpenNode, part: str, byte: bytes) -> None:
    node, other = open_node(), open_node()
    node.save(chain(1, 12))
    start, size = (4096, 4 * NUM_RECENT_CHANGES) if part == "ring" else (RECORDS_OFFSET, NUM_BLOCKS * RECORD_BYTES)
    write(tmp_path, "index", start, byte * size)
    for user in (other, node):
        user.lookup(chain(1, 12))
        check_works(user)


def test_block_whose_record_and_bytes_are_both_damaged_can_be_stored_again(tmp_path: Path, open_node: OpenNode) -> None:
    node = open_node()
    hashes = chain(1, 6)
    node.save(hashes)
    slot = slot_of(tmp_path, hashes[2])
    write(tmp_path, "index", RECORDS_OFFSET + slot * RECORD_BYTES + 8 * CHECKSUM, b"\xff" * 8)
    write(tmp_path, "segment", slot * slot_bytes(LAYOUT) + HEADER_PAGE_BYTES, b"damage")
    assert node.load(hashes).num_blocks_ok == 2
    assert node.lookup(hashes) == 2
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 6


def test_change_that_never_arrives_does_not_keep_lookups_undecided(tmp_path: Path, open_node: OpenNode) -> None:
    node, other = open_node(), open_node()
    other.lookup(chain(1, 4))
    node.save(chain(1, 4))
    slot = slot_of(tmp_path, chain(1, 4)[3])
    write(tmp_path, "index", RECORDS_OFFSET + slot * RECORD_BYTES + 8 * SEQUENCE, bytes(8))
    assert other.lookup(chain(1, 4)) == 3  # waits as long as the answer is None


def test_record_with_a_last_use_from_the_far_future_does_not_stop_the_clock(tmp_path: Path, open_node: OpenNode) -> None:
    node = open_node()
    node.save(chain(1, 4))
    node.connector.close()
    slot = slot_of(tmp_path, chain(1, 4)[0])
    write(tmp_path, "index", RECORDS_OFFSET + slot * RECORD_BYTES + 8 * LAST_USE, b"\xff" * 8)
    reopened = open_node()
    assert reopened.load(chain(1, 4)).num_blocks_ok == 4
    check_works(reopened)


def test_records_that_became_zeros_are_found_to_be_free(tmp_path: Path, open_node: OpenNode) -> None:
    node = open_node()
    node.save(chain(1, NUM_BLOCKS))
    write(tmp_path, "index", RECORDS_OFFSET, bytes(NUM_BLOCKS * RECORD_BYTES))
    check_works(node)


def test_slots_in_states_that_do_not_exist_are_taken_back_when_room_is_needed(tmp_path: Path, open_node: OpenNode) -> None:
    node = open_node()
    node.save(chain(1, NUM_BLOCKS))
    for slot in range(NUM_BLOCKS):
        write(tmp_path, "index", RECORDS_OFFSET + slot * RECORD_BYTES + 8 * STATE_AND_OWNER, struct.pack("<Q", 77))
    check_works(node)
