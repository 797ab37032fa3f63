"""What a directory answers to who looks into its stores, without a Ray: pages, and removal of what was listed."""

from __future__ import annotations

import json
import time

import pytest

from connectors.contract.node import LAYOUT, chain
from connectors.ray.index import StoreIndex
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
NUM_BLOCKS = 1000  # of a chain


def filled_index(num_chains: int) -> StoreIndex:
    index = StoreIndex(2**40, LAYOUT.block_bytes, 2**30)
    index.add_slab(None, 0, num_chains * NUM_BLOCKS + 10)
    for seed in range(num_chains):
        put(index, chain(seed, NUM_BLOCKS))
    return index


def put(index: StoreIndex, names: list[bytes]) -> int:
    """The number of the first."""
    index.commit(names, index.take(len(names)), [HEADER] * len(names))
    index.touch(names)
    place = index.find(names[0])
    assert place is not None
    return place.number


def listed_by(index: StoreIndex) -> tuple[list[tuple[bytes, int, int, float]], int]:
    """All entries, and the number of pages."""
    names: list[bytes] = []
    entries: list[tuple[bytes, int, int, float]] = []
    first = num_pages = 0
    while True:
        page = list_page(index, names, pack_first(first))
        first, count = PAGE_HEAD.unpack_from(page)
        found = list(LISTED_BLOCK.iter_unpack(page[PAGE_HEAD.size :]))
        assert len(found) == count
        entries += found
        num_pages += 1
        if not first:
            return entries, num_pages


def test_list_of_a_large_store_comes_in_pages_in_the_order_of_eviction() -> None:
    index = filled_index(20)
    index.touch(chain(3, NUM_BLOCKS))
    entries, num_pages = listed_by(index)
    assert 1 < num_pages < 20 and len(entries) == 20 * NUM_BLOCKS
    in_order = [name for name, _, _, _ in sorted(entries, key=lambda entry: entry[2])]
    assert in_order[:NUM_BLOCKS] == chain(0, NUM_BLOCKS)[::-1]
    assert in_order[-NUM_BLOCKS:] == chain(3, NUM_BLOCKS)[::-1]
    assert all(abs(used_s - time.time()) < 300 for _, _, _, used_s in entries)


def test_list_that_others_change_meanwhile_has_what_is_still_there() -> None:
    index = filled_index(20)
    names: list[bytes] = []
    first, _count = PAGE_HEAD.unpack_from(list_page(index, names, pack_first(0)))
    for seed in range(20):
        index.forget(chain(seed, NUM_BLOCKS))
    assert PAGE_HEAD.unpack_from(list_page(index, names, pack_first(first)))[1] == 0
    assert listed_by(index) == ([], 1)


def test_remove_takes_what_was_listed_and_leaves_what_came_after() -> None:
    index = filled_index(0)
    names = chain(1, 3)
    number = put(index, names)
    assert remove_listed(index, pack_numbered(names[0], number) + pack_numbered(chain(2, 1)[0], number)) == b"\1\0"
    again = put(index, names[:1])
    assert remove_listed(index, pack_numbered(names[0], number)) == b"\0"
    assert index.find(names[0]) is not None and again != number
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
