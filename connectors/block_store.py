"""A connector over a store that blocks: the short way to a connector of one's own (docs/write-a-connector.md).

BlockStore is what its author writes: plain calls that may wait, all from one thread. BlockStoreConnector makes a KVConnector of
it: threads, lookups that never wait, verification, one result per transfer. Stores that are to reach their medium's speed move
several blocks at a time, and implement KVConnector themselves.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from connectors.known_blocks import KnownBlocks
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, Payload, check_block, pack_block_header
from connectors.transfer_workers import TransferWorkers, refuse_bad_ids
from core.clock import Clock
from core.kv.connector import (
    ConnectorStats,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_KNOWN_HASHES = 1_000_000
_MAX_QUESTIONS = 4096


class BlockStore(ABC):
    """Blocks by hash, each a header and a payload, of one layout. Any call may raise: the transfer is an ERROR then.

    open() and close() come from the engine's thread, before and after all others, which come from one thread of ours. Whatever
    waits for something must give up by itself, in seconds.
    """

    name: ClassVar[str]

    @abstractmethod
    def open(self, layout: KVLayout) -> int:
        """Called once, before anything else; returns the capacity in blocks. Blocks of another layout must not be found."""

    @abstractmethod
    def count_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many of these are stored, up to the first that is not."""

    @abstractmethod
    def read(self, block_hash: bytes) -> Payload | None:
        """Header and payload as they were written, in memory that nobody else writes to; None when it is not stored."""

    @abstractmethod
    def write(self, block_hash: bytes, header: bytes, payload: memoryview) -> bool:
        """Keep a block; False when it is stored already. Every process that shares the store sees it when use() has returned."""

    @abstractmethod
    def remove(self, block_hash: bytes) -> None:
        """Forget a block, which may be gone already."""

    @abstractmethod
    def use(self, chain: Sequence[bytes]) -> Sequence[bytes]:
        """A transfer has moved what it could. chain: its blocks, after those before them in the prefix. Mark what is stored
        of it as used, the last block as used longest ago; then evict what is too much, least recently used first. So parents
        outlive children. Returns what was evicted."""

    @abstractmethod
    def num_blocks(self) -> int:
        """Stored blocks; called after each transfer."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class BlockStoreConnector(QueuedConnector):
    """Serves an engine from a BlockStore."""

    def __init__(self, store: BlockStore, clock: Clock) -> None:
        self.name = store.name
        self._store = store
        self._workers = TransferWorkers(self._execute, self._answer, self._notify, clock)
        self._known = KnownBlocks(_MAX_KNOWN_HASHES)
        self._chains = PrefixChains()
        self._mutex = threading.Lock()  # of the questions
        self._questions: dict[str, tuple[Sequence[bytes], int]] = {}
        self._num_stored = self._num_evictions = self._num_errors = 0
        self._has_failed = False  # in the latest call
        self._is_closed = False

    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says, from what is known; what is not is asked on the store's thread."""
        if self._is_closed or lookup.block_size != self._layout.block_size:
            return 0
        request_id, block_hashes, first = lookup.request_id, lookup.block_hashes, num_computed_tokens // lookup.block_size
        self._chains.note_lookup(request_id, block_hashes)
        num_blocks = self._known.count_prefix(request_id, block_hashes, first)
        if num_blocks is None:
            with self._mutex:
                if len(self._questions) >= _MAX_QUESTIONS:
                    return 0
                self._questions[request_id] = (block_hashes, first)
            self._workers.request_background()
        return None if num_blocks is None else num_blocks * lookup.block_size

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Open the store, and start its thread."""
        self._pool, self._layout = pool, pool.layout
        self._max_blocks = self._store.open(pool.layout)
        self._workers.start_threads(1, f"kv-{self.name}")

    def close(self) -> None:
        """As the interface says. A store whose thread hangs is left as it is."""
        self._is_closed = True
        if self._workers.close():
            self._store.close()

    def stats(self) -> ConnectorStats:
        """As of the latest transfer."""
        block_bytes = BLOCK_HEADER_BYTES + self._layout.block_bytes
        return ConnectorStats(
            store_blocks=self._num_stored,
            store_bytes=self._num_stored * block_bytes,
            capacity_bytes=self._max_blocks * block_bytes,
            num_evictions=self._num_evictions,
            num_errors=self._num_errors,
            is_reachable=not self._has_failed,
            num_open_references=self._workers.num_in_flight,
        )

    # -- the store's thread --------------------------------------------------------------------------------------------
    def _answer(self) -> bool:
        with self._mutex:
            questions, self._questions = self._questions, {}
        try:
            for request_id, (block_hashes, first) in questions.items():
                names, epoch = list(block_hashes[first:]), self._known.epoch
                num_stored = self._try_count(names)
                self._known.add(names[:num_stored], epoch)
                self._known.note_check(request_id, names[num_stored] if num_stored < len(names) else None, epoch)
        finally:
            self._notify()
        return False

    def _try_count(self, names: Sequence[bytes]) -> int:
        try:
            with self._counting_faults():
                return self._store.count_stored(names)
        except Exception as error:  # of whatever library the store stands on: a miss
            logger.warning("the %s store was asked and failed: %r", self.name, error)
            return 0

    def _execute(self, transfer: Transfer) -> TransferResult:
        refused = refuse_bad_ids(transfer, self._pool.num_blocks)
        if refused is not None:
            return refused
        move = self._load if transfer.direction is TransferDirection.LOAD else self._save
        with self._counting_faults():
            return move(transfer)

    def _load(self, transfer: Transfer) -> TransferResult:
        names, num_ok, outcome = transfer.block_hashes, 0, TransferOutcome.OK
        for name, block_id in zip(names, transfer.block_ids, strict=True):
            outcome = self._workers.should_stop(transfer) or self._load_block(name, block_id)
            if outcome is not TransferOutcome.OK:
                break
            num_ok += 1
        self._note_use(transfer)
        self._known.add(names[:num_ok], self._known.epoch)
        self._known.remove(names[num_ok : num_ok + 1])
        return TransferResult(transfer.transfer_id, num_ok, outcome, num_ok * self._layout.block_bytes)

    def _load_block(self, name: bytes, block_id: int) -> TransferOutcome:
        stored = self._store.read(name)
        if stored is None:
            return TransferOutcome.MISS
        view = memoryview(stored)
        payload = view[BLOCK_HEADER_BYTES:]
        check = check_block(bytes(view[:BLOCK_HEADER_BYTES]), payload, self._layout.fingerprint, name)
        if check is BlockCheck.OK:
            self._pool.block(block_id)[:] = payload
            return TransferOutcome.OK
        self._store.remove(name)  # would block its key for good
        return TransferOutcome.CORRUPT

    def _save(self, transfer: Transfer) -> TransferResult:
        names, num_written, stopped = transfer.block_hashes, 0, None
        for name, block_id in zip(names, transfer.block_ids, strict=True):
            if (stopped := self._workers.should_stop(transfer)) is not None:
                break
            payload = self._pool.block(block_id)
            num_written += self._store.write(name, pack_block_header(self._layout.fingerprint, name, payload), payload)
        self._note_use(transfer)
        num_ok = self._store.count_stored(names)  # others may have had to go, or these for those before them
        self._known.add(names[:num_ok], self._known.epoch)
        outcome = TransferOutcome.OK if num_ok == len(names) else stopped or TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, num_written * self._layout.block_bytes)

    def _note_use(self, transfer: Transfer) -> None:
        ancestors = self._chains.note_transfer(transfer.request_id, transfer.block_hashes)
        evicted = self._store.use([*ancestors, *transfer.block_hashes])
        self._known.remove(evicted)
        self._num_evictions += len(evicted)
        self._num_stored = self._store.num_blocks()

    @contextlib.contextmanager
    def _counting_faults(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self._has_failed = True
            self._num_errors += 1
            raise
        self._has_failed = False
