"""Moves blocks between a connector and an engine that keeps KV in memory of its own, by way of a bounded staging pool.

The connector sees only the pool, so that whatever it still writes after a deadline reaches nobody. One thread of ours calls it;
the engine's step thread only queues, copies into the pool, and asks for news. Knows nothing of the engine: see vllm_plugin.py.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from core.clock import Clock
from core.kv.connector import KVConnector, PrefixLookup, Transfer, TransferDirection, TransferOutcome, TransferResult
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

PIECE_BYTES = 32 * 1024 * 1024  # of a load: while one piece is copied out of the pool, the next is being read
_FAULTS = (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
_LOOK_S = 0.05  # how late a deadline may be noticed
_THREAD_TIMEOUT_S = 5.0

CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The engine's blocks block_ids hold, or shall hold, the contents named block_hashes: consecutive blocks of a request.

    ancestors: the hashes of all blocks before them, or empty when the connector has been told of them by an earlier move.
    """

    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    ancestors: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadNews:
    """Since the last question: requests whose load has ended, one way or the other, and the blocks that did not arrive."""

    ended_request_ids: frozenset[str]
    failed_block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the store did since the last question: transfers that ended well, and faults (errors, deadlines)."""

    num_successes: int = 0
    num_faults: int = 0


@dataclass(slots=True)
class _Load:
    move: BlockMove
    deadline_s: float
    next_position: int = 0  # of the first block that no transfer has been started for
    num_flying: int = 0  # transfers
    arrived: set[int] = field(default_factory=set)  # positions
    is_broken: bool = False  # no further pieces
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """A transfer that the connector has not reported: its pool blocks belong to nobody else, however late it is."""

    slots: tuple[int, ...]
    load: _Load | None = None
    first_position: int = 0


class StagedTransfers:
    """All transfers of one worker. copy_in(block_ids, slots) copies the engine's blocks into pool blocks, copy_out(slots,
    block_ids) the other way; each is only called for blocks that nobody else writes meanwhile.

    Half of the pool is kept for loads, so that saves into a store that hangs cannot hold them up.
    """

    def __init__(
        self,
        connector: KVConnector,
        pool: KVPoolMemory,
        copy_in: CopyBlocks,
        copy_out: CopyBlocks,
        clock: Clock,
        *,
        load_timeout_s: float,
        save_timeout_s: float,
    ) -> None:
        self._connector, self._pool, self._clock = connector, pool, clock
        self._copy_in, self._copy_out = copy_in, copy_out
        self._load_timeout_s, self._save_timeout_s = load_timeout_s, save_timeout_s
        self._num_reserved = pool.num_blocks // 2
        self._max_piece = max(1, min(PIECE_BYTES // pool.layout.block_bytes, self._num_reserved))
        self._wakeup = threading.Condition()  # guards everything down to _is_closing
        self._free_slots = list(range(pool.num_blocks))
        self._new_loads: deque[_Load] = deque()
        self._new_saves: deque[tuple[BlockMove, tuple[int, ...]]] = deque()
        self._ended_request_ids: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._num_successes = self._num_faults = 0
        self._has_results = False
        self._is_closing = False
        self.num_dropped_blocks = 0  # not saved, because the pool was full
        self._broken_chains: set[str] = set()  # step thread: requests of which a block was dropped
        self._loads: list[_Load] = []  # the mover's own, as the two below
        self._flights: dict[int, _Flight] = {}
        self._next_transfer_id = 1
        connector.register_kv_cache(pool)
        connector.on_result = self._note_result
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._thread.start()

    # -- step thread ---------------------------------------------------------------------------------------------------
    def start_load(self, move: BlockMove) -> None:
        """Begin to fill the engine's blocks, which belong to the move until poll_loads names the request."""
        load = _Load(move, self._clock.now_s() + self._load_timeout_s)
        with self._wakeup:
            self._new_loads.append(load)
            self._wakeup.notify_all()

    def try_save(self, move: BlockMove) -> bool:
        """Copy the engine's blocks into the pool, now, and store them from there. False when there is no room: what follows in
        that request's chain would be out of reach, and is not saved either."""
        if move.request_id in self._broken_chains:
            return False
        with self._wakeup:
            num_blocks = min(len(move.block_ids), max(0, len(self._free_slots) - self._num_reserved))
            slots = tuple(self._free_slots[-num_blocks:]) if num_blocks else ()
            del self._free_slots[len(self._free_slots) - num_blocks :]
        if num_blocks < len(move.block_ids):
            self._broken_chains.add(move.request_id)
            self.num_dropped_blocks += len(move.block_ids) - num_blocks
        if num_blocks:
            self._copy_in(move.block_ids[:num_blocks], slots)
            staged = BlockMove(move.request_id, move.block_ids[:num_blocks], move.block_hashes[:num_blocks], move.ancestors)
            with self._wakeup:
                self._new_saves.append((staged, slots))
                self._wakeup.notify_all()
        return num_blocks == len(move.block_ids)

    def poll_loads(self) -> LoadNews:
        """Never blocks. A failed block is named no later than its request."""
        with self._wakeup:
            news = LoadNews(frozenset(self._ended_request_ids), frozenset(self._failed_block_ids))
            self._ended_request_ids.clear()
            self._failed_block_ids.clear()
        return news

    def take_verdict(self) -> Verdict:
        """Never blocks."""
        with self._wakeup:
            verdict = Verdict(self._num_successes, self._num_faults)
            self._num_successes = self._num_faults = 0
        return verdict

    def forget(self, request_ids: set[str]) -> None:
        """These requests have ended."""
        self._broken_chains -= request_ids

    def close(self, drain_s: float) -> None:
        """Give what is on its way to the store drain_s seconds, then close the connector. Bounded; loads end as failed."""
        deadline_s = self._clock.now_s() + drain_s
        with self._wakeup:
            while self._num_busy_slots() and self._clock.now_s() < deadline_s and not self._is_closing:
                self._wakeup.wait(_LOOK_S)
            self._is_closing = True
            self._wakeup.notify_all()
        self._connector.close()
        self._thread.join(_THREAD_TIMEOUT_S)

    def _num_busy_slots(self) -> int:
        return self._pool.num_blocks - len(self._free_slots)

    # -- any thread ----------------------------------------------------------------------------------------------------
    def _note_result(self) -> None:
        with self._wakeup:
            self._has_results = True
            self._wakeup.notify_all()

    # -- the mover -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while self._wait_for_work():
            try:
                self._turn()
            except Exception:  # the top of this thread's loop: whatever went wrong, loads end and the engine computes
                logger.exception("moving KV failed")
                for load in self._loads:
                    self._end(load)
                self._loads.clear()
        for load in [*self._loads, *self._new_loads]:
            self._end(load)

    def _wait_for_work(self) -> bool:
        with self._wakeup:
            while not (self._new_loads or self._new_saves or self._has_results or self._is_closing):
                if not self._wakeup.wait(_LOOK_S if self._loads else None):
                    break  # time to look at deadlines
            self._has_results = False
            return not self._is_closing

    def _turn(self) -> None:
        with self._wakeup:
            saves, self._new_saves = self._new_saves, deque()
            self._loads += self._new_loads
            self._new_loads.clear()
        for move, slots in saves:
            self._start(TransferDirection.SAVE, move, 0, slots, None)
        for result in self._poll():
            self._settle(result)
        now_s = self._clock.now_s()
        for load in self._loads:
            if now_s >= load.deadline_s and not load.is_over:
                self._count(TransferOutcome.TIMEOUT)
                self._end(load)
            while not (load.is_broken or load.is_over) and self._start_piece(load):
                pass
            if not load.num_flying and (load.is_broken or load.next_position == len(load.move.block_ids)):
                self._end(load)
        self._loads = [load for load in self._loads if not load.is_over]

    def _poll(self) -> list[TransferResult]:
        try:
            return self._connector.poll_transfers()
        except Exception as error:  # the boundary around a connector's calls: its faults cost misses, never the engine
            logger.warning("the %s connector failed to report: %r", self._connector.name, error)
            self._count(TransferOutcome.ERROR)
            return []

    def _start_piece(self, load: _Load) -> bool:
        """False: nothing left to start, or no room in the pool."""
        num_left = len(load.move.block_ids) - load.next_position
        with self._wakeup:
            num_blocks = min(num_left, self._max_piece, len(self._free_slots))
            slots = tuple(self._free_slots.pop() for _ in range(num_blocks))
        if not num_blocks:
            return False
        first, load.next_position = load.next_position, load.next_position + num_blocks
        self._start(TransferDirection.LOAD, load.move, first, slots, load)
        return True

    def _start(
        self, direction: TransferDirection, move: BlockMove, first: int, slots: tuple[int, ...], load: _Load | None
    ) -> None:
        names = move.block_hashes[first : first + len(slots)]
        deadline_s = load.deadline_s if load is not None else self._clock.now_s() + self._save_timeout_s
        transfer = Transfer(self._next_transfer_id, direction, move.request_id, slots, names, deadline_s)
        self._next_transfer_id += 1
        self._flights[transfer.transfer_id] = _Flight(slots, load, first)
        if load is not None:
            load.num_flying += 1
        try:
            if move.ancestors and first == 0:  # so that the store keeps parents longer than their children
                block_size, chain = self._pool.layout.block_size, [*move.ancestors, *move.block_hashes]
                lookup = PrefixLookup(move.request_id, chain, block_size)
                self._connector.get_num_new_matched_tokens(lookup, len(move.ancestors) * block_size)
            if load is not None:
                self._connector.start_load(transfer)
            else:
                self._connector.start_save(transfer)
        except Exception as error:  # as in _poll
            logger.warning("the %s connector failed to start a %s: %r", self._connector.name, direction.value, error)
            self._settle(TransferResult(transfer.transfer_id, 0, TransferOutcome.ERROR))

    def _settle(self, result: TransferResult) -> None:
        flight = self._flights.pop(result.transfer_id, None)
        if flight is None:
            return
        self._count(result.outcome)
        try:
            if flight.load is not None:
                self._take_over(flight, flight.load, min(result.num_blocks_ok, len(flight.slots)))
        finally:
            with self._wakeup:
                self._free_slots.extend(flight.slots)
                self._wakeup.notify_all()

    def _take_over(self, flight: _Flight, load: _Load, num_ok: int) -> None:
        load.num_flying -= 1
        if load.is_over:  # its blocks may be somebody else's by now
            return
        load.is_broken = load.is_broken or num_ok < len(flight.slots)
        if num_ok:
            positions = range(flight.first_position, flight.first_position + num_ok)
            self._copy_out(flight.slots[:num_ok], [load.move.block_ids[position] for position in positions])
            load.arrived.update(positions)

    def _count(self, outcome: TransferOutcome) -> None:
        with self._wakeup:
            self._num_faults += outcome in _FAULTS
            self._num_successes += outcome not in _FAULTS

    def _end(self, load: _Load) -> None:
        """Hand the engine its blocks back. Safe to repeat."""
        if load.is_over:
            return
        load.is_over = True
        move = load.move
        failed = [block_id for position, block_id in enumerate(move.block_ids) if position not in load.arrived]
        if failed:
            logger.warning(
                "%d of %d blocks of %s did not arrive and are computed", len(failed), len(move.block_ids), move.request_id
            )
        with self._wakeup:
            self._failed_block_ids.update(failed)
            self._ended_request_ids.add(move.request_id)
