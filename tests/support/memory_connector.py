"""A store in a dict whose every completion the test controls: for tests of the engine, never in place of a real store."""

from __future__ import annotations

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


@dataclass
class MemoryStore:
    """What several MemoryConnectors share."""

    blocks: dict[bytes, bytes] = field(default_factory=dict)


class MemoryConnector(KVConnector):
    """Moves bytes when `complete` is called, or at once when is_immediate. Records what it was asked."""

    name = "memory"

    def __init__(self, store: MemoryStore | None = None, *, is_immediate: bool = True) -> None:
        self.store = store if store is not None else MemoryStore()
        self.is_immediate = is_immediate
        self.is_lookup_known = True
        self.fail_calls: set[str] = set()  # names of methods that raise
        self.pending: dict[int, Transfer] = {}
        self.started: list[Transfer] = []
        self.lookups: list[str] = []  # request ids, in the order they were asked for
        self.sources: dict[str, tuple[str, ...]] = {}  # of the latest lookup, by request id
        self.released: list[int] = []  # saves whose blocks it needs no more
        self._results: list[TransferResult] = []
        self._early_results: list[TransferResult] = []
        self._pool: KVPoolMemory | None = None
        self._copies: dict[int, list[bytes]] = {}  # of released saves

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        self._pool = pool
        self.kv_address = "memory:1"

    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        self.lookups.append(lookup.request_id)
        self.sources[lookup.request_id] = lookup.sources
        self._maybe_fail("lookup")
        if not self.is_lookup_known:
            return None
        first = index = num_computed_tokens // lookup.block_size
        while index < len(lookup.block_hashes) and lookup.block_hashes[index] in self.store.blocks:
            index += 1
        return (index - first) * lookup.block_size

    def start_load(self, transfer: Transfer) -> None:
        self._maybe_fail("load")
        self._start(transfer)

    def start_save(self, transfer: Transfer) -> None:
        self._maybe_fail("save")
        self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        self.started.append(transfer)
        self.pending[transfer.transfer_id] = transfer
        if self.is_immediate:
            self.complete(transfer.transfer_id)

    def complete(
        self,
        transfer_id: int,
        outcome: TransferOutcome = TransferOutcome.OK,
        num_ok: int | None = None,
        wants_save: bool = False,
    ) -> None:
        """Move the first num_ok blocks (default: all) and report."""
        transfer = self.pending.pop(transfer_id)
        num_ok = len(transfer.block_ids) if num_ok is None else num_ok
        assert self._pool is not None
        copies = self._copies.pop(transfer_id, None)
        for index, (block_id, block_hash) in enumerate(zip(transfer.block_ids, transfer.block_hashes, strict=True)):
            if index >= num_ok:
                break
            if transfer.direction is TransferDirection.SAVE:
                self.store.blocks[block_hash] = copies[index] if copies else bytes(self._pool.block(block_id))
            elif block_hash in self.store.blocks:
                self._pool.block(block_id)[:] = self.store.blocks[block_hash]
            else:
                num_ok, outcome = index, TransferOutcome.MISS
                break
        self.report(TransferResult(transfer_id, num_ok, outcome, wants_save=wants_save))

    def release(self, transfer_id: int) -> None:
        """Copy what a save is to store, and need its blocks no more."""
        assert self._pool is not None
        if transfer_id not in self._copies:
            self._copies[transfer_id] = [bytes(self._pool.block(block_id)) for block_id in self.pending[transfer_id].block_ids]
            self.released.append(transfer_id)

    def report(self, result: TransferResult) -> None:
        """Put any result in the mailbox, also an unknown or a duplicate one."""
        self._results.append(result)
        if self.on_result is not None:
            self.on_result()

    def report_early(self, result: TransferResult) -> None:
        """Announce an outcome while the transfer goes on."""
        self._early_results.append(result)

    def poll_early_results(self) -> list[TransferResult]:
        results, self._early_results = self._early_results, []
        return results

    def poll_released(self) -> list[int]:
        released, self.released = self.released, []
        return released

    def poll_transfers(self) -> list[TransferResult]:
        self._maybe_fail("poll")
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        for transfer_id in list(self.pending):
            del self.pending[transfer_id]
            self.report(TransferResult(transfer_id, 0, TransferOutcome.CANCELLED))

    def stats(self) -> ConnectorStats:
        return ConnectorStats(store_blocks=len(self.store.blocks), num_open_references=len(self.pending))

    def _maybe_fail(self, call: str) -> None:
        if call in self.fail_calls:
            raise OSError(f"the store was told to fail in {call}")
