"""A store that several simulated nodes share, and a connector over it that is late, fails, forgets and corrupts on demand.

Bytes move when a transfer ends, not when it starts: a block that is freed too early is caught in the act.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.pool_memory import KVPoolMemory
from tests.simulation.world import World


@dataclass
class SimStore:
    """Blocks by hash, each with its checksum, and the store's present mood."""

    capacity_blocks: int
    blocks: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    max_delay_s: float = 0.005
    is_failing: bool = False
    is_hanging: bool = False
    is_full: bool = False
    is_away: bool = False

    def calm(self) -> None:
        """All is well again."""
        self.is_failing = self.is_hanging = self.is_full = self.is_away = False
        self.max_delay_s = 0.005

    def put(self, block_hash: bytes, payload: bytes) -> None:
        """Store a block; the oldest go when there is no room."""
        self.blocks.pop(block_hash, None)
        self.blocks[block_hash] = (payload, zlib.crc32(payload))
        while len(self.blocks) > self.capacity_blocks:
            del self.blocks[next(iter(self.blocks))]


class SimConnector(KVConnector):
    """One node's connector. `die` is what kill -9 does to it: nothing that is in flight ever happens."""

    name = "simulated"

    def __init__(self, world: World, store: SimStore, node_name: str) -> None:
        self._world = world
        self._node_name = node_name
        self._store = store
        self._pool: KVPoolMemory | None = None
        self._is_dead = False
        self._in_flight: set[int] = set()
        self._results: list[TransferResult] = []
        self.is_cut_off = False  # a partition between this node and the store

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        self._pool = pool
        self.kv_address = f"{self._node_name}:1"

    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        assert self.kv_address not in lookup.sources, f"{self._node_name} is told to get KV from itself"
        assert len(set(lookup.sources)) == len(lookup.sources), f"{self._node_name} is told twice to get KV from one node"
        if self._store.is_failing and self._world.rng.random() < 0.5:
            raise OSError("the simulated store fails")
        if self._world.rng.random() < 0.1:
            return None
        first = end = num_computed_tokens // lookup.block_size
        while end < len(lookup.block_hashes) and lookup.block_hashes[end] in self._store.blocks:
            end += 1
        return (end - first) * lookup.block_size

    def start_load(self, transfer: Transfer) -> None:
        self._start(transfer)

    def start_save(self, transfer: Transfer) -> None:
        self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        if self._store.is_failing and self._world.rng.random() < 0.3:
            raise OSError("the simulated store fails")
        self._in_flight.add(transfer.transfer_id)
        delay_s = self._world.rng.random() * self._store.max_delay_s + (20.0 if self._store.is_hanging else 0.0)
        self._world.after(delay_s, lambda: self._finish(transfer))

    def _finish(self, transfer: Transfer) -> None:
        if self._is_dead:
            return
        self._in_flight.discard(transfer.transfer_id)
        is_refused = transfer.direction is TransferDirection.SAVE and self._store.is_full
        is_unreachable = self._store.is_away or self.is_cut_off
        if is_refused or is_unreachable or (self._store.is_failing and self._world.rng.random() < 0.5):
            self._results.append(TransferResult(transfer.transfer_id, 0, TransferOutcome.ERROR))
            self._log(transfer, 0, TransferOutcome.ERROR)
            return
        num_ok, outcome = self._move(transfer)
        self._log(transfer, num_ok, outcome)
        result = TransferResult(transfer.transfer_id, num_ok, outcome)
        self._results.append(result)
        if self._world.rng.random() < 0.02:
            self._results.append(result)  # a duplicate completion

    def _log(self, transfer: Transfer, num_ok: int, outcome: TransferOutcome) -> None:
        if self._world.is_traced:
            what = f"{transfer.direction.value} {transfer.transfer_id}: {num_ok} of {len(transfer.block_ids)} blocks"
            self._world.log(f"{self._node_name} {what}, {outcome.value}")

    def _move(self, transfer: Transfer) -> tuple[int, TransferOutcome]:
        assert self._pool is not None
        for index, (block_id, block_hash) in enumerate(zip(transfer.block_ids, transfer.block_hashes, strict=True)):
            if transfer.direction is TransferDirection.SAVE:
                if block_hash not in self._store.blocks:
                    self._store.put(block_hash, bytes(self._pool.block(block_id)))
                continue
            found = self._store.blocks.get(block_hash)
            if found is None:
                return index, TransferOutcome.MISS
            payload, checksum = found
            self._pool.block(block_id)[:] = payload  # as the real ones: verified after the copy
            if zlib.crc32(payload) != checksum:
                del self._store.blocks[block_hash]
                return index, TransferOutcome.CORRUPT
        return len(transfer.block_ids), TransferOutcome.OK

    def poll_transfers(self) -> list[TransferResult]:
        results, self._results = self._results, []
        return results

    def die(self) -> None:
        """Nothing of this connector happens any more."""
        self._is_dead = True

    def close(self) -> None:
        self.die()

    def stats(self) -> ConnectorStats:
        return ConnectorStats(num_open_references=len(self._in_flight))
