"""Blocks in slots within a budget: what is found, what goes first, and that nothing in use goes."""

from __future__ import annotations

import random

from connectors.ray.index import StoreIndex
from connectors.stored_block import BLOCK_HEADER_BYTES

BLOCK_BYTES = 1000
SLOT_BYTES = 1024
OBJECT_SLOTS = 4
ROOM = 2**40


def names_of(seed: int, count: int) -> list[bytes]:
    return [bytes([seed, position]) * 8 for position in range(count)]


def make_index(num_blocks: int) -> StoreIndex:
    """Of so many slots, in slabs at gaps."""
    index = StoreIndex(num_blocks * (BLOCK_BYTES + BLOCK_HEADER_BYTES), BLOCK_BYTES, OBJECT_SLOTS * SLOT_BYTES)
    offset = 0
    while num_slots := index.next_slab_slots(ROOM):
        index.add_slab("handle", offset, num_slots)
        offset += (num_slots + 1) * SLOT_BYTES
    return index


def save(index: StoreIndex, names: list[bytes], chain: list[bytes] | None = None) -> int:
    """Store names, as far as there is room; how many. chain: the prefix that they end."""
    chain = chain or names
    new = [name for name in names if not index.find(name)]
    index.evict(len(new) - index.num_free, chain)
    offsets = index.take(len(new))
    index.commit(new[: len(offsets)], offsets, [b"header"] * len(offsets))
    index.touch(chain)
    return len(offsets)


def are_stored(index: StoreIndex, names: list[bytes]) -> list[bool]:
    return [index.find(name) is not None for name in names]


def test_ray_index_saved_blocks_are_found_in_neighbouring_slots() -> None:
    index = make_index(8)
    names = names_of(1, 4)
    assert save(index, names) == 4
    offsets = [place.offset for name in names if (place := index.find(name))]
    assert offsets == [offsets[0] + number * SLOT_BYTES for number in range(4)]
    assert index.find(names_of(2, 1)[0]) is None
    assert (index.status().num_blocks, index.status().num_bytes) == (4, 4 * index.bytes_per_block)


def test_ray_index_grows_by_objects_up_to_its_budget_and_what_is_left_for_it() -> None:
    index = StoreIndex(10 * (BLOCK_BYTES + BLOCK_HEADER_BYTES), BLOCK_BYTES, OBJECT_SLOTS * SLOT_BYTES)
    assert index.next_slab_slots(2 * index.bytes_per_block) == 2
    for number, count in enumerate((4, 4, 2)):
        assert index.next_slab_slots(ROOM) == count
        index.add_slab("handle", number * 2**20, count)
    assert index.next_slab_slots(ROOM) == 0
    assert len(set(index.take(20))) == 10


def test_ray_index_small_store_begins_with_a_small_object() -> None:
    index = StoreIndex(2**30, 2**20 - BLOCK_HEADER_BYTES, 2**25)
    assert index.next_slab_slots(ROOM) == 4
    index.add_slab("handle", 0, 4)
    assert not index.is_short_of_slots
    index.take(3)
    assert index.is_short_of_slots
    assert index.next_slab_slots(ROOM) == 4


def test_ray_index_full_drops_the_least_recently_used_blocks() -> None:
    index = make_index(12)
    for seed in range(3):
        save(index, names_of(seed, 4))
    index.touch(names_of(0, 4))
    assert save(index, names_of(3, 4)) == 4
    assert [index.find(names_of(seed, 1)[0]) is not None for seed in range(4)] == [True, False, True, True]
    assert index.status().num_evicted == 4


def test_ray_index_prefix_loses_its_tail_first() -> None:
    index = make_index(12)
    chain = names_of(1, 12)
    for start in (0, 4, 8):
        save(index, chain[start : start + 4], chain[: start + 4])
    save(index, names_of(2, 3))
    assert are_stored(index, chain) == [True] * 9 + [False] * 3


def test_ray_index_full_of_a_prefix_does_not_drop_it_for_its_own_tail() -> None:
    index = make_index(8)
    chain = names_of(1, 12)
    save(index, chain[:8])
    assert save(index, chain[8:], chain) == 0
    assert all(are_stored(index, chain[:8]))


def test_ray_index_block_in_use_is_not_dropped_and_its_slot_is_free_when_it_is_released() -> None:
    index = make_index(4)
    save(index, names_of(1, 4))
    place = index.find(names_of(1, 1)[0])
    assert place is not None
    place.num_pins += 1
    assert save(index, names_of(2, 4)) == 3
    index.forget(names_of(1, 1))
    assert index.take(1) == []
    index.unpin(place)
    assert index.take(1) == [place.offset]


def test_ray_index_block_that_two_write_is_kept_once() -> None:
    index = make_index(8)
    names = names_of(1, 4)
    first, second = index.take(4), index.take(4)
    index.commit(names, first, [b"first"] * 4)
    index.commit(names, second, [b"second"] * 4)
    assert [place.header for name in names if (place := index.find(name))] == [b"first"] * 4
    assert sorted(index.take(8)) == second


def test_ray_index_that_has_ended_holds_nothing_and_does_not_grow() -> None:
    index = make_index(8)
    save(index, names_of(1, 4))
    assert index.end() == ["handle", "handle"]
    assert (index.status().num_blocks, index.num_free, index.num_bytes, index.next_slab_slots(ROOM)) == (0, 0, 0, 0)


def test_ray_index_any_history_keeps_its_books() -> None:
    rng = random.Random(5)
    index = make_index(40)
    pinned = []
    for _ in range(2000):
        chain = names_of(rng.randrange(8), 20)
        start, count = rng.randrange(16), rng.randrange(1, 5)
        if rng.random() < 0.6:
            save(index, chain[start : start + count], chain[: start + count])
        elif rng.random() < 0.5:
            index.forget(chain[start : start + count])
        elif (place := index.find(chain[start])) and len(pinned) < 5:
            place.num_pins += 1
            pinned.append(place)
        elif pinned:
            index.unpin(pinned.pop(0))
        places = [place for seed in range(8) for name in names_of(seed, 20) if (place := index.find(name))]
        assert len(places) == index.status().num_blocks
        used = {place.offset for place in places} | {place.offset for place in pinned}
        assert len({place.offset for place in places}) == len(places)
        assert len(used) + index.num_free == 40
