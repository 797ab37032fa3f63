"""Objects of several blocks within a budget: what is found, what goes first, and that nothing in use goes."""

from __future__ import annotations

import random

from connectors.ray.index import StoredObject, StoreIndex
from connectors.stored_block import BLOCK_HEADER_BYTES

BLOCK_BYTES = 1000
ROOM = 2**40


def names_of(seed: int, count: int) -> list[bytes]:
    return [bytes([seed, position]) * 8 for position in range(count)]


def save(index: StoreIndex, names: list[bytes], kept: list[bytes] | None = None, max_bytes: int = ROOM) -> int:
    """Store names as one object, as far as there is room; how many."""
    granted = index.reserve(len(names), [*(kept or []), *names], max_bytes)
    if granted:
        stored = StoredObject("handle", range(granted), granted * index.bytes_per_block, num_pins=1)
        index.add_object(stored)
        index.commit(stored, 0, names[:granted], [b"header"] * granted)
    return granted


def make_index(num_blocks: int) -> StoreIndex:
    return StoreIndex(num_blocks * (BLOCK_BYTES + BLOCK_HEADER_BYTES), BLOCK_BYTES)


def test_ray_index_saved_blocks_are_found_at_their_place() -> None:
    index = make_index(10)
    names = names_of(1, 4)
    assert save(index, names) == 4
    assert [place.offset for name in names if (place := index.find(name))] == [0, 1, 2, 3]
    assert index.find(names_of(2, 1)[0]) is None
    assert (index.status().num_blocks, index.status().num_bytes) == (4, 4 * index.bytes_per_block)


def test_ray_index_full_drops_the_least_recently_used_object() -> None:
    index = make_index(12)
    for seed in range(3):
        save(index, names_of(seed, 4))
    index.touch(names_of(0, 4))
    assert save(index, names_of(3, 4)) == 4
    assert [index.find(names_of(seed, 1)[0]) is not None for seed in range(4)] == [True, False, True, True]
    assert [stored.num_bytes for stored in index.dropped] == [4 * index.bytes_per_block]
    assert index.status().num_evicted == 4


def test_ray_index_prefix_in_several_objects_loses_its_tail_first() -> None:
    index = make_index(12)
    chain = names_of(1, 12)
    for start in (0, 4, 8):
        save(index, chain[start : start + 4], chain[:start])
        index.touch(chain[: start + 4])
    save(index, names_of(2, 4))
    assert [index.find(name) is not None for name in chain] == [True] * 8 + [False] * 4


def test_ray_index_full_of_a_prefix_does_not_drop_it_for_its_own_tail() -> None:
    index = make_index(8)
    chain = names_of(1, 12)
    save(index, chain[:8])
    assert save(index, chain[8:], chain[:8]) == 0
    assert all(index.find(name) for name in chain[:8])


def test_ray_index_object_in_use_is_not_dropped_and_goes_when_it_is_released() -> None:
    index = make_index(4)
    save(index, names_of(1, 4))
    place = index.find(names_of(1, 1)[0])
    assert place is not None
    place.stored.num_pins += 1
    assert save(index, names_of(2, 4)) == 0
    index.forget(names_of(1, 4))
    assert not index.dropped
    index.unpin(place.stored)
    assert index.dropped == [place.stored]
    assert save(index, names_of(2, 4)) == 4


def test_ray_index_block_that_two_write_is_kept_once() -> None:
    index = make_index(8)
    save(index, names_of(1, 4))
    save(index, names_of(1, 4))
    assert index.status().num_blocks == 4
    assert index.status().num_bytes == 4 * index.bytes_per_block
    assert len(index.dropped) == 1


def test_ray_index_room_shared_with_other_stores_bounds_a_save() -> None:
    index = make_index(100)
    assert save(index, names_of(1, 4), max_bytes=2 * index.bytes_per_block) == 2
    assert save(index, names_of(2, 4), max_bytes=0) == 2  # of its own it may evict


def test_ray_index_any_history_keeps_its_books() -> None:
    rng = random.Random(5)
    index = make_index(40)
    for _ in range(2000):
        chain = names_of(rng.randrange(8), 20)
        start, count = rng.randrange(16), rng.randrange(1, 5)
        if rng.random() < 0.6:
            save(index, chain[start : start + count], chain[:start])
        elif rng.random() < 0.5:
            index.forget(chain[start : start + count])
        else:
            index.touch(chain[: start + count])
        status = index.status()
        assert status.num_bytes <= status.capacity_bytes
        places = [place for seed in range(8) for name in names_of(seed, 20) if (place := index.find(name))]
        assert len(places) == status.num_blocks
        assert sum(stored.num_bytes for stored in {place.stored for place in places}) == status.num_bytes
        assert all(stored.num_pins == 0 and not stored.names for stored in index.dropped)
