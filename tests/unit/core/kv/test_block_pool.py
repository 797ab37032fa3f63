"""Reference counts, the prefix index and the order of reuse."""

from __future__ import annotations

import random

from core.kv.block_pool import BlockPool


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_block_pool_full_declines_allocation_and_changes_nothing() -> None:
    pool = BlockPool(4)
    held = pool.try_allocate(3)
    assert held is not None
    assert pool.try_allocate(2) is None
    assert pool.num_free == 1
    assert [pool.ref_count(block_id) for block_id in held] == [1, 1, 1]


def test_block_pool_unhashed_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = pool.try_allocate(2) or []
    for index, block_id in enumerate(cached):
        pool.set_hash(block_id, _hash(index))
    pool.release_references(reversed(cached))
    assert set(pool.try_allocate(2) or []).isdisjoint(cached)
    assert pool.find_longest_prefix([_hash(0), _hash(1)], 9) == cached


def test_block_pool_evicts_tail_of_prefix_before_its_head() -> None:
    pool = BlockPool(3)
    table = pool.try_allocate(3) or []
    for index, block_id in enumerate(table):
        pool.set_hash(block_id, _hash(index))
    pool.release_references(reversed(table))
    assert pool.try_allocate(1) == [table[2]]
    assert pool.find_longest_prefix([_hash(index) for index in range(3)], 9) == table[:2]


def test_block_pool_hit_on_free_block_leaves_the_free_list() -> None:
    pool = BlockPool(3)
    table = pool.try_allocate(3) or []
    for index, block_id in enumerate(table):
        pool.set_hash(block_id, _hash(index))
    pool.release_references(reversed(table))
    pool.add_references(table[1:2])
    assert pool.num_free == 2
    assert table[1] not in (pool.try_allocate(2) or [])


def test_block_pool_recycled_block_has_no_hash() -> None:
    pool = BlockPool(1)
    (block_id,) = pool.try_allocate(1) or []
    pool.set_hash(block_id, _hash(1))
    pool.release_references([block_id])
    pool.try_allocate(1)
    assert pool.block_hash(block_id) is None
    assert pool.find_longest_prefix([_hash(1)], 1) == []
    assert pool.num_evictions == 1


def test_block_pool_two_blocks_with_one_hash_stay_findable_until_both_are_gone() -> None:
    for first_evicted in (0, 1):
        pool = BlockPool(2)
        table = pool.try_allocate(2) or []
        for block_id in table:
            pool.set_hash(block_id, _hash(7))
        order = [table[first_evicted], table[1 - first_evicted]]
        pool.release_references(order)
        assert pool.try_allocate(1) == [order[0]]
        assert pool.find_longest_prefix([_hash(7)], 1) == [order[1]]
        assert pool.try_allocate(1) == [order[1]]
        assert pool.find_longest_prefix([_hash(7)], 1) == []


def test_block_pool_reset_declines_while_in_use() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.try_allocate(1) or []
    pool.set_hash(block_id, _hash(1))
    assert pool.try_reset_hashes() is False
    assert pool.find_longest_prefix([_hash(1)], 1) == [block_id]
    pool.release_references([block_id])
    assert pool.try_reset_hashes() is True
    assert (pool.find_longest_prefix([_hash(1)], 1), pool.num_free) == ([], 2)


class _PlainPool:
    """The oracle: everything by brute force."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.free_order: list[int] = []  # hashed free blocks, least recently used first

    def has(self, block_hash: bytes) -> bool:
        return block_hash in self.hashes


def test_block_pool_random_operations_match_a_plain_model() -> None:
    rng = random.Random(1)
    for _ in range(30):
        num_blocks = rng.randrange(1, 12)
        pool, plain = BlockPool(num_blocks), _PlainPool(num_blocks)
        held: list[int] = []
        for _ in range(300):
            action = rng.random()
            if action < 0.4:
                count = rng.randrange(1, 4)
                got = pool.try_allocate(count)
                num_free = plain.refs.count(0)
                assert (got is None) == (count > num_free)
                for block_id in got or []:
                    assert plain.refs[block_id] == 0
                    if plain.hashes[block_id] is not None:
                        unhashed_free = [b for b in range(num_blocks) if plain.refs[b] == 0 and plain.hashes[b] is None]
                        assert not unhashed_free and plain.free_order[0] == block_id
                        plain.free_order.pop(0)
                    plain.hashes[block_id] = None
                    plain.refs[block_id] = 1
                held += got or []
            elif action < 0.6 and held:
                block_id = rng.choice(held)
                if plain.hashes[block_id] is None:
                    block_hash = _hash(rng.randrange(6))
                    pool.set_hash(block_id, block_hash)
                    plain.hashes[block_id] = block_hash
            elif action < 0.8 and held:
                block_id = held.pop(rng.randrange(len(held)))
                pool.release_references([block_id])
                plain.refs[block_id] -= 1
                if plain.refs[block_id] == 0 and plain.hashes[block_id] is not None:
                    plain.free_order.append(block_id)
            else:
                block_hash = _hash(rng.randrange(6))
                hit = pool.find_longest_prefix([block_hash], 1)
                assert bool(hit) == plain.has(block_hash)
                if hit:
                    assert plain.hashes[hit[0]] == block_hash
                    pool.add_references(hit)
                    if plain.refs[hit[0]] == 0:
                        plain.free_order.remove(hit[0])
                    plain.refs[hit[0]] += 1
                    held.append(hit[0])
            assert [pool.ref_count(block_id) for block_id in range(num_blocks)] == plain.refs
            assert pool.num_free == plain.refs.count(0)
