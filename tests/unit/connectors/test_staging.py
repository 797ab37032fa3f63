"""The stage between a device's memory and a store: copies that a test holds up, over a store whose completions it controls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from connectors.contract.node import LAYOUT, SteppedClock, chain, content_of, wait_until
from connectors.staging.connector import StagedConnector
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult
from core.kv.pool_memory import KVPoolMemory
from tests.support.host_device import HostDevice
from tests.support.memory_connector import MemoryConnector, MemoryStore

NUM_SLOTS = 8
NUM_BLOCKS = 32
PIECE_BLOCKS = 3
TIMEOUT_S = 10.0
SAVE_WAIT_S = 5.0


class Stage:
    """A staged store, and the engine's blocks behind it."""

    def __init__(self, stored: Sequence[bytes] = (), is_immediate: bool = False) -> None:
        self.clock = SteppedClock()
        self.store = MemoryConnector(MemoryStore({name: content_of(name) for name in stored}), is_immediate=is_immediate)
        self.device = HostDevice(KVPoolMemory(LAYOUT, NUM_BLOCKS))
        self.connector = StagedConnector(
            self.store,
            self.device.open_copies,
            self.clock,
            save_wait_s=SAVE_WAIT_S,
            piece_bytes=PIECE_BLOCKS * LAYOUT.block_bytes,
        )
        self.connector.register_kv_cache(KVPoolMemory(LAYOUT, NUM_SLOTS))
        self.results: dict[int, TransferResult] = {}
        self.released: list[int] = []
        self._next_id = 100

    def start(self, direction: TransferDirection, names: Sequence[bytes], request_id: str = "r", first: int = 0) -> int:
        self._next_id += 1
        deadline_s = self.clock.now_s() + TIMEOUT_S
        transfer = Transfer(
            self._next_id, direction, request_id, tuple(range(first, first + len(names))), tuple(names), deadline_s
        )
        if direction is TransferDirection.LOAD:
            self.connector.start_load(transfer)
        else:
            for block_id, name in zip(transfer.block_ids, names, strict=True):
                self.device.pool.block(block_id)[:] = content_of(name)
            self.connector.start_save(transfer)
        return transfer.transfer_id

    def save(self, names: Sequence[bytes], request_id: str = "r") -> int:
        return self.start(TransferDirection.SAVE, names, request_id)

    def load(self, names: Sequence[bytes], first: int = 0) -> int:
        return self.start(TransferDirection.LOAD, names, first=first)

    def poll(self) -> None:
        self.released += self.connector.poll_released()
        for result in self.connector.poll_transfers():
            assert result.transfer_id not in self.results
            self.results[result.transfer_id] = result

    def has_ended(self, transfer_id: int) -> bool:
        self.poll()
        return transfer_id in self.results

    def is_released(self, transfer_id: int) -> bool:
        self.poll()
        return transfer_id in self.released

    def wait_result(self, transfer_id: int) -> tuple[TransferOutcome, int]:
        wait_until(lambda: self.has_ended(transfer_id))
        return self.results[transfer_id].outcome, self.results[transfer_id].num_blocks_ok

    def wait_started(self, num_transfers: int) -> None:
        """Of the store's."""
        wait_until(lambda: len(self.store.started) >= num_transfers)

    def num_used_slots(self) -> int:
        return self.connector.stats().num_open_references - self.store.stats().num_open_references

    def holds(self, names: Sequence[bytes], first: int = 0) -> bool:
        """Whether the engine's blocks from `first` on have the contents of these."""
        return all(bytes(self.device.pool.block(first + index)) == content_of(name) for index, name in enumerate(names))


@pytest.fixture
def stages() -> Iterator[list[Stage]]:
    opened: list[Stage] = []
    num_threads = threading.active_count()
    yield opened
    for stage in opened:
        stage.device.gate.set()
        stage.connector.close()
    wait_until(lambda: threading.active_count() <= num_threads)


def open_stage(stages: list[Stage], stored: Sequence[bytes] = (), is_immediate: bool = False) -> Stage:
    stages.append(Stage(stored, is_immediate))
    return stages[-1]


