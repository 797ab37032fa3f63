"""One tier of the tiered connector: its child connector, what is in flight there, and whether it is worth asking.

Not safe for threads: whoever calls holds the tiered connector's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.tiered.options import TierOptions
from core.clock import Clock
from core.kv.circuit_breaker import CircuitBreaker
from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    TierStats,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)

logger = logging.getLogger(__name__)

_FAULTS = (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
_MAX_WAITING_REQUESTS = 4096
_HUNG_AFTER_S = 0.3  # past its deadline: it may be about to say that it gave up


@dataclass(slots=True)
class _InFlight:
    transfer: Transfer
    is_hung: bool = False  # past its deadline without a word


class Tier:
    """A child connector that may fail, hang or be slow at the cost of its own blocks only.

    After three faults in a row it is left alone for half a second, and longer each time, up to four. While a transfer of it
    hangs, it gets no others. connector is None while it could not be opened.
    """

    def __init__(self, index: int, options: TierOptions, lookup_wait_s: float, clock: Clock) -> None:
        self.index = index
        self.options = options
        self.name = options.name
        self.connector: KVConnector | None = None
        self.num_pinned_blocks = 0  # by saves in flight
        self.num_hit_blocks = 0
        self._clock = clock
        self._lookup_wait_s = lookup_wait_s
        self._moves = CircuitBreaker()
        self._answers = CircuitBreaker()
        self._fault = ""  # the last that was logged of opening it
        self._in_flight: dict[int, _InFlight] = {}
        self._num_hung = 0
        self._waiting_until_s: dict[str, float] = {}  # by request, whose answer is not known yet

    def is_usable(self, now_s: float) -> bool:
        """Whether it may be given transfers."""
        if self.connector is None or self._num_hung or not self._moves.allows(now_s):
            return False
        return self.connector.stats().is_reachable

    # -- lookups -------------------------------------------------------------------------------------------------------
    def count(self, lookup: PrefixLookup, first: int) -> int | None:
        """Blocks from the first-th on that it can supply; None: not known yet."""
        if self.connector is None or self._num_hung or not self._moves.allows(self._clock.now_s()):
            return 0
        try:
            num_tokens = self.connector.get_num_new_matched_tokens(lookup, first * lookup.block_size)
        except Exception as error:  # the boundary around a child: it costs its own blocks
            self._record_exception("lookup", error)
            return 0
        return num_tokens if num_tokens is None else num_tokens // lookup.block_size

    def should_wait(self, request_id: str) -> bool:
        """After an answer that is not known yet: whether it is worth waiting for. A tier that is late three times is not waited
        for until it has answered in time again."""
        now_s = self._clock.now_s()
        until_s = self._waiting_until_s.get(request_id)
        if until_s is None:
            if len(self._waiting_until_s) >= _MAX_WAITING_REQUESTS:
                del self._waiting_until_s[next(iter(self._waiting_until_s))]
            is_trusted = self._answers.allows(now_s)
            self._waiting_until_s[request_id] = until_s = now_s + self._lookup_wait_s if is_trusted else float("-inf")
        elif until_s <= now_s and until_s != float("-inf"):  # it was waited for in vain; say so once
            self._answers.record_failure(now_s)
            self._waiting_until_s[request_id] = until_s = float("-inf")
        return now_s < until_s

    def note_answer(self, request_id: str) -> None:
        """It answered a question that it had not known the answer to."""
        if (until_s := self._waiting_until_s.pop(request_id, None)) is not None and self._clock.now_s() < until_s:
            self._answers.record_success()

    # -- transfers -----------------------------------------------------------------------------------------------------
    def start(self, transfer: Transfer) -> bool:
        """Start a transfer of the child's; False when it declined."""
        assert self.connector is not None
        try:
            if transfer.direction is TransferDirection.LOAD:
                self.connector.start_load(transfer)
            else:
                self.connector.start_save(transfer)
        except Exception as error:
            self._record_exception(transfer.direction.value, error)
            return False
        self._in_flight[transfer.transfer_id] = _InFlight(transfer)
        if transfer.direction is TransferDirection.SAVE:
            self.num_pinned_blocks += len(transfer.block_ids)
        return True

    def poll(self) -> list[tuple[Transfer, TransferResult]]:
        """Transfers that the child has reported since the last call."""
        if self.connector is None or not self._in_flight:
            return []
        try:
            results = self.connector.poll_transfers()
        except Exception as error:
            self._record_exception("poll", error)
            return []
        ended = []
        for result in results:
            entry = self._in_flight.pop(result.transfer_id, None)
            if entry is None:
                continue
            transfer = entry.transfer
            self._num_hung -= entry.is_hung
            if transfer.direction is TransferDirection.SAVE:
                self.num_pinned_blocks -= len(transfer.block_ids)
            else:
                self.num_hit_blocks += result.num_blocks_ok
            if result.outcome in _FAULTS:
                self._moves.record_failure(self._clock.now_s())
            elif result.outcome is not TransferOutcome.CANCELLED:
                self._moves.record_success()
            ended.append((transfer, result))
        return ended

    def newly_hung(self, now_s: float) -> list[Transfer]:
        """Transfers whose deadline has passed without a word of the child; each once."""
        found = []
        for entry in self._in_flight.values():
            if not entry.is_hung and now_s >= entry.transfer.deadline_s + _HUNG_AFTER_S:
                entry.is_hung = True
                self._num_hung += 1
                self._moves.record_failure(now_s)
                logger.warning("tier %s is given nothing more: a %s hangs", self.name, entry.transfer.direction.value)
                found.append(entry.transfer)
        return found

    def unfinished(self) -> list[Transfer]:
        """After the child was closed: transfers that it never reported."""
        left = [entry.transfer for entry in self._in_flight.values()]
        self._in_flight.clear()
        self._num_hung = self.num_pinned_blocks = 0
        return left

    # -- health --------------------------------------------------------------------------------------------------------
    def stats(self) -> ConnectorStats:
        """The child's."""
        return ConnectorStats(is_reachable=False) if self.connector is None else self.connector.stats()

    def tier_stats(self, stats: ConnectorStats) -> TierStats:
        """What an operator should see of it; stats: the child's."""
        is_reachable = stats.is_reachable and self.is_usable(self._clock.now_s())
        return TierStats(self.name, is_reachable, stats.store_blocks, self.num_hit_blocks)

    def note_unopened(self, error: Exception) -> None:
        """It could not be opened: log a fault once, not at each attempt."""
        if str(error) != self._fault:
            self._fault = str(error)
            logger.warning("tier %s cannot be opened and is tried again: %s", self.name, self._fault)

    def _record_exception(self, call: str, error: Exception) -> None:
        logger.warning("tier %s failed in %s: %r", self.name, call, error)
        self._moves.record_failure(self._clock.now_s())


def sub_transfer(transfer: Transfer, transfer_id: int, positions: Sequence[int], deadline_s: float) -> Transfer:
    """A child's share of a transfer."""
    return Transfer(
        transfer_id=transfer_id,
        direction=transfer.direction,
        request_id=transfer.request_id,
        block_ids=tuple(transfer.block_ids[position] for position in positions),
        block_hashes=tuple(transfer.block_hashes[position] for position in positions),
        deadline_s=deadline_s,
    )
