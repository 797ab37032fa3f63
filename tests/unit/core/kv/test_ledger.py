"""What a connector may tell the ledger beside results: outcomes that are certain early, and loads that it would like saved."""

from __future__ import annotations

from core.kv.block_pool import BlockPool
from core.kv.connector import TransferDirection, TransferOutcome, TransferResult
from core.kv.ledger import TransferLedger
from core.stats import EngineStats
from tests.support.memory_connector import MemoryConnector
from tests.support.virtual_clock import VirtualClock

HASHES = [bytes([number]) * 16 for number in range(4)]
TIMEOUT_S = 10.0


class LedgerBench:
    """A ledger over a connector whose completions the test controls; blocks 0 to 3 are in use by a request."""

    def __init__(self) -> None:
        self.connector = MemoryConnector(is_immediate=False)
        self.pool = BlockPool(16)
        self.clock = VirtualClock()
        self.stats = EngineStats()
        self.ledger = TransferLedger(
            self.connector,
            self.pool,
            self.clock,
            self.stats,
            block_size=4,
            block_bytes=1024,
            load_timeout_s=TIMEOUT_S,
            save_timeout_s=TIMEOUT_S,
        )
        blocks = self.pool.try_allocate(4)
        assert blocks is not None
        self.block_ids = blocks

    def save(self) -> int:
        transfer_id = self.ledger.start_save("request", self.block_ids, HASHES)
        assert transfer_id is not None
        return transfer_id

    def load(self) -> int:
        """The request's blocks become the load's."""
        transfer_id = self.ledger.start_load("request", self.block_ids, HASHES, [])
        assert transfer_id is not None
        return transfer_id

    def end(self, transfer_id: int, num_ok: int, outcome: TransferOutcome, *, wants_save: bool = False) -> None:
        del self.connector.pending[transfer_id]
        self.connector.report(TransferResult(transfer_id, num_ok, outcome, wants_save=wants_save))


def test_ledger_early_result_of_a_save_completes_the_handoff_and_keeps_the_pins() -> None:
    bench = LedgerBench()
    transfer_id = bench.save()
    bench.connector.report_early(TransferResult(transfer_id, 4, TransferOutcome.OK))
    (end,) = bench.ledger.poll()
    assert (end.num_blocks_ok, end.outcome) == (4, TransferOutcome.OK)
    assert bench.ledger.num_saves_of("request") == 0
    assert (bench.ledger.num_in_flight, bench.ledger.num_pins) == (1, 4)
    bench.end(transfer_id, 4, TransferOutcome.OK)
    assert bench.ledger.poll() == []
    assert (bench.ledger.num_in_flight, bench.ledger.num_pins) == (0, 0)
    assert bench.stats.transfer_blocks == {"save.ok": 4}  # counted once


def test_ledger_deadline_after_an_early_result_is_no_fault_of_the_store() -> None:
    bench = LedgerBench()
    for _ in range(3):  # as many faults would open the circuit
        bench.connector.report_early(TransferResult(bench.save(), 4, TransferOutcome.OK))
    bench.ledger.poll()
    bench.clock.advance(TIMEOUT_S + 1)
    assert bench.ledger.poll() == []
    assert bench.ledger.num_overdue == 3
    assert not bench.stats.circuit_is_open
    assert bench.ledger.num_pins == 12


def test_ledger_early_result_of_a_load_frees_the_request_while_the_rest_hangs() -> None:
    bench = LedgerBench()
    transfer_id = bench.load()
    bench.connector.report_early(TransferResult(transfer_id, 1, TransferOutcome.MISS))
    (end,) = bench.ledger.poll()
    assert end.num_blocks_ok == 1
    assert bench.pool.find_longest_prefix(HASHES, 4) == bench.block_ids[:1]
    assert bench.ledger.loading_transfer_id(HASHES[3]) is None
    assert bench.ledger.num_pins == 4
    bench.end(transfer_id, 3, TransferOutcome.MISS)  # two more arrived after all
    assert bench.ledger.poll() == []
    assert bench.pool.find_longest_prefix(HASHES, 4) == bench.block_ids[:3]
    assert bench.ledger.num_pins == 0


def test_ledger_load_that_wants_a_save_gets_one_that_no_handoff_waits_for() -> None:
    bench = LedgerBench()
    bench.end(bench.load(), 3, TransferOutcome.MISS, wants_save=True)
    bench.ledger.poll()
    (transfer,) = bench.connector.pending.values()
    assert transfer.direction is TransferDirection.SAVE
    assert (list(transfer.block_ids), list(transfer.block_hashes)) == (bench.block_ids[:3], HASHES[:3])
    assert bench.ledger.num_saves_of("request") == 0
    assert bench.ledger.num_pins == 3
    bench.end(transfer.transfer_id, 3, TransferOutcome.OK)
    bench.ledger.poll()
    assert bench.ledger.num_pins == bench.pool.num_references() == 0


def test_ledger_closed_while_a_load_wants_a_save_starts_none() -> None:
    bench = LedgerBench()
    bench.end(bench.load(), 4, TransferOutcome.OK, wants_save=True)
    bench.ledger.close()
    assert bench.connector.pending == {}
    assert bench.ledger.num_pins == bench.pool.num_references() == 0


def test_ledger_released_save_gives_its_blocks_back_and_is_awaited_until_its_result() -> None:
    bench = LedgerBench()
    saved, loaded = bench.save(), bench.ledger.start_load("other", [], [], [])
    assert loaded is not None
    before = bench.pool.num_references()
    bench.connector.released += [saved, loaded, 999]
    assert bench.ledger.poll() == []
    assert bench.pool.num_references() == before - len(HASHES) and bench.ledger.num_pins == 0
    assert bench.ledger.num_saves_of("request") == 1
    bench.end(saved, 4, TransferOutcome.OK)
    (end,) = bench.ledger.poll()
    assert (end.num_blocks_ok, bench.ledger.num_saves_of("request")) == (4, 0)
    assert bench.pool.num_references() == before - len(HASHES)