def test_save_lets_go_of_the_engines_blocks_when_copied_and_ends_when_stored(stages: list[Stage]) -> None:
    stage, names = open_stage(stages), chain(1, 2)
    stage.device.gate.clear()
    save = stage.save(names)
    time.sleep(0.05)
    assert not stage.is_released(save) and not stage.store.started
    stage.device.gate.set()
    wait_until(lambda: stage.is_released(save))
    stage.device.pool.block(0)[:] = bytes(LAYOUT.block_bytes)  # as if somebody else's by now
    stage.wait_started(1)
    assert not stage.has_ended(save)
    stage.store.complete(1)
    assert stage.wait_result(save) == (TransferOutcome.OK, 2)
    assert stage.store.store.blocks[names[0]] == content_of(names[0])
    assert stage.num_used_slots() == 0


def test_load_ends_only_when_the_device_has_it(stages: list[Stage]) -> None:
    names = chain(1, 2)
    stage = open_stage(stages, names)
    load = stage.load(names)
    stage.wait_started(1)
    stage.device.gate.clear()
    stage.store.complete(1)
    time.sleep(0.1)
    assert not stage.has_ended(load)
    stage.device.gate.set()
    assert stage.wait_result(load) == (TransferOutcome.OK, 2)
    assert stage.holds(names)


def test_load_larger_than_the_pool_goes_in_pieces_in_any_order(stages: list[Stage]) -> None:
    names = chain(1, 12)
    stage = open_stage(stages, names)
    load = stage.load(names)
    stage.wait_started(3)
    assert [len(transfer.block_ids) for transfer in stage.store.started] == [3, 3, 2]
    for number in (2, 3, 1):
        stage.store.complete(number)
    stage.wait_started(5)
    stage.store.complete(5)
    stage.store.complete(4)
    assert stage.wait_result(load) == (TransferOutcome.OK, 12)
    assert stage.holds(names)


def test_load_with_a_hole_in_its_second_piece_ends_there(stages: list[Stage]) -> None:
    names = chain(1, 8)
    stage = open_stage(stages, names)
    load = stage.load(names)
    stage.wait_started(3)
    stage.store.complete(3)
    stage.store.complete(2, TransferOutcome.CORRUPT, 1)
    stage.store.complete(1)
    assert stage.wait_result(load) == (TransferOutcome.CORRUPT, 4)
    assert stage.holds(names[:4]) and stage.num_used_slots() == 0


def test_save_without_room_waits_and_is_then_cut_with_what_follows_it(stages: list[Stage]) -> None:
    stage, names = open_stage(stages), chain(1, 6)
    save, other = stage.save(names), stage.save(chain(2, 2), "other")
    stage.wait_started(2)  # four blocks: the other half of the pool is kept for loads
    stage.clock.offset_s += SAVE_WAIT_S + 1
    assert stage.wait_result(other) == (TransferOutcome.MISS, 0)
    wait_until(lambda: stage.is_released(save))
    stage.store.complete(1)
    stage.store.complete(2)
    assert stage.wait_result(save) == (TransferOutcome.MISS, 4)
    assert stage.wait_result(stage.save(names[5:])) == (TransferOutcome.MISS, 0)  # nobody would reach it
    third = stage.save(chain(3, 1), "third")
    stage.wait_started(3)
    stage.store.complete(3)
    assert stage.wait_result(third) == (TransferOutcome.OK, 1)


def test_save_larger_than_its_half_passes_while_the_store_takes_it(stages: list[Stage]) -> None:
    stage, names = open_stage(stages, is_immediate=True), chain(1, 20)
    save = stage.save(names)
    assert stage.wait_result(save) == (TransferOutcome.OK, 20)
    assert stage.is_released(save) and all(stage.store.store.blocks[name] == content_of(name) for name in names)


