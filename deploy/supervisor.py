"""Keeps a set of child processes running and ends them in order. Knows nothing of models, ports or HTTP: serve.py does.

One thread, the main one, starts, watches and ends all children; signal handlers only count. Restarting is decided by plain
state (RestartBackoff), so that it can be tested without processes.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from core.errors import KVRelayError
from deploy.child_process import ChildProcess, ChildSpec, OutputPrinter

POLL_INTERVAL_S = 0.1
NUM_RESTARTS_AT_ONCE = 3  # with the starts themselves within what requests wait for a node (router.node_wait_s)
FIRST_RESTART_DELAY_S = 1.0
MAX_RESTART_DELAY_S = 30.0
MIN_LIFETIME_S = 2.0  # whatever its exit code: what ends sooner is broken
STABLE_AFTER_S = 60.0  # a child that lived this long is no longer held to have died soon after its start
PROGRESS_INTERVAL_S = 5.0
FIRST_CHILD_SHARE = 0.7
SUPERVISOR_NAME = "kvrelay"


class ClusterStartError(KVRelayError):
    """A child ended, or was not ready in time, before the cluster served."""


class StopRequestedError(KVRelayError):
    """Ctrl-C or SIGTERM came while the cluster was starting."""


@dataclass(slots=True)
class RestartBackoff:
    """How long to wait before a child that died is started again: at first not at all, then 1, 2, 4 … 30 seconds."""

    num_quick_deaths: int = 0

    def next_delay_s(self, lifetime_s: float) -> float:
        """The delay after a death at the age of lifetime_s."""
        if lifetime_s >= STABLE_AFTER_S:
            self.num_quick_deaths = 0
        self.num_quick_deaths += 1
        num_delays = self.num_quick_deaths - NUM_RESTARTS_AT_ONCE
        if num_delays <= 0:
            return 0.0
        delay_s: float = FIRST_RESTART_DELAY_S * 2 ** min(num_delays - 1, 10)
        return min(delay_s, MAX_RESTART_DELAY_S)


@dataclass(slots=True)
class _Slot:
    """One place in the cluster: its child, and when a dead one is to be replaced."""

    spec: ChildSpec
    child: ChildProcess | None = None
    restart_at_s: float = 0.0
    backoff: RestartBackoff = field(default_factory=RestartBackoff)


class Supervisor:
    """Starts children in order, restarts what dies, ends all.

    grace_s bounds how long children get between SIGTERM and SIGKILL, all together. Use it as a context manager: leaving it ends
    whatever still runs and restores the signal handlers, also after an exception.
    """

    def __init__(self, grace_s: float = 10.0, stream: IO[str] | None = None) -> None:
        self._grace_s = grace_s
        self._printer = OutputPrinter(stream or sys.stderr)
        self._printer.add_names([SUPERVISOR_NAME])
        self._slots: list[_Slot] = []
        self._num_stop_signals = 0
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Supervisor:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup. SIGINT counts even where a script's shell ignores it for background jobs: `kill -INT` is meant
            self._previous_handlers[number] = signal.signal(number, self._count_signal)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)

    @property
    def is_stop_requested(self) -> bool:
        """True from the first Ctrl-C or SIGTERM on."""
        return self._num_stop_signals > 0

    @property
    def running(self) -> list[ChildProcess]:
        """The children that have not ended."""
        return _running(self._slots)

    def say(self, text: str) -> None:
        """Show a line of the supervisor's own."""
        self._printer.line(SUPERVISOR_NAME, text)

    def start(self, specs: Sequence[ChildSpec], describe_missing: Callable[[], str], timeout_s: float) -> None:
        """Start the children and return when `describe_missing` returns "" (until then: in words, what is not ready).

        Raises ClusterStartError when a child ends first or timeout_s passes, StopRequestedError on Ctrl-C.
        """
        began_s = time.monotonic()
        self._printer.add_names([spec.name for spec in specs])
        for spec in specs:
            slot = _Slot(spec)
            self._slots.append(slot)
            self._start_child(slot)
        said, said_at_s = "", began_s
        while missing := describe_missing():
            now_s = time.monotonic()
            if self.is_stop_requested:
                raise StopRequestedError("stopped while starting")
            for slot in self._slots:
                if slot.child is not None and slot.child.poll_exit_code() is not None:
                    raise ClusterStartError(self._describe_early_death(slot.child))
            if now_s - began_s > timeout_s:
                raise ClusterStartError(f"not ready after {timeout_s:.0f} s: {missing}")
            if missing != said or now_s - said_at_s >= PROGRESS_INTERVAL_S:
                self.say(f"starting, {now_s - began_s:3.0f} s: {missing}")
                said, said_at_s = missing, now_s
            time.sleep(POLL_INTERVAL_S)

    def watch(self) -> None:
        """Restart children that die, until Ctrl-C or SIGTERM; then return."""
        while not self.is_stop_requested:
            now_s = time.monotonic()
            for slot in self._slots:
                self._watch_slot(slot, now_s)
            time.sleep(POLL_INTERVAL_S)

    def stop(self) -> None:
        """End all children, first to last: SIGTERM, what remains of the grace time, SIGKILL. A second Ctrl-C skips the wait.

        The first child (the router) is asked first and may take most of the grace time by itself: it stops accepting and finishes
        what it streams while there still are nodes.
        """
        if self.running:
            self.say("stopping (Ctrl-C again: at once)")
        num_signals_before = self._num_stop_signals
        deadline_s = time.monotonic() + self._grace_s
        for slots, until_s in (
            (self._slots[:1], deadline_s - self._grace_s * (1 - FIRST_CHILD_SHARE)),
            (self._slots[1:], deadline_s),
        ):
            for child in _running(slots):
                child.send(signal.SIGTERM)
            while _running(slots) and time.monotonic() < until_s:
                if self._num_stop_signals > num_signals_before or self._num_stop_signals >= 2:
                    break
                time.sleep(POLL_INTERVAL_S / 2)
        for child in self.running:
            self.say(f"{child.spec.name} has not ended by itself: killed")
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill_group()  # also what a child that has ended may have started and left
                slot.child.wait(self._grace_s)

    def _start_child(self, slot: _Slot) -> None:
        slot.child = ChildProcess(slot.spec, self._printer.line)
        slot.restart_at_s = 0.0

    def _watch_slot(self, slot: _Slot, now_s: float) -> None:
        if slot.child is not None and slot.child.poll_exit_code() is not None:
            slot.child.wait(1.0)
            slot.child.kill_group()  # what it may have started itself
            lifetime_s = now_s - slot.child.started_at_s
            has_left = slot.child.poll_exit_code() == 0 and lifetime_s >= MIN_LIFETIME_S  # it was drained: a rolling restart
            delay_s = 0.0 if has_left else slot.backoff.next_delay_s(lifetime_s)
            when = f"in {delay_s:.0f} s" if delay_s else "at once"
            self.say(f"{slot.spec.name} {slot.child.describe_exit()}; starting it again {when}")
            slot.child, slot.restart_at_s = None, now_s + delay_s
        if slot.child is None and now_s >= slot.restart_at_s:
            self._start_child(slot)

    def _describe_early_death(self, child: ChildProcess) -> str:
        child.wait(1.0)
        lines = "\n".join(f"    {line}" for line in child.tail) or "    (it printed nothing)"
        return f"{child.spec.name} {child.describe_exit()} while starting; its last lines:\n{lines}"

    def _count_signal(self, _number: int, _frame: object) -> None:
        self._num_stop_signals += 1


def _running(slots: Sequence[_Slot]) -> list[ChildProcess]:
    children = [slot.child for slot in slots if slot.child is not None]
    return [child for child in children if child.poll_exit_code() is None]
