"""What a directory answers to who looks into its stores, without a Ray: pages, and removal of what was listed."""

from __future__ import annotations

import json
import time

import pytest

from connectors.contract.node import LAYOUT, chain
from connectors.ray.index import StoredObject, StoreIndex
from connectors.ray.visits import (
    LISTED_BLOCK,
    PAGE_HEAD,
    describe_stores,
    list_page,
    pack_first,
    pack_numbered,
    remove_listed,
)
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConnectorError

HEADER = bytes(BLOCK_HEADER_BYTES)
BLOCKS_PER_OBJECT = 1000


def filled_index(num_objects: int) -> StoreIndex:
    index = StoreIndex(2**40, LAYOUT.block_bytes)
    for seed in range(num_objects):
        put(index, chain(seed, BLOCKS_PER_OBJECT))
    return index


def put(index: StoreIndex, names: list[bytes]) -> StoredObject:
    assert index.reserve(len(names), (), 2**40) == len(names)
    stored = StoredObject(None, list(range(len(names))), len(names) * index.bytes_per_block, num_pins=1)
    index.add_object(stored)
    index.commit(stored, 0, names, [HEADER] * len(names))
    return stored


def listed_by(index: StoreIndex) -> tuple[list[tuple[bytes, int, int, float]], int]:
    """All entries, and the number of pages."""
    objects: list[StoredObject] = []
    entries: list[tuple[bytes, int, int, float]] = []
    first = num_pages = 0
    while True:
        page = list_page(index, objects, pack_first(first))
        first, count = PAGE_HEAD.unpack_from(page)
        found = list(LISTED_BLOCK.iter_unpack(page[PAGE_HEAD.size :]))
        assert len(found) == count
        entries += found
        num_pages += 1
        if not first:
            return entries, num_pages


def test_list_of_a_large_store_comes_in_pages_in_the_order_of_eviction() -> None:
    index = filled_index(20)
    index.touch(chain(3, 1))
    entries, num_pages = listed_by(index)
    assert 1 < num_pages < 20 and len(entries) == 20 * BLOCKS_PER_OBJECT
    in_order = [name for name, _, _, _ in sorted(entries, key=lambda entry: entry[2])]
    assert in_order[:BLOCKS_PER_OBJECT] == chain(0, BLOCKS_PER_OBJECT)[::-1]
    assert in_order[-BLOCKS_PER_OBJECT:] == chain(3, BLOCKS_PER_OBJECT)[::-1]
    assert all(abs(used_s - time.time()) < 300 for _, _, _, used_s in entries)


def test_list_that_others_change_meanwhile_has_what_is_still_there() -> None:
    index = filled_index(20)
    objects: list[StoredObject] = []
    first, _count = PAGE_HEAD.unpack_from(list_page(index, objects, pack_first(0)))
    index.clear()
    assert PAGE_HEAD.unpack_from(list_page(index, objects, pack_first(first))) == (0, 0)
    assert listed_by(index) == ([], 1)


def test_remove_takes_what_was_listed_and_leaves_what_came_after() -> None:
    index = StoreIndex(2**30, LAYOUT.block_bytes)
    names = chain(1, 3)
    stored = put(index, names)
    assert remove_listed(index, pack_numbered(names[0], stored.number) + pack_numbered(chain(2, 1)[0], stored.number)) == b"\1\0"
    again = put(index, names[:1])
    assert remove_listed(index, pack_numbered(names[0], stored.number)) == b"\0"
    assert index.find(names[0]) is not None and again.number != stored.number
    with pytest.raises(ConnectorError, match="wrong length"):
        remove_listed(index, names[0])


def test_stores_are_described_by_namespace() -> None:
    key = f"mine/{LAYOUT.fingerprint.hex()}"
    indexes = {key: filled_index(1), "mine-too/00": filled_index(1)}
    assert json.loads(describe_stores(indexes, b"mine")) == [
        {"layout": LAYOUT.fingerprint.hex(), "block_bytes": LAYOUT.block_bytes}
    ]
    with pytest.raises(ConnectorError, match="namespace"):
        describe_stores(indexes, b"\xff")
