"""A stage between an engine whose KV is in a device's memory and any connector, which sees a bounded staging pool in host memory.

A save is copied there as soon as the device has computed it, and stored from there; a load arrives there, is verified, and then
copied on. So no connector touches the engine's blocks: one that hangs holds slots of the staging pool and nothing else. One
thread of ours, the mover, calls the connector; the engine's step thread only queues, looks up, and asks for news.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Sequence

from connectors.staging.moves import Moves, Piece
from connectors.transfer_workers import failed
from core.clock import Clock
from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.device_copies import DeviceCopies, OpenCopies
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

SAVE_WAIT_S = 1.0
PIECE_BYTES = 32 * 1024 * 1024  # while one piece is copied, the next is being read or written
_LOOK_S = 0.05  # how late a deadline may be noticed
_CLOSE_TIMEOUT_S = 3.0


class StagedConnector(KVConnector):
    """`inner` over a staging pool, which is what register_kv_cache is to be given. Transfers name the engine's own blocks.

    save_wait_s, piece_bytes: see Moves.
    """

    def __init__(
        self,
        inner: KVConnector,
        open_copies: OpenCopies,
        clock: Clock,
        *,
        save_wait_s: float = SAVE_WAIT_S,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.name = inner.name
        self._inner, self._open_copies, self._clock = inner, open_copies, clock
        self._save_wait_s, self._piece_bytes = save_wait_s, piece_bytes
        self._inner_lock = threading.Lock()  # connectors expect one caller at a time: the step thread's lookups, or the mover
        self._copies: DeviceCopies | None = None
        self._moves: Moves | None = None  # the mover's own
        self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
        self._wakeup = threading.Condition()  # guards what follows
        self._started_s_by_id: dict[int, float] = {}  # transfers without a result
        self._new: list[tuple[Transfer, float, object]] = []  # with the time and the mark of their start
        self._copied: list[tuple[Piece, BaseException | None]] = []
        self._has_inner_news = False
        self._results: list[TransferResult] = []
        self._released: list[int] = []
        self._is_closing = False

    # -- step thread ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """pool: the staging memory, two blocks at least."""
        self._inner.cluster_secret = self.cluster_secret
        self._inner.on_result = self._note_inner_news
        self._inner.register_kv_cache(pool)
        self.kv_address = self._inner.kv_address
        self._copies = self._open_copies(pool)  # pins the memory: after the connector, which may have put it elsewhere
        self._moves = Moves(
            self._copies,
            pool,
            self._clock,
            self._start_inner,
            self._note_copied,
            save_wait_s=self._save_wait_s,
            piece_bytes=self._piece_bytes,
        )
        self._thread.start()

    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """The inner connector's answer."""
        with self._inner_lock:
            return self._inner.get_num_new_matched_tokens(lookup, num_computed_tokens)

    def start_load(self, transfer: Transfer) -> None:
        """Queue a load."""
        self._start(transfer)

    def start_save(self, transfer: Transfer) -> None:
        """Queue a save. poll_released names it when its blocks have been copied, long before it is stored perhaps."""
        self._start(transfer)

    def _start(self, transfer: Transfer) -> None:
        assert self._copies is not None, "register_kv_cache comes first"
        started_s, mark = self._clock.now_s(), self._copies.mark()
        with self._wakeup:
            if transfer.transfer_id in self._started_s_by_id:
                logger.warning("transfer %d was started twice; the second start is ignored", transfer.transfer_id)
                return
            self._started_s_by_id[transfer.transfer_id] = started_s
            if not self._is_closing:
                self._new.append((transfer, started_s, mark))
                self._wakeup.notify_all()
                return
        self._publish([failed(transfer, TransferOutcome.CANCELLED, "the connector is closed")], [])

    def poll_transfers(self) -> list[TransferResult]:
        """Results since the last call."""
        with self._wakeup:
            results, self._results = self._results, []
        return results

    def poll_released(self) -> list[int]:
        """Saves that were copied into the staging pool since the last call."""
        with self._wakeup:
            released, self._released = self._released, []
        return released

    def pin_prefix(self, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> bool:
        """The inner connector's answer."""
        with self._inner_lock:
            return self._inner.pin_prefix(block_hashes, is_pinned=is_pinned)

    def stats(self) -> ConnectorStats:
        """The inner connector's; slots in use count as open references."""
        with self._inner_lock:
            stats = self._inner.stats()
        num_used = 0 if self._moves is None or self._is_closing else self._moves.num_used_slots
        return dataclasses.replace(stats, num_open_references=stats.num_open_references + num_used)

    def close(self) -> None:
        """Stop the mover, the connector and the copies, in this order: after each, nothing of it touches any memory."""
        with self._wakeup:
            self._is_closing = True
            self._wakeup.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        self._inner.close()
        if self._copies is not None:
            self._copies.close()
        with self._wakeup:
            left = list(self._started_s_by_id)
        cancelled = TransferOutcome.CANCELLED
        self._publish([TransferResult(number, 0, cancelled, detail="the connector was closed") for number in left], [])

    # -- any thread ----------------------------------------------------------------------------------------------------
    def _note_inner_news(self) -> None:
        with self._wakeup:
            self._has_inner_news = True
            self._wakeup.notify_all()
        self._notify()  # it may be the answer to a lookup

    def _note_copied(self, piece: Piece, error: BaseException | None) -> None:
        with self._wakeup:
            self._copied.append((piece, error))
            self._wakeup.notify_all()

    def _publish(self, results: Sequence[TransferResult], released: Sequence[int]) -> None:
        """Hand the engine its news. Of a transfer that has a result already, a second one is dropped."""
        now_s = self._clock.now_s()
        with self._wakeup:
            self._released += released
            for result in results:
                started_s = self._started_s_by_id.pop(result.transfer_id, None)
                if started_s is not None:
                    self._results.append(dataclasses.replace(result, duration_s=now_s - started_s))
        if results or released:
            self._notify()

    def _notify(self) -> None:
        if self.on_result is not None:
            self.on_result()

    # -- the mover -----------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        assert self._moves is not None
        while self._wait_for_work(self._moves):
            try:
                self._turn(self._moves)
            except Exception:  # the top of this thread's loop: what it could not finish ends at its deadline
                logger.exception("moving KV failed")

    def _wait_for_work(self, moves: Moves) -> bool:
        with self._wakeup:
            while not (self._new or self._copied or self._has_inner_news or self._is_closing):
                if not self._wakeup.wait(None if moves.is_empty else _LOOK_S):
                    break  # time to look at deadlines
            self._has_inner_news = False
            return not self._is_closing

    def _turn(self, moves: Moves) -> None:
        with self._wakeup:
            new, self._new = self._new, []
            copied, self._copied = self._copied, []
        for transfer, started_s, mark in new:
            moves.begin(transfer, started_s, mark)
        for piece, error in copied:
            moves.on_copied(piece, error)
        for result, is_last in self._poll_inner():
            moves.on_inner_result(result, is_last=is_last)
        results = moves.advance()
        self._publish(results, moves.take_released())  # last, so that whoever sees a result finds its slots free

    def _start_inner(self, transfer: Transfer) -> None:
        is_load = transfer.direction is TransferDirection.LOAD
        try:
            with self._inner_lock:
                (self._inner.start_load if is_load else self._inner.start_save)(transfer)
        except Exception as error:  # the boundary around a connector's calls: its faults cost misses, never the engine
            logger.warning("connector %s failed to start a %s: %r", self.name, transfer.direction.value, error)
            assert self._moves is not None
            self._moves.on_inner_result(failed(transfer, TransferOutcome.ERROR, repr(error)), is_last=True)

    def _poll_inner(self) -> list[tuple[TransferResult, bool]]:
        try:
            with self._inner_lock:
                early, last = self._inner.poll_early_results(), self._inner.poll_transfers()
        except Exception as error:  # as in _start_inner
            logger.warning("connector %s failed to report: %r", self.name, error)
            return []
        return [*((result, False) for result in early), *((result, True) for result in last)]
