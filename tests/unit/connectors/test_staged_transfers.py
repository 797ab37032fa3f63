"""The worker's half of a plugin, over a store in a dict whose completions the test controls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from connectors.contract.node import LAYOUT, SteppedClock, chain, content_of, wait_until
from connectors.vllm.staged_transfers import BlockMove, StagedTransfers, Verdict
from core.kv.connector import TransferOutcome
from core.kv.pool_memory import KVPoolMemory
from tests.support.memory_connector import MemoryConnector, MemoryStore

NUM_SLOTS = 8
LOAD_TIMEOUT_S = 10.0


class Worker:
    """An engine's memory of 32 blocks, and the transfers between it and a store."""

    def __init__(self, store: MemoryStore, is_immediate: bool = True) -> None:
        self.clock = SteppedClock()
        self.connector = MemoryConnector(store, is_immediate=is_immediate)
        self.pool = KVPoolMemory(LAYOUT, NUM_SLOTS)
        self.blocks = [bytes(LAYOUT.block_bytes)] * 32
        self.transfers = StagedTransfers(
            self.connector,
            self.pool,
            self._copy_in,
            self._copy_out,
            self.clock,
            load_timeout_s=LOAD_TIMEOUT_S,
            save_timeout_s=LOAD_TIMEOUT_S,
        )
        self.ended: set[str] = set()
        self.failed: set[int] = set()

    def _copy_in(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.pool.block(slot)[:] = self.blocks[block_id]

    def _copy_out(self, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        for block_id, slot in zip(block_ids, slots, strict=True):
            self.blocks[block_id] = bytes(self.pool.block(slot))

    def fill(self, block_hashes: Sequence[bytes]) -> None:
        for block_id, block_hash in enumerate(block_hashes):
            self.blocks[block_id] = content_of(block_hash)

    def save(self, block_hashes: Sequence[bytes], request_id: str = "r") -> bool:
        return self.transfers.try_save(BlockMove(request_id, tuple(range(len(block_hashes))), tuple(block_hashes)))

    def load(self, block_hashes: Sequence[bytes], request_id: str = "l") -> None:
        ids = tuple(range(16, 16 + len(block_hashes)))
        self.transfers.start_load(BlockMove(request_id, ids, tuple(block_hashes), ancestors=tuple(chain(9, 2))))

    def has_ended(self, request_id: str) -> bool:
        news = self.transfers.poll_loads()
        self.ended |= news.ended_request_ids
        self.failed |= news.failed_block_ids
        return request_id in self.ended

    def is_started(self, num_transfers: int) -> bool:
        return len(self.connector.started) >= num_transfers

    def complete(self, transfer_id: int, outcome: TransferOutcome = TransferOutcome.OK, num_ok: int | None = None) -> None:
        self.connector.complete(transfer_id, outcome, num_ok)
        assert self.connector.on_result is not None
        self.connector.on_result()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    opened: list[Worker] = []
    yield opened
    for worker in opened:
        worker.transfers.close(0.0)
        assert not worker.transfers._thread.is_alive()


def open_worker(workers: list[Worker], store: MemoryStore | None = None, is_immediate: bool = True) -> Worker:
    worker = Worker(store or MemoryStore(), is_immediate)
    workers.append(worker)
    return worker


def notify(worker: Worker) -> None:
    assert worker.connector.on_result is not None
    worker.connector.on_result()


def test_blocks_saved_by_one_worker_are_loaded_by_another_in_pieces(workers: list[Worker]) -> None:
    store, names = MemoryStore(), chain(1, 12)
    for name in names:
        store.blocks[name] = content_of(name)
    worker = open_worker(workers, store)
    worker.load(names)  # more than the pool holds
    notify(worker)

    def is_there() -> bool:
        notify(worker)
        return worker.has_ended("l")

    wait_until(is_there)
    assert not worker.failed and [worker.blocks[16 + index] for index in range(12)] == [content_of(name) for name in names]
    assert worker.connector.lookups == ["l"]  # the chain's ancestors, told once


def test_save_copies_at_once_so_that_blocks_may_be_reused(workers: list[Worker]) -> None:
    worker, names = open_worker(workers, is_immediate=False), chain(1, 3)
    worker.fill(names)
    assert worker.save(names)
    worker.fill(chain(2, 3))
    wait_until(lambda: worker.is_started(1))
    worker.complete(1)
    assert all(worker.connector.store.blocks[name] == content_of(name) for name in names)


def test_save_into_a_full_pool_is_dropped_with_what_follows_and_leaves_room_for_loads(workers: list[Worker]) -> None:
    worker, names = open_worker(workers, is_immediate=False), chain(1, 7)
    assert not worker.save(names)
    assert worker.transfers.num_dropped_blocks == 3
    wait_until(lambda: worker.is_started(1))
    assert len(worker.connector.started[0].block_ids) == NUM_SLOTS // 2
    assert not worker.save(chain(2, 1)) and not worker.save(chain(2, 1), "other")
    for name in names:
        worker.connector.store.blocks[name] = content_of(name)
    worker.load(names[:4])
    wait_until(lambda: worker.is_started(2))
    worker.complete(1)
    worker.complete(2)
    wait_until(lambda: worker.has_ended("l"))
    wait_until(lambda: worker.save(chain(4, 1), "new"))
    assert not worker.save(chain(3, 1))  # its chain has a hole
    worker.transfers.forget({"r"})
    assert worker.save(chain(3, 1))


@pytest.mark.parametrize("outcome", [TransferOutcome.MISS, TransferOutcome.CORRUPT, TransferOutcome.ERROR])
def test_load_that_fails_names_the_blocks_that_did_not_arrive(workers: list[Worker], outcome: TransferOutcome) -> None:
    worker, names = open_worker(workers, is_immediate=False), chain(1, 4)
    for name in names:
        worker.connector.store.blocks[name] = content_of(name)
    worker.load(names)
    wait_until(lambda: worker.is_started(1))
    worker.complete(1, outcome, 2)
    wait_until(lambda: worker.has_ended("l"))
    assert worker.failed == {18, 19}
    assert worker.blocks[17] == content_of(names[1]) and worker.blocks[18] == bytes(LAYOUT.block_bytes)
    assert worker.transfers.take_verdict() == Verdict(*((0, 1) if outcome is TransferOutcome.ERROR else (1, 0)))
    assert worker.transfers.take_verdict() == Verdict()


def test_load_past_its_deadline_is_over_and_what_arrives_later_touches_nobody(workers: list[Worker]) -> None:
    worker, names = open_worker(workers, is_immediate=False), chain(1, 2)
    for name in names:
        worker.connector.store.blocks[name] = content_of(name)
    worker.load(names)
    wait_until(lambda: worker.is_started(1))
    worker.clock.offset_s += LOAD_TIMEOUT_S + 1
    wait_until(lambda: worker.has_ended("l"))
    assert worker.failed == {16, 17}
    worker.blocks[16] = worker.blocks[17] = b"somebody else's"
    worker.complete(1)
    time.sleep(0.05)
    assert worker.blocks[16] == worker.blocks[17] == b"somebody else's"
    assert worker.transfers.take_verdict().num_faults == 1


@pytest.mark.parametrize("call", ["load", "poll"])
def test_connector_that_raises_costs_a_miss(workers: list[Worker], call: str) -> None:
    worker = open_worker(workers, is_immediate=False)
    worker.connector.fail_calls.add(call)
    worker.load(chain(1, 2))
    wait_until(lambda: not worker.transfers._new_loads)
    worker.clock.offset_s += LOAD_TIMEOUT_S + 1
    wait_until(lambda: worker.has_ended("l"))
    assert worker.failed == {16, 17}


def test_close_waits_for_saves_and_ends_loads(workers: list[Worker]) -> None:
    worker = open_worker(workers, is_immediate=False)
    worker.load(chain(1, 1))
    wait_until(lambda: worker.is_started(1))
    worker.transfers.close(0.0)
    assert worker.has_ended("l") and worker.failed == {16}
    saver, names = open_worker(workers), chain(2, 2)
    saver.fill(names)
    assert saver.save(names)
    saver.transfers.close(30.0)
    assert saver.connector.store.blocks[names[1]] == content_of(names[1])
