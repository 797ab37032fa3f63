"""KV events of a pool and a store: whoever replays them knows exactly what is there."""

from __future__ import annotations

import random

import pytest

from core.kv.block_pool import BlockPool
from core.kv.connector import TransferOutcome
from core.kv.kv_events import MAX_STORE_CHANGES, KVChanges, KVEventLog
from tests.unit.core.kv.test_ledger import HASHES, LedgerBench


def _hash(number: int) -> bytes:
    return number.to_bytes(16, "little")


def _watched(num_blocks: int, max_changes: int = 0) -> tuple[BlockPool, KVEventLog]:
    pool = BlockPool(num_blocks)
    log = pool.event_log = KVEventLog(pool.cached_hashes, max_changes or num_blocks, "store")
    return pool, log


class Reader:
    """Replays what it is told, and believes it."""

    def __init__(self) -> None:
        self.pool: set[bytes] = set()
        self.store: set[bytes] = set()
        self.num_starts = 0

    def take(self, told: KVChanges | None) -> None:
        if told is None:
            return
        if told.starts_over:
            self.num_starts += 1
            self.pool.clear()
        for change in told.changes:
            known = self.store if change.medium else self.pool
            if change.is_stored:
                known.update(change.block_hashes)
            else:
                known.difference_update(change.block_hashes)


def _change(pool: BlockPool, rng: random.Random, held: list[list[int]]) -> None:
    """One thing that happens to a pool: blocks are taken, named (maybe as others are), given back, or all is forgotten."""
    action = rng.random()
    if action < 0.5 and (block_ids := pool.try_allocate(rng.randrange(1, 4))):
        for block_id in block_ids:
            if rng.random() < 0.8:
                pool.set_hash(block_id, _hash(rng.randrange(40)))
        held.append(block_ids)
    elif action < 0.97 and held:
        pool.release_references(reversed(held.pop(rng.randrange(len(held)))))
    elif action >= 0.97:
        pool.try_reset_hashes()


@pytest.mark.parametrize("seed", range(40))
def test_kv_events_replayed_are_exactly_what_the_pool_holds(seed: int) -> None:
    rng = random.Random(seed)
    pool, log = _watched(rng.choice((1, 4, 16, 64)))
    reader, held = Reader(), list[list[int]]()
    for _ in range(300):
        _change(pool, rng, held)
        if rng.random() < 0.3:
            reader.take(log.take())
            assert reader.pool == set(pool.cached_hashes())
    assert pool.num_evictions or pool.num_blocks == 64


def test_kv_events_block_that_came_and_went_in_between_is_removed_and_not_stored() -> None:
    pool, log = _watched(1, max_changes=2)
    log.take()
    for number in (1, 2):
        (block_id,) = pool.try_allocate(1) or []
        pool.set_hash(block_id, _hash(number))
        pool.release_references([block_id])
    told = log.take()
    assert told is not None and not told.starts_over
    assert [(change.is_stored, change.block_hashes) for change in told.changes] == [(False, (_hash(1),)), (True, (_hash(2),))]
    assert log.take() is None


def test_kv_events_second_block_with_a_hash_is_told_once_and_removed_with_the_last() -> None:
    pool, log = _watched(2)
    block_ids = pool.try_allocate(2) or []
    for block_id in block_ids:
        pool.set_hash(block_id, _hash(1))
    log.take()
    pool.release_references(block_ids)
    held = pool.try_allocate(1) or []
    assert log.take() is None, "the other one is still there"
    held += pool.try_allocate(1) or []
    told = log.take()
    assert told is not None and [change.block_hashes for change in told.changes] == [(_hash(1),)]


def test_kv_events_more_changes_than_blocks_become_the_whole() -> None:
    pool, log = _watched(2)
    reader = Reader()
    reader.take(log.take())
    for number in range(10):
        (block_id,) = pool.try_allocate(1) or []
        pool.set_hash(block_id, _hash(number))
        pool.release_references([block_id])
    told = log.take()
    assert told is not None and told.starts_over
    reader.take(told)
    assert reader.pool == {_hash(8), _hash(9)}


def test_kv_events_of_the_store_are_saves_that_ended_and_loads_that_missed() -> None:
    bench = LedgerBench()
    log = bench.ledger.event_log = KVEventLog(bench.pool.cached_hashes, 64, "memory")
    reader = Reader()
    bench.end(bench.save(), 3, TransferOutcome.MISS)  # no room for the fourth
    bench.ledger.poll()
    reader.take(log.take())
    assert reader.store == set(HASHES[:3])
    bench.end(bench.load(), 1, TransferOutcome.MISS)
    bench.ledger.poll()
    reader.take(log.take())
    assert reader.store == {HASHES[0], HASHES[2]}, "of what follows the missing one nothing is known"
    assert reader.pool == set(), "the pool has a log of its own"


def test_kv_events_of_the_store_are_bounded() -> None:
    _pool, log = _watched(1)
    for first in range(0, 3 * MAX_STORE_CHANGES, 1024):
        log.note_store((_hash(number) for number in range(first, first + 1024)), is_stored=True)
    assert len(log.store) == MAX_STORE_CHANGES
