"""The threads that move a connector's bytes, and the promise of exactly one result for each started transfer.

Knows nothing of any store: it is given a function that carries out one transfer. Any connector that blocks on its medium can
use it.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence

from core.clock import Clock
from core.kv.connector import Transfer, TransferOutcome, TransferResult

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 3.0


class TransferWorkers:
    """A queue of transfers and the threads that serve it, oldest first.

    execute(transfer) -> result runs on a worker thread; background() is called on an idle worker after request_background(), and
    again while it returns True; notify() is called after a result was appended. The ledger bounds the queue: it starts no more
    transfers than its limit. A thread that hangs in the kernel cannot be ended: threads are daemons, and close() stops waiting.
    """

    def __init__(
        self,
        execute: Callable[[Transfer], TransferResult],
        background: Callable[[], bool],
        notify: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._execute = execute
        self._background = background
        self._notify = notify
        self._clock = clock
        self._wakeup = threading.Condition()
        self._queue: deque[Transfer] = deque()
        self._jobs: deque[Callable[[], None]] = deque()
        self._in_flight: dict[int, tuple[Transfer, float]] = {}  # with the time of its start
        self._results: deque[TransferResult] = deque()
        self._background_at_s: float | None = None  # of time.monotonic(); None: not asked for
        self._num_idle = 0
        self._threads: list[threading.Thread] = []
        self.is_closing = False

    def start_threads(self, num_threads: int, name: str) -> None:
        """Start the workers. Called once."""
        for number in range(num_threads):
            thread = threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    @property
    def num_in_flight(self) -> int:
        """Transfers that were started and have no result yet."""
        return len(self._in_flight)

    def start(self, transfer: Transfer) -> None:
        """Queue a transfer. One whose id is in flight is ignored; after close() the result is CANCELLED."""
        with self._wakeup:
            if transfer.transfer_id in self._in_flight:
                logger.warning("transfer %d was started twice; the second start is ignored", transfer.transfer_id)
                return
            self._in_flight[transfer.transfer_id] = (transfer, self._clock.now_s())
            if not self.is_closing:
                self._queue.append(transfer)
                self._wakeup.notify()
                return
        self.finish(failed(transfer, TransferOutcome.CANCELLED, "the connector is closed"))

    def finish(self, result: TransferResult) -> None:
        """Report a transfer's end, with the time it took. The second end of the same transfer is a no-op."""
        with self._wakeup:
            started = self._in_flight.pop(result.transfer_id, None)
            if started is None:
                return
            self._results.append(dataclasses.replace(result, duration_s=self._clock.now_s() - started[1]))
        self._notify()

    def poll(self) -> list[TransferResult]:
        """All results since the last call; never blocks."""
        results = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def request_background(self, after_s: float = 0.0) -> None:
        """Have an idle worker call background(), so much later: work that can wait must not delay the next transfer."""
        at_s, asked_s = time.monotonic() + after_s, self._background_at_s
        if asked_s is None or at_s < asked_s:
            with self._wakeup:
                self._background_at_s = at_s
                self._wakeup.notify()

    def should_stop(self, transfer: Transfer) -> TransferOutcome | None:
        """Why a transfer should not go on: CANCELLED, TIMEOUT, or None."""
        if self.is_closing:
            return TransferOutcome.CANCELLED
        return TransferOutcome.TIMEOUT if self._clock.now_s() > transfer.deadline_s else None

    def run_jobs(self, jobs: Sequence[Callable[[], None]]) -> None:
        """Run parts of one transfer on this and on idle threads; return when all have ended. Jobs must not raise.

        As long as no thread is idle, nothing is gained by offering them.
        """
        remaining = deque(jobs)
        while remaining and (len(remaining) == 1 or self._num_idle == 0):
            remaining.popleft()()
        if remaining:
            self._share_jobs(remaining)

    def _share_jobs(self, jobs: Collection[Callable[[], None]]) -> None:
        """The caller works through the list itself, so that it never waits for a thread that waits for it."""
        num_pending = len(jobs)
        all_done = threading.Event()

        def run(job: Callable[[], None]) -> None:
            nonlocal num_pending
            try:
                job()
            finally:
                with self._wakeup:
                    num_pending -= 1
                    if num_pending == 0:
                        all_done.set()

        with self._wakeup:
            self._jobs.extend(functools.partial(run, job) for job in jobs)
            self._wakeup.notify(len(jobs) - 1)
        while not all_done.is_set():
            with self._wakeup:
                next_job = self._jobs.popleft() if self._jobs else None
            if next_job is None:
                all_done.wait()
            else:
                next_job()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Cancel what is queued, wait at most timeout_s for what runs, cancel the rest. Safe to repeat.

        True when every thread has ended.
        """
        with self._wakeup:
            was_closing = self.is_closing
            self.is_closing = True
            queued = list(self._queue)
            self._queue.clear()
            self._wakeup.notify_all()
        for transfer in queued:
            self.finish(failed(transfer, TransferOutcome.CANCELLED, "the connector was closed"))
        deadline_s = time.monotonic() + (0.0 if was_closing else timeout_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        for transfer, _started_s in list(self._in_flight.values()):
            self.finish(failed(transfer, TransferOutcome.CANCELLED, "the connector was closed while its medium hung"))
        return not any(thread.is_alive() for thread in self._threads if thread is not threading.current_thread())

    def _run(self) -> None:
        while True:
            with self._wakeup:
                while not (self._jobs or self._queue or self.is_closing):
                    asked_s = self._background_at_s
                    left_s = None if asked_s is None else asked_s - time.monotonic()
                    if left_s is not None and left_s <= 0.0:
                        break
                    self._num_idle += 1
                    self._wakeup.wait(left_s)
                    self._num_idle -= 1
                job = self._jobs.popleft() if self._jobs else None
                transfer = self._queue.popleft() if job is None and self._queue else None
                if job is None and transfer is None:
                    if self.is_closing:
                        return
                    self._background_at_s = None
            if job is not None:
                job()
            elif transfer is not None:
                self._serve(transfer)
            else:
                self._serve_background()

    def _serve(self, transfer: Transfer) -> None:
        reason = self.should_stop(transfer)
        if reason is not None:
            self.finish(failed(transfer, reason, "not begun in time"))
            return
        try:
            result = self._execute(transfer)
        except Exception as error:  # the top of this thread's loop: a fault costs its transfer, not the thread
            logger.exception("transfer %d failed", transfer.transfer_id)
            result = failed(transfer, TransferOutcome.ERROR, repr(error))
        self.finish(result)

    def _serve_background(self) -> None:
        try:
            if self._background():
                self.request_background()
        except Exception:  # the top of this thread's loop, as above
            logger.exception("background work failed")


def failed(transfer: Transfer, outcome: TransferOutcome, detail: str) -> TransferResult:
    """The result of a transfer that moved nothing."""
    return TransferResult(transfer_id=transfer.transfer_id, num_blocks_ok=0, outcome=outcome, detail=detail)


def refuse_bad_ids(transfer: Transfer, num_pool_blocks: int) -> TransferResult | None:
    """The result of a transfer whose block ids cannot be right; None for one that can be carried out."""
    block_ids = transfer.block_ids
    if len(block_ids) == len(transfer.block_hashes) and all(0 <= block_id < num_pool_blocks for block_id in block_ids):
        return None
    return failed(transfer, TransferOutcome.ERROR, "block ids are outside the pool or not one per hash")
