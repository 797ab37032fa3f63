"""The `lmcache` connector: LMCache inside this process, over its native file tier, or a server of LMCache's on this host.

Objects hold several of our blocks, each with our header, since LMCache verifies nothing; an index says which objects there are.
Every wait is bounded: what LMCache has not done in time is a miss. Nothing of LMCache is imported unless it is chosen.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from connectors.known_blocks import KnownBlocks
from connectors.lmcache.block_transfers import BlockTransfers
from connectors.lmcache.object_store import ObjectStore
from connectors.lmcache.objects import LMCacheObjects
from connectors.lmcache.options import SERVER, LMCacheOptions, parse_options
from connectors.lmcache.server_objects import ServerObjects
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.transfer_log import TransferLog
from connectors.transfer_workers import TransferWorkers, failed, refuse_bad_ids
from core.clock import Clock
from core.errors import ConfigError, ConnectorError
from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_KNOWN_BLOCKS = 1_000_000
_REFRESH_PAUSE_S = 0.05  # how old what a lookup believes may get
_CLOSE_TIMEOUT_S = 10.0
_REOPEN_PAUSE_S = 1.0
_PASSING_FAULTS = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT)  # of a disk; others are of the configuration


class LMCacheConnector(QueuedConnector):
    """Blocks in LMCache. The step thread reads what is known and queues; worker threads do all that can wait."""

    name = "lmcache"

    def __init__(self, options: LMCacheOptions, clock: Clock) -> None:
        self._options, self._clock = options, clock
        self._workers = TransferWorkers(self._execute, self._look_around, self._notify, clock)
        self._known = KnownBlocks(_MAX_KNOWN_BLOCKS)
        self._chains = PrefixChains()
        self._questions: deque[tuple[str, Sequence[bytes], int]] = deque()
        self._looked_at_s = float("-inf")
        self._objects: ObjectStore | None = None
        self._transfers: BlockTransfers | None = None
        self._open_mutex = threading.Lock()  # of the objects until they are there, and the time below
        self._open_at_s = clock.now_s()
        self._fault = ""  # the last that was logged of opening them
        self._close_mutex = threading.Lock()
        self._error_mutex = threading.Lock()
        self._num_errors = 0
        self._log = TransferLog(logger, self.name)
        self._is_closed = False

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says, from what is known of the store."""
        if self._is_closed or lookup.block_size != self._layout.block_size:
            return 0
        if self._objects is None:
            self._workers.request_background()
            return 0
        request_id, block_hashes = lookup.request_id, lookup.block_hashes
        self._chains.note_lookup(request_id, block_hashes)
        first = num_computed_tokens // lookup.block_size
        num_blocks = self._known.count_prefix(request_id, block_hashes, first)
        if num_blocks is None or self._known.should_check_again(request_id):
            self._questions.append((request_id, block_hashes, first))
            self._workers.request_background()
        elif self._clock.now_s() - self._looked_at_s > _REFRESH_PAUSE_S:
            self._workers.request_background()
        return None if num_blocks is None else num_blocks * lookup.block_size

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Start LMCache and the threads. Raises ConnectorError where it cannot be started; a server may come later, and a disk
        that fails is tried again."""
        self._pool, self._layout = pool, pool.layout
        try:
            self._objects = self._open_objects(pool.layout)
        except ConfigError:
            raise
        except Exception as error:  # whatever LMCache raises: it promises nothing
            if not isinstance(error, TimeoutError) and getattr(error, "errno", None) not in _PASSING_FAULTS:
                raise ConnectorError(f"LMCache cannot be started with {self._options}: {error!r}") from error
            self._fault = str(error)
            logger.error("LMCache cannot be started and is tried again later: %s", self._fault)
            self._num_errors += 1
        self._transfers = BlockTransfers(pool, self._workers, self._chains, self._known)
        self._workers.start_threads(self._options.num_threads, "kv-lmcache")
        self._workers.request_background()

    def _open_objects(self, layout: KVLayout) -> ObjectStore:
        options = self._options
        if options.mode == SERVER:
            return ServerObjects(
                options.server,
                options.http,
                options.namespace,
                layout,
                options.capacity_bytes,
                options.op_timeout_s,
                self._clock,
            )
        return LMCacheObjects(
            options.path,
            layout,
            options.file_capacity_bytes,
            options.memory_bytes,
            options.cache_in_memory,
            options.op_timeout_s,
            options.num_threads,
        )

    def _opened(self) -> ObjectStore | None:
        """The objects; opened now, if they could not be at the start. Worker threads."""
        if self._objects is not None or self._is_closed:
            return self._objects
        with self._open_mutex:
            if self._objects is None and self._clock.now_s() >= self._open_at_s:
                try:
                    self._objects = self._open_objects(self._layout)
                except Exception as error:  # whatever LMCache raises: it promises nothing
                    self._open_at_s = self._clock.now_s() + _REOPEN_PAUSE_S
                    if str(error) != self._fault:
                        self._fault = str(error)
                        logger.warning("LMCache still cannot be started: %s", self._fault)
            return self._objects

    def close(self) -> None:
        """As the interface says. LMCache ends on a thread of its own, which is left behind if it hangs."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            self._is_closed = True
            has_stopped = self._workers.close()
            objects, self._objects = self._objects, None
            if objects is not None and has_stopped:
                thread = threading.Thread(target=objects.close, name="kv-lmcache-close", daemon=True)
                thread.start()
                thread.join(_CLOSE_TIMEOUT_S)

    def stats(self) -> ConnectorStats:
        """As last seen; headers are counted."""
        num_open, objects, transfers = self._workers.num_in_flight, self._objects, self._transfers
        num_evictions = 0 if transfers is None else transfers.num_evictions
        if objects is None:
            return ConnectorStats(
                num_errors=self._num_errors, num_open_references=num_open, num_evictions=num_evictions, is_reachable=False
            )
        return ConnectorStats(
            store_bytes=objects.directory.num_blocks * objects.unit_bytes,
            store_blocks=objects.directory.num_blocks,
            capacity_bytes=objects.capacity_bytes,
            num_evictions=num_evictions,
            num_errors=self._num_errors + objects.num_faults,
            is_reachable=objects.why_away is None,
            num_open_references=num_open,
        )

    # -- worker threads ------------------------------------------------------------------------------------------------
    def _look_around(self) -> bool:
        """Bring what is known up to date, then answer questions that were asked before."""
        objects = self._opened()
        if objects is None:  # also while nobody asks for anything: whoever watches wants to see that it is back
            self._workers.request_background(_REOPEN_PAUSE_S)
            return False
        questions = [self._questions.popleft() for _ in range(len(self._questions))]
        self._learn(objects)
        if objects.why_away is not None:
            self._workers.request_background(_REOPEN_PAUSE_S)
        self._looked_at_s = self._clock.now_s()
        for request_id, block_hashes, first in questions:
            chain = itertools.islice(block_hashes, first, None)
            present = list(itertools.takewhile(objects.directory.find, chain))
            end = first + len(present)
            absent = block_hashes[end] if end < len(block_hashes) else None
            self._known.add(present, self._known.epoch)
            self._known.note_check(request_id, absent, self._known.epoch)
        if questions:
            self._notify()
        objects.tidy()
        return bool(self._questions)

    def _learn(self, objects: ObjectStore) -> None:
        came, went = objects.refresh()
        if went:
            self._known.begin_epoch()
            self._known.remove(went)
        self._known.add(came, self._known.epoch)

    def _execute(self, transfer: Transfer) -> TransferResult:
        refused = refuse_bad_ids(transfer, self._pool.num_blocks)
        result = refused if refused is not None else self._move(transfer)
        if result.outcome not in (TransferOutcome.OK, TransferOutcome.MISS, TransferOutcome.CANCELLED):
            with self._error_mutex:
                self._num_errors += 1
            self._log.note(transfer, result)
        return result

    def _move(self, transfer: Transfer) -> TransferResult:
        objects, transfers = self._opened(), self._transfers
        if objects is None or transfers is None:
            outcome = TransferOutcome.CANCELLED if self._is_closed else TransferOutcome.ERROR
            return failed(transfer, outcome, "the connector is closed, or could not be opened yet")
        try:
            self._learn(objects)
            if objects.why_away is not None:
                return failed(transfer, TransferOutcome.ERROR, objects.why_away)
            if transfer.direction is TransferDirection.LOAD:
                return transfers.load(objects, transfer)
            return transfers.save(objects, transfer)
        except Exception as error:  # whatever LMCache raises: it promises nothing
            return failed(transfer, TransferOutcome.ERROR, repr(error))


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see LMCacheOptions. Raises ConfigError."""
    return LMCacheConnector(parse_options(options), clock)
