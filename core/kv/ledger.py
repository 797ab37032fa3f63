"""Every movement of KV between the pool and the store, from start to last word: the one place that knows what a transfer pins.

Deadlines, late and duplicate completions, single flight, failures of the store and the choice between loading and
computing are handled here once, so that connectors only move bytes and the scheduler only sees ended transfers. Step thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from core.clock import Clock
from core.kv.block_pool import BlockPool
from core.kv.circuit_breaker import CircuitBreaker
from core.kv.connector import (
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.kv_events import KVEventLog
from core.kv.load_cost import LoadOrRecompute
from core.kv.pin_budget import PinBudget
from core.stats import EngineStats

_logger = logging.getLogger(__name__)
_FAULTS = (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
_UNFINISHED = 2.0  # a load of which nothing came in its time would have taken longer; how much longer, nobody knows
_MIN_PATIENCE_S = 0.5  # a store that is well may take this long on a busy machine, however short the prompt


@dataclass(frozen=True, slots=True)
class EndedTransfer:
    """A transfer that its request need not wait for any longer. num_blocks_ok leading blocks arrived, or were stored."""

    transfer: Transfer
    num_blocks_ok: int
    outcome: TransferOutcome


@dataclass(slots=True)
class _Entry:
    transfer: Transfer
    pinned_block_ids: list[int]
    started_s: float
    num_bytes_ahead: int  # of other loads, when it was started
    is_awaited: bool  # a save that a handoff waits for
    is_reported: bool = False  # its outcome is told; what is left are pins, until the connector lets go of the memory
    is_overdue: bool = False  # its deadline passed before that
    is_silent: bool = False  # and as much time again: its store is not slow, it hangs

    @property
    def allowance_s(self) -> float:
        """The time it was given."""
        return self.transfer.deadline_s - self.started_s


class TransferLedger:
    """All transfers of one engine over one connector (None: no store, every lookup is a miss and nothing is saved)."""

    def __init__(
        self,
        connector: KVConnector | None,
        pool: BlockPool,
        clock: Clock,
        stats: EngineStats,
        *,
        block_size: int,
        block_bytes: int,
        load_timeout_s: float,
        save_timeout_s: float,
        always_load: bool = False,
    ) -> None:
        self._connector = connector
        self._pool = pool
        self._clock = clock
        self._stats = stats
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._load_timeout_s, self._save_timeout_s = load_timeout_s, save_timeout_s
        self._always_load = always_load
        self._breaker = CircuitBreaker()
        self._entry_by_id: dict[int, _Entry] = {}
        self._transfer_id_by_loading_hash: dict[bytes, int] = {}
        self._num_saves_by_request: dict[str, int] = {}
        self._num_bytes_loading = 0
        self._budget = PinBudget(pool.num_blocks)
        self._next_transfer_id = 1
        self._is_closed = False
        self.cost = LoadOrRecompute()
        self.event_log: KVEventLog | None = None  # told what the store turned out to hold, if anybody wants to know

    # -- questions -----------------------------------------------------------------------------------------------------
    @property
    def num_in_flight(self) -> int:
        """Transfers that the connector has not reported yet, overdue ones included."""
        return len(self._entry_by_id)

    @property
    def num_overdue(self) -> int:
        """Transfers past their deadline whose blocks are still pinned."""
        return sum(entry.is_overdue for entry in self._entry_by_id.values())

    @property
    def num_pins(self) -> int:
        """Block references that transfers hold; for audits."""
        return sum(len(entry.pinned_block_ids) for entry in self._entry_by_id.values())

    @property
    def is_circuit_open(self) -> bool:
        """Whether the store is not asked now, because it kept failing."""
        return not self._breaker.allows(self._clock.now_s())

    @property
    def complaint(self) -> str:
        """See CircuitBreaker.complaint."""
        return self._breaker.complaint(self._clock.now_s())

    def num_saves_of(self, request_id: str) -> int:
        """Saves of a request that may still become visible in time: reported or overdue ones do not count."""
        return self._num_saves_by_request.get(request_id, 0)

    def loading_transfer_id(self, block_hash: bytes) -> int | None:
        """The transfer that is bringing this block, if one is."""
        return self._transfer_id_by_loading_hash.get(block_hash)

    def num_external_blocks(
        self, request_id: str, block_hashes: Sequence[bytes], num_local_blocks: int, sources: tuple[str, ...] = ()
    ) -> int | None:
        """Blocks after the first num_local_blocks that the store says it can supply. None: not known yet. See PrefixLookup."""
        if self._connector is None or not self._breaker.allows(self._clock.now_s()):
            return 0
        lookup = PrefixLookup(request_id, block_hashes, self._block_size, sources)
        try:
            num_tokens = self._connector.get_num_new_matched_tokens(lookup, num_local_blocks * self._block_size)
        except Exception as error:
            self._record_connector_exception("lookup", error)
            return 0
        if num_tokens is None:
            return None
        num_blocks = num_tokens // self._block_size
        return max(0, min(num_blocks, len(block_hashes) - num_local_blocks))

    def should_load(self, num_blocks: int, num_local_blocks: int) -> bool:
        """Whether loading so many blocks, after num_local_blocks, is predicted to be faster than computing them, or wanted
        in any case."""
        if self._always_load:
            _count(self._stats.load_or_recompute, "load.always")
            return True
        choice, reason = self.cost.should_load(
            num_blocks * self._block_size,
            num_local_blocks * self._block_size,
            num_blocks * self._block_bytes,
            self._num_bytes_loading,
        )
        _count(self._stats.load_or_recompute, f"{'load' if choice else 'recompute'}.{reason}")
        return choice

    def has_room(self, direction: TransferDirection, num_blocks: int) -> bool:
        """Whether a transfer may pin so many blocks now; see PinBudget."""
        return self._budget.has_room(direction, num_blocks, self._clock.now_s())

    def patience_s(self, num_tokens: int, first_position: int) -> float:
        """How long a request should wait for the store at most, instead of computing num_tokens from first_position on: as long
        as that takes, so that a store that hangs costs no more than a few times the computing. Infinite while nothing is known
        of it, or where loading is wanted in any case; then the configured timeouts are all that bounds it."""
        recompute_s = None if self._always_load else self.cost.predict_recompute_s(num_tokens, first_position)
        return float("inf") if recompute_s is None else max(_MIN_PATIENCE_S, recompute_s)

    # -- starting ------------------------------------------------------------------------------------------------------
    def start_load(
        self, request_id: str, block_ids: Sequence[int], block_hashes: Sequence[bytes], held_block_ids: Sequence[int]
    ) -> int | None:
        """Fill freshly allocated blocks (the caller's reference to them passes to the ledger).

        held_block_ids: cached blocks in front of them that must not be evicted meanwhile. Returns the transfer's id, or None when
        the connector declined; the blocks are given back then.
        """
        self._pool.add_references(held_block_ids)
        pins = [*held_block_ids, *block_ids]
        timeout_s = min(
            self._load_timeout_s, self.patience_s(len(block_ids) * self._block_size, len(held_block_ids) * self._block_size)
        )
        transfer_id = self._start(TransferDirection.LOAD, request_id, block_ids, block_hashes, pins, timeout_s)
        if transfer_id is not None:
            self._num_bytes_loading += len(block_ids) * self._block_bytes
            for block_hash in block_hashes:
                self._transfer_id_by_loading_hash[block_hash] = transfer_id
        return transfer_id

    def start_save(
        self, request_id: str, block_ids: Sequence[int], block_hashes: Sequence[bytes], *, is_awaited: bool = True
    ) -> int | None:
        """Store blocks, pinned until the connector has read them. None: there is no store, it is not to be asked now, or it is so
        far behind that its saves pin too much of the pool.

        is_awaited: the request's handoff is complete only when this has ended.
        """
        if self._connector is None or not self._breaker.allows(self._clock.now_s()):
            return None
        if not self.has_room(TransferDirection.SAVE, len(block_ids)):
            _count(self._stats.transfer_blocks, "save.declined", len(block_ids))
            return None
        self._pool.add_references(block_ids)
        transfer_id = self._start(
            TransferDirection.SAVE, request_id, block_ids, block_hashes, list(block_ids), self._save_timeout_s, is_awaited
        )
        if transfer_id is not None and is_awaited:
            self._num_saves_by_request[request_id] = self._num_saves_by_request.get(request_id, 0) + 1
        return transfer_id

    def _start(
        self,
        direction: TransferDirection,
        request_id: str,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        pins: list[int],
        timeout_s: float,
        is_awaited: bool = False,
    ) -> int | None:
        assert self._connector is not None and len(block_ids) == len(block_hashes)
        now_s = self._clock.now_s()
        transfer = Transfer(
            transfer_id=self._next_transfer_id,
            direction=direction,
            request_id=request_id,
            block_ids=tuple(block_ids),
            block_hashes=tuple(block_hashes),
            deadline_s=now_s + timeout_s,
        )
        self._next_transfer_id += 1
        try:
            if direction is TransferDirection.LOAD:
                self._connector.start_load(transfer)
            else:
                self._connector.start_save(transfer)
        except Exception as error:
            self._record_connector_exception(direction.value, error)
            self._pool.release_references(reversed(pins))
            return None
        self._entry_by_id[transfer.transfer_id] = _Entry(transfer, pins, now_s, self._num_bytes_loading, is_awaited)
        self._budget.begin(direction, transfer.transfer_id, len(pins), now_s)
        return transfer.transfer_id

    # -- ending --------------------------------------------------------------------------------------------------------
    def poll(self) -> list[EndedTransfer]:
        """Transfers that ended since the last call, by the connector's word or by their deadline; each exactly once.

        Loaded blocks are findable in the pool when this returns; whoever waits for them gets them as a local hit.
        """
        if not self._entry_by_id or self._connector is None:
            return []
        ended = []
        early: list[TransferResult] = []
        results: list[TransferResult] = []
        try:
            self._unpin(self._connector.poll_released())
            early = self._connector.poll_early_results()
            results = self._connector.poll_transfers()
        except Exception as error:
            self._record_connector_exception("poll", error)
        for result in early:
            entry = self._entry_by_id.get(result.transfer_id)
            if entry is not None and not entry.is_reported:
                ended.append(self._report(entry, result))
        for result in results:
            if (end := self._settle(result)) is not None:
                ended.append(end)
        now_s = self._clock.now_s()
        for entry in self._entry_by_id.values():
            is_late = not entry.is_overdue and now_s >= entry.transfer.deadline_s
            if is_late and (end := self._give_up(entry, now_s)) is not None:
                ended.append(end)
            if entry.is_overdue and not entry.is_silent and now_s >= entry.transfer.deadline_s + entry.allowance_s:
                entry.is_silent = True
                self._breaker.trip(now_s)
                self._stats.circuit_is_open = True
        return ended

    def _unpin(self, transfer_ids: Sequence[int]) -> None:
        """The connector has a copy of what these save; their outcome is still awaited."""
        for transfer_id in transfer_ids:
            entry = self._entry_by_id.get(transfer_id)
            if entry is not None and entry.transfer.direction is TransferDirection.SAVE:
                self._pool.release_references(reversed(entry.pinned_block_ids))
                entry.pinned_block_ids.clear()
                self._budget.end(TransferDirection.SAVE, transfer_id)

    def close(self) -> None:
        """Close the connector and take back every pin; afterwards nothing is in flight."""
        if self._connector is None:
            return
        self._is_closed = True
        try:
            self._connector.close()
            for result in self._connector.poll_transfers():
                self._settle(result)
        except Exception as error:
            self._record_connector_exception("close", error)

    def _settle(self, result: TransferResult) -> EndedTransfer | None:
        entry = self._entry_by_id.pop(result.transfer_id, None)
        if entry is None:  # a duplicate, or an id that was never given out: nothing is pinned for it
            _logger.warning("ignored a result for unknown transfer %d (%s)", result.transfer_id, result.outcome.value)
            return None
        transfer = entry.transfer
        self._budget.end(transfer.direction, transfer.transfer_id)
        _count(self._stats.transfer_bytes, transfer.direction.value, result.moved_bytes)
        end = None
        if not entry.is_reported:
            end = self._report(entry, result)
        elif entry.is_overdue:
            _count(self._stats.transfer_blocks, f"{transfer.direction.value}.late", len(transfer.block_ids))
            if transfer.direction is TransferDirection.LOAD and not entry.is_silent:
                self._observe_load(entry, result)
        if transfer.direction is TransferDirection.LOAD:
            num_ok = self._hash_loaded(transfer, result)  # verified by the connector, so also a late arrival is good content
            if result.wants_save and num_ok and not (entry.is_overdue or self._is_closed):
                self.start_save(
                    transfer.request_id, transfer.block_ids[:num_ok], transfer.block_hashes[:num_ok], is_awaited=False
                )
        self._pool.release_references(reversed(entry.pinned_block_ids))
        return end

    def _report(self, entry: _Entry, result: TransferResult) -> EndedTransfer:
        """Act on a transfer's outcome, whether or not the connector still uses the blocks' memory."""
        entry.is_reported = True
        transfer = entry.transfer
        num_ok = max(0, min(result.num_blocks_ok, len(transfer.block_ids)))
        now_s = self._clock.now_s()
        self._record_outcome(transfer, num_ok, result.outcome, now_s)
        self._end_saving(entry)
        self._note_store(transfer, num_ok, result.outcome)
        if transfer.direction is TransferDirection.LOAD:
            self._end_loading(transfer)
            self._observe_load(entry, result)
            self._hash_loaded(transfer, result)
        return EndedTransfer(transfer, num_ok, result.outcome)

    def _note_store(self, transfer: Transfer, num_ok: int, outcome: TransferOutcome) -> None:
        """What moved is in the store; the first block that a load missed is not, and of those behind it nothing is known."""
        if self.event_log is None:
            return
        self.event_log.note_store(transfer.block_hashes[:num_ok], is_stored=True)
        if transfer.direction is TransferDirection.LOAD and outcome is TransferOutcome.MISS:
            self.event_log.note_store(transfer.block_hashes[num_ok : num_ok + 1], is_stored=False)

    def _observe_load(self, entry: _Entry, result: TransferResult) -> None:
        """Learn what loading costs, also from a load that took longer than it was worth: a store that answers late is slow."""
        elapsed_s = self._clock.now_s() - entry.started_s
        num_ok = max(0, min(result.num_blocks_ok, len(entry.transfer.block_ids)))
        if num_ok:
            self.cost.observe_load(num_ok * self._block_bytes + entry.num_bytes_ahead, result.duration_s or elapsed_s)
        elif result.outcome is TransferOutcome.TIMEOUT and elapsed_s >= entry.allowance_s:
            num_bytes = len(entry.transfer.block_ids) * self._block_bytes
            self.cost.observe_load(num_bytes + entry.num_bytes_ahead, _UNFINISHED * elapsed_s)

    def _hash_loaded(self, transfer: Transfer, result: TransferResult) -> int:
        """Make the blocks that a load brought findable; how many those are."""
        num_ok = max(0, min(result.num_blocks_ok, len(transfer.block_ids)))
        for block_id, block_hash in zip(transfer.block_ids[:num_ok], transfer.block_hashes, strict=False):
            if self._pool.block_hash(block_id) is None:
                self._pool.set_hash(block_id, block_hash)
        return num_ok

    def _give_up(self, entry: _Entry, now_s: float) -> EndedTransfer | None:
        """At a transfer's deadline: its request need not wait any longer. None when it does not already."""
        entry.is_overdue = True
        if entry.is_reported:
            return None
        entry.is_reported = True
        transfer = entry.transfer
        if transfer.direction is TransferDirection.LOAD:
            self._end_loading(transfer)
        self._record_outcome(transfer, 0, TransferOutcome.TIMEOUT, now_s)
        self._end_saving(entry)
        return EndedTransfer(transfer, 0, TransferOutcome.TIMEOUT)

    def _end_loading(self, transfer: Transfer) -> None:
        """Forget that these blocks are on their way. Safe to repeat: a hash may be loading again by another transfer."""
        is_current = False
        for block_hash in transfer.block_hashes:
            if self._transfer_id_by_loading_hash.get(block_hash) == transfer.transfer_id:
                del self._transfer_id_by_loading_hash[block_hash]
                is_current = True
        if is_current:
            self._num_bytes_loading -= len(transfer.block_ids) * self._block_bytes

    def _end_saving(self, entry: _Entry) -> None:
        if entry.is_awaited:
            entry.is_awaited = False
            request_id = entry.transfer.request_id
            num_left = self._num_saves_by_request[request_id] - 1
            if num_left:
                self._num_saves_by_request[request_id] = num_left
            else:
                del self._num_saves_by_request[request_id]

    def _record_outcome(self, transfer: Transfer, num_ok: int, outcome: TransferOutcome, now_s: float) -> None:
        direction = transfer.direction.value
        _count(self._stats.transfer_blocks, f"{direction}.ok", num_ok)
        if num_failed := len(transfer.block_ids) - num_ok:
            failure = outcome if outcome is not TransferOutcome.OK else TransferOutcome.MISS
            _count(self._stats.transfer_blocks, f"{direction}.{failure.value}", num_failed)
        if outcome in _FAULTS:
            _count(self._stats.connector_errors, f"{direction}.{outcome.value}")
            self._breaker.record_failure(now_s)
        else:
            self._breaker.record_success()
        self._stats.circuit_is_open = not self._breaker.allows(now_s)

    def _record_connector_exception(self, call: str, error: Exception) -> None:
        """The boundary around every connector call: its faults cost misses, never the engine."""
        _logger.warning("connector %s failed in %s: %r", self._connector and self._connector.name, call, error)
        _count(self._stats.connector_errors, f"{call}.exception")
        now_s = self._clock.now_s()
        self._breaker.record_failure(now_s)
        self._stats.circuit_is_open = not self._breaker.allows(now_s)


def _count(counts: dict[str, int], key: str, amount: int = 1) -> None:
    if amount:
        counts[key] = counts.get(key, 0) + amount
