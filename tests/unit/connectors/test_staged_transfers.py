"""The worker's half of the vLLM plugin, over a store in a dict whose completions the test controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from connectors.contract.node import LAYOUT, SteppedClock, chain, content_of, wait_until
from connectors.staging.connector import StagedConnector
from connectors.vllm.staged_transfers import BlockMove, StagedTransfers, Verdict
from core.kv.connector import TransferOutcome
from core.kv.pool_memory import KVPoolMemory
from tests.support.host_device import HostDevice
from tests.support.memory_connector import MemoryConnector, MemoryStore

NUM_SLOTS = 8
LOAD_TIMEOUT_S = 10.0


class Worker:
    """An engine's memory of 32 blocks, and the transfers between it and a store."""

    def __init__(self, store: MemoryStore, is_immediate: bool = True) -> None:
        self.clock = SteppedClock()
        self.connector = MemoryConnector(store, is_immediate=is_immediate)
        self.device = HostDevice(KVPoolMemory(LAYOUT, 32))
        self.staged = StagedConnector(self.connector, self.device.open_copies, self.clock, save_wait_s=0.0)
        self.staged.register_kv_cache(KVPoolMemory(LAYOUT, NUM_SLOTS))
        self.transfers = StagedTransfers(
            self.staged, LAYOUT.block_size, self.clock, load_timeout_s=LOAD_TIMEOUT_S, save_timeout_s=LOAD_TIMEOUT_S
        )
        self.ended: set[str] = set()
        self.failed: set[int] = set()

    def fill(self, block_hashes: Sequence[bytes]) -> None:
        for block_id, block_hash in enumerate(block_hashes):
            self.device.pool.block(block_id)[:] = content_of(block_hash)

    def save(self, block_hashes: Sequence[bytes], request_id: str = "r") -> None:
        self.transfers.save([BlockMove(request_id, tuple(range(len(block_hashes))), tuple(block_hashes))])

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


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    opened: list[Worker] = []
    num_threads = threading.active_count()
    yield opened
    for worker in opened:
        worker.transfers.close(0.0)
    wait_until(lambda: threading.active_count() <= num_threads)


def open_worker(workers: list[Worker], is_immediate: bool = True, stored: Sequence[bytes] = ()) -> Worker:
    worker = Worker(MemoryStore({name: content_of(name) for name in stored}), is_immediate)
    workers.append(worker)
    return worker


def test_load_larger_than_the_pool_arrives_and_its_ancestors_are_told_once(workers: list[Worker]) -> None:
    names = chain(1, 12)
    worker = open_worker(workers, stored=names)
    worker.load(names)
    wait_until(lambda: worker.has_ended("l"))
    assert not worker.failed
    assert [bytes(worker.device.pool.block(16 + index)) for index in range(12)] == [content_of(name) for name in names]
    assert worker.connector.lookups == ["l"]


def test_save_copies_at_once_so_that_blocks_may_be_reused(workers: list[Worker]) -> None:
    worker, names = open_worker(workers, is_immediate=False), chain(1, 3)
    worker.fill(names)
    worker.save(names)
    worker.fill(chain(2, 3))
    wait_until(lambda: worker.is_started(1))
    worker.connector.complete(1)
    assert all(worker.connector.store.blocks[name] == content_of(name) for name in names)


def test_save_into_a_full_pool_returns_and_is_cut(workers: list[Worker]) -> None:
    worker = open_worker(workers, is_immediate=False)
    worker.save(chain(1, 7))
    wait_until(lambda: worker.is_started(1))
    assert len(worker.connector.started[0].block_ids) == NUM_SLOTS // 2
    worker.save(chain(2, 1), "other")
    assert not worker.is_started(2)


@pytest.mark.parametrize("outcome", [TransferOutcome.MISS, TransferOutcome.CORRUPT, TransferOutcome.ERROR])
def test_load_that_fails_names_the_blocks_that_did_not_arrive(workers: list[Worker], outcome: TransferOutcome) -> None:
    names = chain(1, 4)
    worker = open_worker(workers, is_immediate=False, stored=names)
    worker.load(names)
    wait_until(lambda: worker.is_started(1))
    worker.connector.complete(1, outcome, 2)
    wait_until(lambda: worker.has_ended("l"))
    assert worker.failed == {18, 19}
    blocks = worker.device.pool
    assert bytes(blocks.block(17)) == content_of(names[1]) and bytes(blocks.block(18)) == bytes(LAYOUT.block_bytes)
    assert worker.transfers.take_verdict() == Verdict(*((0, 1) if outcome is TransferOutcome.ERROR else (1, 0)))
    assert worker.transfers.take_verdict() == Verdict()


def test_load_past_its_deadline_is_over_and_what_arrives_later_touches_nobody(workers: list[Worker]) -> None:
    names = chain(1, 2)
    worker = open_worker(workers, is_immediate=False, stored=names)
    worker.load(names)
    wait_until(lambda: worker.is_started(1))
    worker.clock.offset_s += LOAD_TIMEOUT_S + 1
    wait_until(lambda: worker.has_ended("l"))
    assert worker.failed == {16, 17}
    worker.connector.complete(1)
    time.sleep(0.05)
    assert bytes(worker.device.pool.block(16)) == bytes(LAYOUT.block_bytes)
    assert worker.transfers.take_verdict().num_faults == 1


@pytest.mark.parametrize("call", ["lookup", "load", "poll"])
def test_connector_that_raises_costs_a_miss(workers: list[Worker], call: str) -> None:
    worker = open_worker(workers, is_immediate=False)
    worker.connector.fail_calls.add(call)
    worker.load(chain(1, 2))
    wait_until(lambda: call == "load" or worker.is_started(1))
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
    saver.save(names)
    saver.transfers.close(30.0)
    assert saver.connector.store.blocks[names[1]] == content_of(names[1])
