"""What a directory answers to who looks into its stores, without a Ray: pages, and removal of what was listed."""

from __future__ import annotations

import json
import socket
import time

import pytest

from connectors.contract.node import LAYOUT, chain
from connectors.ray.index import Place, StoreIndex
from connectors.ray.messages import ABSENT, LOCATED_BLOCK, FrameStream
from connectors.ray.sessions import OpenStore, Session, parse_hello
from connectors.ray.visits import (
    LISTED_BLOCK,
    PAGE_HEAD,
    describe_stores,
    inspect,
    list_page,
    pack_first,
    pack_numbered,
    remove_listed,
)
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConnectorError

HEADER = bytes(BLOCK_HEADER_BYTES)
BLOCKS_PER_CHAIN = 1000


def filled_index(num_chains: int) -> StoreIndex:
    index = StoreIndex(2**40, LAYOUT.block_bytes, 2**40)
    index.add_slab(None, 0, num_chains * BLOCKS_PER_CHAIN)
    for seed in range(num_chains):
        put(index, chain(seed, BLOCKS_PER_CHAIN))
    return index


def put(index: StoreIndex, names: list[bytes]) -> None:
    offsets = index.take(len(names))
    index.commit(names, offsets, [HEADER] * len(offsets))


def listed_by(index: StoreIndex) -> tuple[list[tuple[bytes, int, int, int, float]], int]:
    """All entries, and the number of pages."""
    listed: list[bytes] = []
    entries: list[tuple[bytes, int, int, int, float]] = []
    first = num_pages = 0
    while True:
        page = list_page(index, listed, pack_first(first))
        first, count = PAGE_HEAD.unpack_from(page)
        found = list(LISTED_BLOCK.iter_unpack(page[PAGE_HEAD.size :]))
        assert len(found) == count
        entries += found
        num_pages += 1
        if not first:
            return entries, num_pages


def test_list_of_a_large_store_comes_in_pages_in_the_order_of_eviction() -> None:
    index = filled_index(20)
    index.touch(chain(3, 3))
    entries, num_pages = listed_by(index)
    assert 1 < num_pages < 20 and len(entries) == 20 * BLOCKS_PER_CHAIN
    in_order = [name for name, _, _, _, _ in sorted(entries, key=lambda entry: entry[3])]
    assert in_order[:BLOCKS_PER_CHAIN] == chain(0, BLOCKS_PER_CHAIN)[::-1]
    assert in_order[-4:] == [chain(19, 1)[0], *chain(3, 3)[::-1]]
    index.evict(BLOCKS_PER_CHAIN, ())
    assert {name for name, _, _, _, _ in listed_by(index)[0]} == set(in_order[BLOCKS_PER_CHAIN:])
    assert all(abs(used_s - time.time()) < 300 for _, _, _, _, used_s in entries)


def test_list_tells_when_each_block_was_used() -> None:
    index = filled_index(1)
    before = {name: used_s for name, _, _, _, used_s in listed_by(index)[0]}
    time.sleep(0.002)
    index.touch(chain(0, 3))
    after = {name: used_s for name, _, _, _, used_s in listed_by(index)[0]}
    assert {name for name in before if after[name] > before[name]} == set(chain(0, 3))


def test_list_that_others_change_meanwhile_has_what_is_still_there() -> None:
    index = filled_index(20)
    listed: list[bytes] = []
    first, _count = PAGE_HEAD.unpack_from(list_page(index, listed, pack_first(0)))
    index.end()
    while first:
        first, count = PAGE_HEAD.unpack_from(list_page(index, listed, pack_first(first)))
        assert count == 0
    assert listed_by(index) == ([], 1)


def test_remove_takes_what_was_listed_and_leaves_what_came_after() -> None:
    index = filled_index(1)
    entries = {name: (number, offset) for name, number, offset, _, _ in listed_by(index)[0]}
    first, second = chain(0, 2)
    number, offset = entries[first]
    assert remove_listed(index, pack_numbered(first, number) + pack_numbered(chain(2, 1)[0], number)) == b"\1\0"
    put(index, [first])
    again = index.find(first)
    assert again is not None and again.offset == offset  # in the same slot
    assert remove_listed(index, pack_numbered(first, number) + pack_numbered(second, entries[second][0])) == b"\0\1"
    assert index.find(first) is again and index.find(second) is None
    with pytest.raises(ConnectorError, match="wrong length"):
        remove_listed(index, first)


def test_inspect_keeps_slots_while_they_are_copied_and_is_no_use() -> None:
    index = filled_index(1)
    name, last, absent = chain(0, 1)[0], chain(0, BLOCKS_PER_CHAIN)[-1], chain(1, 1)[0]
    pins: list[Place] = []
    answer = list(LOCATED_BLOCK.iter_unpack(inspect(index, pins, last + absent + name)))
    assert [offset == ABSENT for offset, _ in answer] == [False, True, False]
    assert index.names() == chain(0, BLOCKS_PER_CHAIN)[::-1]
    index.forget([last, name])
    assert index.num_free == 0
    for place in pins:
        index.unpin(place)
    assert sorted(index.take(2)) == sorted([answer[0][0], answer[2][0]])


def test_store_ends_without_users_but_not_under_a_visitor_that_copies() -> None:
    numbers = dict.fromkeys(("block_bytes", "stride_bytes", "num_blocks", "capacity_bytes", "object_bytes"), 1)
    hello = {**numbers, "namespace": "n", "layout": "00", "linger_s": 1, "op_timeout_s": 1}
    store = OpenStore(filled_index(1), linger_s=1.0)
    later_s = time.monotonic() + 100.0
    with socket.socketpair()[0] as connected:
        stream = FrameStream(connected, 1.0)
        engine = Session(stream, parse_hello(json.dumps(hello).encode()), store, None)
        visitor = Session(stream, parse_hello(json.dumps({**hello, "visitor": True}).encode()), store, None)
        engine.join()
        assert not store.is_unused(later_s)
        visitor.join()
        engine.leave()
        assert store.is_unused(later_s)
        inspect(store.index, visitor.pins, chain(0, 1)[0])
        assert not store.is_unused(later_s)
        visitor.leave()
        assert store.is_unused(later_s) and not store.visitors


def test_stores_are_described_by_namespace() -> None:
    key = f"mine/{LAYOUT.fingerprint.hex()}"
    indexes = {key: filled_index(1), "mine-too/00": filled_index(1)}
    assert json.loads(describe_stores(indexes, b"mine")) == [
        {"layout": LAYOUT.fingerprint.hex(), "block_bytes": LAYOUT.block_bytes}
    ]
    with pytest.raises(ConnectorError, match="namespace"):
        describe_stores(indexes, b"\xff")
