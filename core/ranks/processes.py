"""The other ranks of a node as child processes of rank 0's: start, talk, notice when one is gone, end.

What they compute is core/model's business. They live as long as this process does: their channel ends with it, and on Linux the
kernel ends them.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from core.errors import ModelLoadError, RankLostError
from core.ranks.channel import Channel
from core.ranks.messages import CopyDone, FromRank, RankReady, RankSetup, StepDone

_logger = logging.getLogger(__name__)
MODULE = "core.model.rank_main"
EXIT_RANK_LOST = 1
_LAST_WORDS_S = 5.0  # how long an error in a step waits for news of the process that caused it
_END_TIMEOUT_S = 5.0


def end_process(why: str) -> None:
    """What a node does when a rank is lost: ends at once, as if killed, since nothing that it holds can be completed.

    Its supervisor starts it anew, with all ranks; the router has moved its requests by then.
    """
    _logger.critical("%s: a node is nothing without all of its ranks and ends", why)
    logging.shutdown()
    os._exit(EXIT_RANK_LOST)


class _Child:
    """One rank's process, its channel, and what it has said that the step thread waits for."""

    def __init__(self, setup: RankSetup) -> None:
        ours, theirs = socket.socketpair()
        self.rank = setup.rank
        self.news: queue.SimpleQueue[RankReady | StepDone] = queue.SimpleQueue()
        self.channel: Channel[FromRank] = Channel(ours, FromRank, f"rank {setup.rank}")
        inherited = {theirs.fileno(), setup.pool_fd, setup.exchange_fd, *setup.peer_fds} - {-1}
        # As of the installation that runs here, whatever lies in the current folder.
        root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with theirs:
            self.process = subprocess.Popen(
                (sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())),
                stdin=subprocess.DEVNULL,
                pass_fds=tuple(inherited),
                env={**os.environ, "PYTHONPATH": python_path},
            )

    def describe_end(self) -> str:
        """How it ended, in words, after a moment in which it may."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_LAST_WORDS_S / 2)
        code = self.process.poll()
        how = "has closed its channel" if code is None else f"ended with exit code {code}"
        if code is not None and code < 0:
            how = f"ended by {signal.Signals(-code).name}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"


class RankProcesses:
    """Ranks 1 to the last. Start from the main thread: the kernel ends a child when the thread that started it ends.

    on_lost(why) is called once, from any thread, when a rank is gone that was not told to go. on_copy_done: from a thread of
    this object's.
    """

    def __init__(self, setups: Sequence[RankSetup], timeout_s: float, on_lost: Callable[[str], None]) -> None:
        self.on_copy_done: Callable[[int, CopyDone], None] | None = None
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._is_closing = False
        self._is_serving = False
        self._state_lock = threading.Lock()
        self._lost = threading.Event()
        self._told = threading.Event()  # on_lost has returned, or will not be called
        self._children = [_Child(setup) for setup in setups]
        atexit.register(self.close)
        for child, setup in zip(self._children, setups, strict=True):
            threading.Thread(target=self._listen, args=(child,), name=f"rank-{child.rank}", daemon=True).start()
            child.channel.send(setup)

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, from rank 1 on."""
        return [child.process.pid for child in self._children]

    @property
    def num_children(self) -> int:
        """Ranks beside this process's."""
        return len(self._children)

    def wait_ready(self) -> None:
        """Until all have loaded their share. Raises ModelLoadError with a rank's reason, or how it ended."""
        for child in self._children:
            ready = child.news.get()
            assert isinstance(ready, RankReady), ready
            if ready.error:
                raise ModelLoadError(ready.error)
        with self._state_lock:
            self._is_serving = True
        for child in self._children:
            if child.process.poll() is not None:
                raise ModelLoadError(f"{child.describe_end()} while others were loading")

    def send(self, message: msgspec.Struct) -> None:
        """To all ranks, in the order of calls. Raises RankLostError."""
        for child in self._children:
            child.channel.send(message)

    def wait_step_done(self, step_id: int) -> None:
        """Until all have computed the step. Raises RankLostError when one takes longer than the timeout."""
        for child in self._children:
            try:
                done = child.news.get(timeout=self._timeout_s)
            except queue.Empty:
                raise RankLostError(f"rank {child.rank} has not answered for {self._timeout_s:.0f} s") from None
            assert done == StepDone(step_id), f"{done} after step {step_id}"

    def report_lost(self, why: str) -> None:
        """A step has failed: calls on_lost, unless news of a process that has ended come first and do. Returns after that: who
        asked must not go on as if only a step had failed."""
        if not self._lost.wait(_LAST_WORDS_S):
            self._lose(why)
        self._told.wait()

    def close(self) -> None:
        """End all ranks and wait for that. Safe to repeat."""
        self._is_closing = True
        self._told.set()
        atexit.unregister(self.close)
        for child in self._children:
            child.channel.shut_down()
        for child in self._children:
            try:
                child.process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()

    def _listen(self, child: _Child) -> None:
        """A thread per rank: its end is noticed also while nothing is computed."""
        while True:
            try:
                message = child.channel.receive()
            except RankLostError:
                self._on_end(child)
                return
            if isinstance(message, CopyDone):
                assert self.on_copy_done is not None, "copies are answered to whoever asked for them"
                self.on_copy_done(child.rank, message)
            else:
                child.news.put(message)

    def _on_end(self, child: _Child) -> None:
        """Of a rank: while it loads that is the start's error, later the node's end."""
        why = child.describe_end()
        with self._state_lock:
            is_serving = self._is_serving
            if not is_serving:
                child.news.put(RankReady(error=f"{why} while loading"))
        if is_serving:
            self._lose(why)

    def _lose(self, why: str) -> None:
        with self._state_lock:
            is_first = not self._lost.is_set() and not self._is_closing
            self._lost.set()
        if is_first:
            self._on_lost(why)
            self._told.set()
