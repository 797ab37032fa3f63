"""The `tiered` connector: several stores as one, fastest first, such as shared memory over disk over a server for all hosts.

It moves no bytes: each tier is a connector of its own. A lookup is the longest prefix over all tiers, a load takes
each run of blocks from the fastest one that has its first, a save goes to all or to the first. A tier that is dead, slow or
hangs costs its own blocks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from connectors.registry import create_connector as create_child
from connectors.slots.connector import SlotConnector
from connectors.tiered.browser import open_browser as open_browser  # what the registry looks for
from connectors.tiered.load import TieredLoads
from connectors.tiered.lookup import TieredLookups
from connectors.tiered.mover import TierMover
from connectors.tiered.options import TieredOptions, TierOptions, check_tier_connectors, parse_tiered_options
from connectors.tiered.save import TieredSaves
from connectors.tiered.tier import Tier
from connectors.tiered.tier_set import TierSet
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
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_BUSY_INTERVAL_S = 0.1  # how often deadlines are looked at
_IDLE_INTERVAL_S = 1.0
_REOPEN_PAUSE_S = 1.0
_CLOSE_TIMEOUT_S = 3.0
_MAX_PREFETCHED_REQUESTS = 4096
_DEMOTED_SHARE = 8  # write: back keeps one in so many of a tier's blocks, the coldest, in the next tier as well
_MAX_EARLY_RESULTS = 4096  # nobody has to ask for them


class TieredConnector(KVConnector):
    """The step thread asks and starts; a thread of ours carries on when children report. One lock, held for short times, is over
    all calls of children except close()."""

    name = "tiered"

    def __init__(self, options: TieredOptions, tiers: list[TierOptions], children: list[KVConnector], clock: Clock) -> None:
        self._options = options
        self._clock = clock
        self._first_children: list[KVConnector | None] = list(children)
        self._mutex = threading.Lock()
        self._tiers = TierSet([Tier(index, tier, options.lookup_wait_s, clock) for index, tier in enumerate(tiers)], clock)
        self._loads = TieredLoads(self._tiers, self._report, self._report_early, options.promote)
        self._saves = TieredSaves(self._tiers, options, self._report, self._report_early)
        self._lookups = TieredLookups(self._tiers, self._saves.seen)
        self._prefetched: dict[str, None] = {}
        self._open: set[int] = set()
        self._results: deque[TransferResult] = deque()
        self._early_results: deque[TransferResult] = deque(maxlen=_MAX_EARLY_RESULTS)
        self._has_news = False
        self._has_open_question = False
        self._wakeup = threading.Event()
        self._is_closed = False
        self._close_mutex = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kv-tiered", daemon=True)
        self._reopening: threading.Thread | None = None
        self._reopen_at_s = clock.now_s() + _REOPEN_PAUSE_S
        self._mover: TierMover | None = None
        if len(tiers) > 1 and (options.prefetch or options.write == "back"):
            create = [partial(_create_tier, tier, clock) for tier in tiers]
            find_coldest = self._find_coldest if options.write == "back" else None
            self._mover = TierMover(create, clock, options.staging_bytes, find_coldest, options.hand_down_s)

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says. None for lookup_wait_s at most because of one tier; then what the others have is the answer."""
        if self._is_closed or lookup.block_size != self._pool.layout.block_size:
            return 0
        with self._mutex:
            end = self._lookups.find_end(lookup, num_computed_tokens // lookup.block_size)
            self._has_open_question |= not end.is_known
            if end.is_slow and self._options.prefetch and lookup.request_id not in self._prefetched:
                self._prefetch(lookup, end.position)
        if self._lookups.has_unseen:
            self._wakeup.set()
        return end.position * lookup.block_size - num_computed_tokens if end.is_known else None

    def _prefetch(self, lookup: PrefixLookup, end: int) -> None:
        assert self._mover is not None
        while len(self._prefetched) >= _MAX_PREFETCHED_REQUESTS:
            del self._prefetched[next(iter(self._prefetched))]
        self._prefetched[lookup.request_id] = None
        self._mover.prefetch(lookup.request_id, lookup.block_hashes[:end])

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Open all tiers. One that cannot be used now is tried again every second; raises ConnectorError when none can."""
        self._pool = pool
        self._tiers.layout, self._tiers.num_pool_blocks = pool.layout, pool.num_blocks
        try:
            for tier in self._tiers.tiers:
                tier.connector = self._open_tier(tier)
            if all(tier.connector is None for tier in self._tiers.tiers):
                raise ConnectorError("none of the tiers can be opened")
        except BaseException:
            self.close()
            raise
        self._thread.start()
        if self._mover is not None:
            self._mover.start(pool.layout)

    def start_load(self, transfer: Transfer) -> None:
        """Begin a load."""
        if self._options.prefetch and self._mover is not None:
            self._mover.cancel(transfer.request_id)
        self._start(transfer)

    def start_save(self, transfer: Transfer) -> None:
        """Begin a save."""
        self._start(transfer)

    def poll_transfers(self) -> list[TransferResult]:
        """Results since the last call."""
        return _drain(self._results)

    def pin_prefix(self, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> bool:
        """In every tier that can."""
        with self._mutex:
            children = [tier.connector for tier in self._tiers.tiers if tier.connector is not None]
            answers = [child.pin_prefix(block_hashes, is_pinned=is_pinned) for child in children]
        return any(answers)

    def poll_early_results(self) -> list[TransferResult]:
        """Saves that some tier has, and transfers of which only a tier that hangs still uses the memory."""
        return _drain(self._early_results)

    def close(self) -> None:
        """As the interface says: one tier after the other."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            with self._mutex:
                self._is_closed = self._tiers.is_closed = True
            self._wakeup.set()
            for thread in (self._thread, self._reopening):
                if thread is not None and thread.is_alive():
                    thread.join(_CLOSE_TIMEOUT_S)
            if self._mover is not None:
                self._mover.stop()
            for child in [*(tier.connector for tier in self._tiers.tiers), *self._first_children]:
                if child is not None:
                    child.close()
            with self._mutex:
                self._settle_children()
                for tier in self._tiers.tiers:
                    for transfer in tier.unfinished():
                        self._on_child_result(transfer, TransferResult(transfer.transfer_id, 0, TransferOutcome.CANCELLED))
            if self._mover is not None:  # after the others, so that it can tell whether we are the last who have a tier
                self._mover.close()
        self._tell()

    def stats(self) -> ConnectorStats:
        """Sums over the tiers; store_blocks is the largest tier's, because tiers hold copies of each other's blocks."""
        found = [tier.stats() for tier in self._tiers.tiers]
        return ConnectorStats(
            store_bytes=sum(stats.store_bytes for stats in found),
            store_blocks=max(stats.store_blocks for stats in found),
            capacity_bytes=sum(stats.capacity_bytes for stats in found),
            num_evictions=sum(stats.num_evictions for stats in found),
            num_errors=sum(stats.num_errors for stats in found),
            is_reachable=any(stats.is_reachable for stats in found),
            complaint="; ".join(
                f"{tier.name}: {stats.complaint}" for tier, stats in zip(self._tiers.tiers, found, strict=True) if stats.complaint
            ),
            num_open_references=len(self._open) + sum(stats.num_open_references for stats in found),
            tiers=tuple(tier.tier_stats(stats) for tier, stats in zip(self._tiers.tiers, found, strict=True)),
        )

    # -- transfers, under the lock -------------------------------------------------------------------------------------
    def _start(self, transfer: Transfer) -> None:
        with self._mutex:
            if transfer.transfer_id in self._open:
                logger.warning("transfer %d was started twice; the second start is ignored", transfer.transfer_id)
                return
            self._open.add(transfer.transfer_id)
            refusal = self._refusal(transfer)
            if refusal is not None:
                self._report(TransferResult(transfer.transfer_id, 0, refusal[0], detail=refusal[1]))
            elif transfer.direction is TransferDirection.LOAD:
                self._loads.start(transfer)
            else:
                while self._lookups.has_unseen:
                    self._lookups.count_some()
                self._saves.start(transfer)
        self._tell()

    def _refusal(self, transfer: Transfer) -> tuple[TransferOutcome, str] | None:
        """The outcome of a transfer that no tier needs to see."""
        block_ids, num_blocks = transfer.block_ids, self._pool.num_blocks
        if self._is_closed:
            return TransferOutcome.CANCELLED, "the connector is closed"
        if len(block_ids) != len(transfer.block_hashes) or not all(0 <= block_id < num_blocks for block_id in block_ids):
            return TransferOutcome.ERROR, "block ids are outside the pool or not one per hash"
        if self._clock.now_s() > transfer.deadline_s:
            return TransferOutcome.TIMEOUT, "not begun in time"
        return (TransferOutcome.OK, "") if not block_ids else None

    def _settle_children(self) -> None:
        now_s = self._clock.now_s()
        for tier in self._tiers.tiers:
            for transfer, result in tier.poll():
                self._on_child_result(transfer, result)
            for transfer in tier.newly_hung(now_s):
                self._loads.on_hung(transfer)
                self._saves.on_hung(transfer)

    def _on_child_result(self, transfer: Transfer, result: TransferResult) -> None:
        if not self._loads.on_result(transfer, result):
            self._saves.on_result(transfer, result)

    def _report(self, result: TransferResult) -> None:
        self._open.discard(result.transfer_id)
        self._results.append(result)
        self._has_news = True

    def _report_early(self, result: TransferResult) -> None:
        self._early_results.append(result)
        self._has_news = True

    def _tell(self) -> None:
        """Wake the engine if there is something for it. Without the lock."""
        has_news, self._has_news = self._has_news, False
        if has_news and self.on_result is not None:
            self.on_result()

    # -- the thread that carries on ------------------------------------------------------------------------------------
    def _run(self) -> None:
        while True:
            self._wakeup.wait(_BUSY_INTERVAL_S if self._open else _IDLE_INTERVAL_S)
            self._wakeup.clear()
            if self._is_closed:
                return
            while self._lookups.has_unseen:
                with self._mutex:
                    self._lookups.count_some()
            if self._open:  # else a child called because of a question, and no lookup shall wait for the lock then
                with self._mutex:
                    self._settle_children()
            if self._has_open_question:
                self._has_open_question = False  # before the engine is told: it asks again, and sets it again
                self._has_news = True
            self._tell()
            self._reopen_tiers()

    def _find_coldest(self, tier_index: int) -> list[list[bytes]]:
        child = self._tiers.tiers[tier_index].connector
        return child.coldest_runs(_DEMOTED_SHARE) if isinstance(child, SlotConnector) else []

    def _reopen_tiers(self) -> None:
        """Try tiers that could not be opened, on a thread of its own: opening may hang."""
        lost = [tier for tier in self._tiers.tiers if tier.connector is None]
        is_at_it = self._reopening is not None and self._reopening.is_alive()
        if not lost or is_at_it or self._clock.now_s() < self._reopen_at_s:
            return
        self._reopen_at_s = self._clock.now_s() + _REOPEN_PAUSE_S

        def reopen() -> None:
            for tier in lost:
                try:
                    child = self._open_tier(tier)
                except ConfigError as error:  # such as no room for a store that was there before
                    tier.note_unopened(error)
                    continue
                with self._mutex:
                    if not self._is_closed:
                        tier.connector, child = child, None
                if child is not None:
                    child.close()

        self._reopening = threading.Thread(target=reopen, name="kv-tiered-open", daemon=True)
        self._reopening.start()

    def _open_tier(self, tier: Tier) -> KVConnector | None:
        child, self._first_children[tier.index] = self._first_children[tier.index], None
        if child is None:
            child = _create_tier(tier.options, self._clock)
        child.on_result = self._wakeup.set
        child.cluster_secret = self.cluster_secret
        try:
            child.register_kv_cache(self._pool)
            self.kv_address = self.kv_address or child.kv_address
        except ConfigError as error:
            child.close()
            raise _renamed(error, tier.name) from error
        except Exception as error:
            tier.note_unopened(error)
            child.close()
            return None
        return child


def _drain(results: deque[TransferResult]) -> list[TransferResult]:
    found = []
    while results:
        found.append(results.popleft())
    return found


def _create_tier(options: TierOptions, clock: Clock) -> KVConnector:
    try:
        return create_child(options.connector, options.options, clock)
    except ConfigError as error:
        raise _renamed(error, options.name) from error


def _renamed(error: ConfigError, tier_name: str) -> ConfigError:
    """A child's complaint, about the option as the user knows it."""
    leaf = "connector" if error.field == "connector.name" else error.field.removeprefix("connector.options.")
    return ConfigError(f"connector.options.{tier_name}.{leaf}", error.value, error.allowed)


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see TieredOptions and TierOptions. Raises ConfigError."""
    own, tiers = parse_tiered_options(options)
    check_tier_connectors(tiers)
    children = [_create_tier(tier, clock) for tier in tiers]
    if own.write == "back" and not isinstance(children[0], SlotConnector):
        raise ConfigError("connector.options.write", own.write, "through, where the first tier cannot say what it will evict")
    return TieredConnector(own, tiers, children, clock)
