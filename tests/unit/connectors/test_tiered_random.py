"""Random faults in every tier: one result per transfer, right bytes, and no block's memory in two hands at once."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from connectors.contract.node import NUM_POOL_BLOCKS, Node, SteppedClock, chain, content_of, wait_until
from connectors.tiered.connector import TieredConnector
from connectors.tiered.options import parse_tiered_options
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult
from tests.support.memory_connector import MemoryConnector

CHAINS = [chain(seed, 8) for seed in range(6)]
TRANSFER_TIMEOUT_S = 60.0


class PoolUse:
    """Which blocks of the pool are being written or read by some child."""

    def __init__(self) -> None:
        self.num_readers: Counter[int] = Counter()
        self.num_writers: Counter[int] = Counter()
        self.problems: list[str] = []

    def begin(self, transfer: Transfer) -> None:
        is_load = transfer.direction is TransferDirection.LOAD
        for block_id in transfer.block_ids:
            if self.num_writers[block_id] or (is_load and self.num_readers[block_id]):
                self.problems.append(f"block {block_id} is in two hands")
            (self.num_writers if is_load else self.num_readers)[block_id] += 1

    def end(self, transfer: Transfer) -> None:
        (self.num_writers if transfer.direction is TransferDirection.LOAD else self.num_readers).subtract(transfer.block_ids)


class Child(MemoryConnector):
    """A tier that says when it lets go of memory."""

    def __init__(self, use: PoolUse) -> None:
        super().__init__(is_immediate=False)
        self._use = use
        self._transfers: dict[int, Transfer] = {}

    def _start(self, transfer: Transfer) -> None:
        self._use.begin(transfer)
        self._transfers[transfer.transfer_id] = transfer
        super()._start(transfer)

    def report(self, result: TransferResult) -> None:
        self._use.end(self._transfers.pop(result.transfer_id))
        super().report(result)


class Run:
    """One seed's history over three tiers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        write = self.rng.choice(["through", "through", "back"])
        tiers = {name: {"connector": "none"} for name in "abc"}
        tiers["c"]["store_threshold"] = self.rng.choice([1, 2])
        own, parsed = parse_tiered_options(
            {"tiers": "a,b,c", **tiers, "write": "through", "promote": self.rng.random() < 0.7, "lookup_wait_s": 0.001}
        )
        own = own if write == "through" else type(own)(tiers=own.tiers, write="back", staging_bytes=1)
        self.use = PoolUse()
        self.children = [Child(self.use) for _ in parsed]
        self.clock = SteppedClock()
        self.connector = TieredConnector(own, parsed, list(self.children), self.clock)
        if self.connector._mover is not None:  # its connectors would be of another kind than ours
            self.connector._mover = None
        self.node = Node(self.connector, self.clock)
        self.open: dict[int, Transfer] = {}
        self.free = set(range(NUM_POOL_BLOCKS))
        self.early: dict[int, TransferResult] = {}
        self.num_ended = 0

    def start(self) -> None:
        hashes = self.rng.choice(CHAINS)
        first = self.rng.randrange(len(hashes))
        part = hashes[first : first + self.rng.randrange(1, 9)]
        if len(self.free) < len(part):
            return
        block_ids = tuple(self.rng.sample(sorted(self.free), len(part)))
        direction = self.rng.choice(list(TransferDirection))
        deadline_s = self.clock.now_s() + TRANSFER_TIMEOUT_S
        transfer = Transfer(
            len(self.open) + self.num_ended + 1, direction, f"r{hashes[0].hex()}", block_ids, tuple(part), deadline_s
        )
        self.free -= set(block_ids)
        self.open[transfer.transfer_id] = transfer
        if direction is TransferDirection.SAVE:
            self.node.fill(transfer)
            self.connector.start_save(transfer)
        else:
            self.connector.start_load(transfer)

    def finish_some(self, share: float) -> None:
        for child in self.children:
            for transfer_id in list(child.pending):
                if self.rng.random() >= share:
                    continue
                outcome = self.rng.choice(
                    [TransferOutcome.OK] * 6 + [TransferOutcome.ERROR, TransferOutcome.MISS, TransferOutcome.CORRUPT]
                )
                num_blocks = len(child.pending[transfer_id].block_ids)
                child.complete(transfer_id, outcome, None if outcome is TransferOutcome.OK else self.rng.randrange(num_blocks))

    def disturb(self) -> None:
        child = self.rng.choice(self.children)
        child.is_lookup_known = self.rng.random() < 0.8
        child.fail_calls = {self.rng.choice(["lookup", "load", "save"])} if self.rng.random() < 0.2 else set()
        if child.store.blocks and self.rng.random() < 0.5:
            del child.store.blocks[self.rng.choice(list(child.store.blocks))]
        if self.rng.random() < 0.1:
            self.clock.offset_s += self.rng.choice([1.0, TRANSFER_TIMEOUT_S])  # what is in flight now hangs
        self.node.lookup(self.rng.choice(CHAINS), request_id=f"r{self.rng.randrange(100)}")

    def poll(self) -> None:
        for early in self.connector.poll_early_results():
            assert early.transfer_id not in self.early, "two early results"
            self.early[early.transfer_id] = early
        for result in self.connector.poll_transfers():
            transfer = self.open.pop(result.transfer_id)  # a KeyError is a second result
            self.num_ended += 1
            assert not any(self.use.num_writers[block_id] or self.use.num_readers[block_id] for block_id in transfer.block_ids)
            self.node.check(transfer, result)
            before = self.early.pop(result.transfer_id, None)
            assert before is None or before.num_blocks_ok <= result.num_blocks_ok
            self.free |= set(transfer.block_ids)

    def all_ended(self) -> bool:
        self.finish_some(1.0)
        self.poll()
        return not self.open


@pytest.mark.parametrize("seed", range(8))
def test_any_history_of_faults_keeps_bytes_right_and_memory_in_one_hand(seed: int) -> None:
    run = Run(seed)
    for child in run.children:
        for hashes in CHAINS[:3]:
            child.store.blocks.update({name: content_of(name) for name in hashes[: run.rng.randrange(9)]})
    for _ in range(100):
        run.start()
        run.disturb()
        run.finish_some(0.4)
        if run.rng.random() < 0.2:
            time.sleep(0.001)  # lets the connector's thread see it
        run.poll()
        assert run.use.problems == []
    for child in run.children:
        child.fail_calls = set()
    wait_until(run.all_ended)
    assert run.use.problems == []
    assert run.num_ended > 40
    assert run.connector.stats().num_open_references == 0
    run.connector.close()
