"""Moves blocks between tiers through memory of its own: up, ahead of the requests that need them, and down, ahead of eviction.

Works on a thread of its own, with connectors of its own on the same stores: the engine's pool, its transfers and its locks have
no part in it. All of it is only to be faster later: what cannot be moved now is left where it is. A block that is evicted while
it is copied is a miss here, like everywhere, and no byte is stored under a hash that did not verify.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.slots.connector import SlotConnector
from core.clock import Clock
from core.kv.connector import KVConnector, PrefixLookup, Transfer, TransferDirection, TransferOutcome, TransferResult
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_REQUESTS = 256  # that wait for a prefetch; the oldest are dropped
_PREFETCH_AFTER_S = 0.05  # a request whose turn is now loads by itself
_LOOKUP_TIMEOUT_S = 1.0
_TRANSFER_TIMEOUT_S = 10.0
_DEMOTE_INTERVAL_S = 0.1
_REST_FACTOR = 20  # finding what is cold locks a store's index: not for more than a twentieth of the time
_CLOSE_TIMEOUT_S = 3.0
_ASK_INTERVAL_S = 0.002


@dataclass(frozen=True, slots=True)
class _Prefetch:
    request_id: str
    block_hashes: Sequence[bytes]
    due_s: float  # of the monotonic clock


class TierMover:
    """staging_bytes is all the memory that it uses. create: one connector for each tier, fastest first; called on its thread.

    find_coldest(tier): what that tier is about to evict (see SlotConnector.coldest_runs); None: nothing is demoted, and nothing
    handed down at the end. hand_down_s: how long that may take.
    """

    def __init__(
        self,
        create: Sequence[Callable[[], KVConnector]],
        clock: Clock,
        staging_bytes: int,
        find_coldest: Callable[[int], list[list[bytes]]] | None,
        hand_down_s: float = 0.0,
    ) -> None:
        self._create = create
        self._find_coldest = find_coldest
        self._clock = clock
        self._staging_bytes = staging_bytes
        self._children: list[KVConnector | None] = [None] * len(create)
        self._wakeup = threading.Condition()
        self._queue: dict[str, _Prefetch] = {}
        self._cancelled: set[str] = set()
        self._is_closing = False
        self._stop_at_s = float("inf")  # of the monotonic clock
        self._hand_down_s = hand_down_s
        self._abandoned: tuple[KVConnector, Transfer] | None = None  # it may still use the staging memory
        self._demote_at_s = 0.0  # of the monotonic clock
        self._ids = itertools.count(1)
        self._demoted: deque[set[bytes]] = deque(maxlen=2)  # found below already, or copied there, in the last two rounds
        self._thread = threading.Thread(target=self._run, name="kv-tier-mover", daemon=True)
        self.num_prefetched_blocks = 0
        self.num_demoted_blocks = 0

    def start(self, layout: KVLayout) -> None:
        """Begin, once."""
        self._layout = layout
        self._pool = KVPoolMemory(layout, max(1, self._staging_bytes // layout.block_stride_bytes))
        self._thread.start()

    # -- step thread ---------------------------------------------------------------------------------------------------
    def prefetch(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Bring into the first tier what slower ones have of a waiting request's prefix, soon."""
        with self._wakeup:
            while len(self._queue) >= _MAX_REQUESTS:
                del self._queue[next(iter(self._queue))]
            self._queue[request_id] = _Prefetch(request_id, block_hashes, time.monotonic() + _PREFETCH_AFTER_S)
            self._wakeup.notify()

    def cancel(self, request_id: str) -> None:
        """The request is served, or gone: what is not moved yet need not be."""
        with self._wakeup:
            if self._queue.pop(request_id, None) is None:
                self._cancelled.add(request_id)  # if it is being moved now

    def stop(self) -> None:
        """End the thread; its connectors stay open. Safe to repeat."""
        with self._wakeup:
            self._is_closing, self._stop_at_s = True, time.monotonic()
            self._wakeup.notify_all()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Stop; hand down what would end with this process, whose other connectors on the tiers are closed by now; close ours.
        Safe to repeat."""
        self.stop()
        was_started = self._thread.ident is not None and not self._thread.is_alive()
        if self._find_coldest is not None and self._hand_down_s and was_started:
            self._stop_at_s = time.monotonic() + self._hand_down_s
            try:
                self._hand_down()
            except Exception as error:  # such as a lock that somebody holds: it costs what only the tier above has
                logger.warning("could not hand down blocks at the end: %r", error)
        for child in self._children:
            if child is not None:
                child.close()

    # -- its own thread ------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        while not self._is_closing:
            job = self._next_job()
            try:
                if self._is_closing:
                    break
                if job is not None:
                    self._prefetch(job)
                elif self._find_coldest is not None and time.monotonic() >= self._demote_at_s:
                    self._demote(self._find_coldest)
            except Exception as error:  # the top of this thread's loop: a fault costs what it was moving
                logger.warning("could not move blocks between tiers: %r", error)

    def _next_job(self) -> _Prefetch | None:
        with self._wakeup:
            self._cancelled.clear()
            job = next(iter(self._queue.values()), None)
            wait_s = None if self._find_coldest is None else _DEMOTE_INTERVAL_S
            if job is not None:
                wait_s = min(wait_s or _PREFETCH_AFTER_S, max(0.0, job.due_s - time.monotonic()))
            if (wait_s is None or wait_s > 0.0) and not self._is_closing:
                self._wakeup.wait(wait_s)
                job = next(iter(self._queue.values()), None)
            if job is not None and job.due_s <= time.monotonic():
                return self._queue.pop(job.request_id)
        return None

    def _child(self, index: int) -> KVConnector | None:
        """A tier's connector, opened when it is first needed; None while it cannot be."""
        child = self._children[index]
        if child is None:
            child = self._create[index]()
            child.on_result = self._notify
            if isinstance(child, SlotConnector):
                child.touches_loaded = False  # what is demoted for being cold is not to become the hottest by that
            try:
                child.register_kv_cache(self._pool)
            except Exception as error:
                logger.info("tier %d cannot be opened for moving blocks: %s", index, str(error))
                child.close()
                return None
            self._children[index] = child
        return child

    def _notify(self) -> None:
        with self._wakeup:
            self._wakeup.notify()

    # -- up ------------------------------------------------------------------------------------------------------------
    def _prefetch(self, job: _Prefetch) -> None:
        top = self._child(0)
        if top is None:
            return
        chain = list(job.block_hashes)
        question = PrefixLookup(job.request_id, chain, self._layout.block_size)
        position = 0
        while position < len(chain) and not (self._is_closing or job.request_id in self._cancelled):
            num_there = self._count(top, question, position)
            if num_there:
                position += num_there
                continue
            num_moved = 0
            for index in range(1, len(self._children)):
                child = self._child(index)
                count = self._count(child, question, position) if child is not None else 0
                if child is not None and count:
                    names = chain[position : position + min(count, self._pool.num_blocks)]
                    num_moved = self._move(child, top, job.request_id, names)
                    break
            if not num_moved:
                return
            self.num_prefetched_blocks += num_moved
            position += num_moved

    def _count(self, child: KVConnector, question: PrefixLookup, first: int) -> int:
        """Blocks that a tier has from the first-th on; 0 where it does not know in time."""
        deadline_s = time.monotonic() + _LOOKUP_TIMEOUT_S
        while (num_tokens := child.get_num_new_matched_tokens(question, first * question.block_size)) is None:
            if self._must_stop() or time.monotonic() > deadline_s:
                return 0
            time.sleep(_ASK_INTERVAL_S)
        return num_tokens // question.block_size

    # -- down ----------------------------------------------------------------------------------------------------------
    def _demote(self, find_coldest: Callable[[int], list[list[bytes]]]) -> None:
        """Copy the coldest blocks of each tier into the next, so that they are there when they are evicted."""
        known = set().union(*self._demoted)
        found: set[bytes] = set()
        finding_s = 0.0
        for index in range(len(self._children) - 1):
            source, target = self._child(index), self._child(index + 1)
            if source is None or target is None:
                continue
            started_s = time.monotonic()
            runs = find_coldest(index)
            finding_s += time.monotonic() - started_s
            for run in runs:
                names = [name for name in run if name not in known]
                found.update(run)
                for start in range(0, len(names), self._pool.num_blocks):
                    if self._is_closing or self._queue:  # a request is waiting: go on later
                        return
                    part = names[start : start + self._pool.num_blocks]
                    if self._has_all(target, part):
                        continue
                    num_moved = self._move(source, target, f"demote-{next(self._ids)}", part)
                    self.num_demoted_blocks += num_moved
                    found.difference_update(part[num_moved:])
        self._demoted.append(found)
        self._demote_at_s = time.monotonic() + _REST_FACTOR * finding_s

    def _has_all(self, target: KVConnector, names: Sequence[bytes]) -> bool:
        question = PrefixLookup(f"demoted-{names[0].hex()}", names, self._layout.block_size)
        return self._count(target, question, 0) == len(names)

    # -- at the end ----------------------------------------------------------------------------------------------------
    def _hand_down(self) -> None:
        """Copy into the next tiers what only a tier has that ends with this process. The most useful goes first, as time may not
        last for all, though the store below takes what comes last for the most recently used."""
        while self._abandoned is not None and self._poll(*self._abandoned) is None:
            if self._must_stop():
                return
            time.sleep(_ASK_INTERVAL_S)
        self._abandoned = None
        for index, source in enumerate(self._children[:-1]):
            if not (isinstance(source, SlotConnector) and source.stop_sharing()):
                continue
            lower = [child for child in map(self._child, range(index + 1, len(self._children))) if child is not None]
            for run in source.hottest_runs():
                for start in range(0, len(run), self._pool.num_blocks):
                    part = run[start : start + self._pool.num_blocks]
                    if any(self._has_all(target, part) for target in lower):
                        continue
                    is_moved = any(self._move(source, target, f"last-{next(self._ids)}", part) == len(part) for target in lower)
                    if self._must_stop():
                        logger.warning("tier %d ends with blocks that no other tier has: there was no time left", index)
                        return
                    self.num_demoted_blocks += len(part) * is_moved

    def _must_stop(self) -> bool:
        return time.monotonic() >= self._stop_at_s

    # -- a move --------------------------------------------------------------------------------------------------------
    def _move(self, source: KVConnector, target: KVConnector, request_id: str, names: Sequence[bytes]) -> int:
        """Copy blocks from store to store; how many leading ones are in the target now."""
        loaded = self._transfer(source, TransferDirection.LOAD, request_id, names)
        if not loaded:
            return 0
        return self._transfer(target, TransferDirection.SAVE, request_id, names[:loaded])

    def _transfer(self, child: KVConnector, direction: TransferDirection, request_id: str, names: Sequence[bytes]) -> int:
        """Run one transfer to its end; how many leading blocks were moved. Its memory is used again only when it has ended."""
        if self._abandoned is not None:
            return 0
        deadline_s = self._clock.now_s() + _TRANSFER_TIMEOUT_S
        transfer = Transfer(next(self._ids), direction, request_id, tuple(range(len(names))), tuple(names), deadline_s)
        if direction is TransferDirection.LOAD:
            child.start_load(transfer)
        else:
            child.start_save(transfer)
        while (result := self._poll(child, transfer)) is None:
            with self._wakeup:
                self._wakeup.wait(_DEMOTE_INTERVAL_S)
            if self._must_stop():
                self._abandoned = (child, transfer)
                return 0
        if result.outcome in (TransferOutcome.ERROR, TransferOutcome.TIMEOUT):
            logger.info("a %s between tiers failed: %s", direction.value, result.detail)
        return result.num_blocks_ok

    def _poll(self, child: KVConnector, transfer: Transfer) -> TransferResult | None:
        return next((result for result in child.poll_transfers() if result.transfer_id == transfer.transfer_id), None)