def test_store_that_hangs_holds_slots_and_none_of_the_engines_blocks(stages: list[Stage]) -> None:
    names = chain(1, 8)
    stage = open_stage(stages, names)
    save, load = stage.save(chain(2, 3)), stage.load(names, first=8)
    stage.wait_started(3)
    wait_until(lambda: stage.is_released(save))
    stage.clock.offset_s += TIMEOUT_S + 1
    assert stage.wait_result(save) == stage.wait_result(load) == (TransferOutcome.TIMEOUT, 0)
    assert stage.num_used_slots() == NUM_SLOTS
    late = stage.save(chain(3, 1), "late")
    stage.clock.offset_s += SAVE_WAIT_S + 1
    assert stage.wait_result(late) == (TransferOutcome.TIMEOUT, 0)  # a MISS would call the store healthy
    assert "no room" in stage.results[late].detail
    for number in list(stage.store.pending):
        stage.store.complete(number)
    wait_until(lambda: stage.num_used_slots() == 0)
    assert bytes(stage.device.pool.block(8)) == bytes(LAYOUT.block_bytes)
    stage.store.is_immediate = True
    assert stage.wait_result(stage.load(names, first=8)) == (TransferOutcome.OK, 8)


def test_early_outcome_ends_the_transfer_and_keeps_its_slots(stages: list[Stage]) -> None:
    names = chain(1, 2)
    stage = open_stage(stages)
    save = stage.save(names)
    stage.wait_started(1)
    stage.store.report_early(TransferResult(1, 2, TransferOutcome.OK))
    assert stage.store.on_result is not None
    stage.store.on_result()
    assert stage.wait_result(save) == (TransferOutcome.OK, 2)
    assert stage.num_used_slots() == 2
    stage.store.complete(1)
    wait_until(lambda: stage.num_used_slots() == 0)
    assert not stage.connector.poll_transfers()


@pytest.mark.parametrize("direction", list(TransferDirection))
def test_copy_that_fails_is_an_error_and_frees_its_slots(stages: list[Stage], direction: TransferDirection) -> None:
    names = chain(1, 2)
    stage = open_stage(stages, names, is_immediate=True)
    stage.device.error = RuntimeError("an illegal memory access")
    assert stage.wait_result(stage.start(direction, names)) == (TransferOutcome.ERROR, 0)
    assert stage.num_used_slots() == 0
    stage.device.error = None
    assert stage.wait_result(stage.start(direction, chain(1, 2), "again")) == (TransferOutcome.OK, 2)


@pytest.mark.parametrize("call", ["load", "save"])
def test_store_that_raises_is_an_error(stages: list[Stage], call: str) -> None:
    stage = open_stage(stages)
    stage.store.fail_calls.add(call)
    assert stage.wait_result(stage.start(TransferDirection(call), chain(1, 2))) == (TransferOutcome.ERROR, 0)
    assert stage.num_used_slots() == 0


def test_wish_to_be_saved_is_passed_on(stages: list[Stage]) -> None:
    names = chain(1, 4)
    stage = open_stage(stages, names)
    load = stage.load(names)
    stage.wait_started(2)
    stage.store.complete(1)
    stage.store.complete(2, wants_save=True)
    stage.wait_result(load)
    assert stage.results[load].wants_save


def test_close_waits_for_the_copy_that_runs_and_cancels_all_else(stages: list[Stage]) -> None:
    names = chain(1, 4)
    stage = open_stage(stages, names)
    copying, flying = stage.load(names[:1]), stage.load(names[1:2], first=1)
    stage.wait_started(2)
    stage.device.gate.clear()
    stage.store.complete(1)
    time.sleep(0.05)
    closer = threading.Thread(target=stage.connector.close)
    closer.start()
    closer.join(0.2)
    assert closer.is_alive()
    stage.device.gate.set()
    closer.join()
    assert stage.wait_result(copying) == stage.wait_result(flying) == (TransferOutcome.CANCELLED, 0)
    assert stage.holds(names[:1]) and bytes(stage.device.pool.block(1)) == bytes(LAYOUT.block_bytes)
    assert stage.wait_result(stage.save(names)) == (TransferOutcome.CANCELLED, 0)
