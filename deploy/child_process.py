"""One child process: how it starts, how its output is shown, how it ends. Which children there are is supervisor.py's business.

A child leads a process group of its own (setsid), so that Ctrl-C in a terminal reaches only the supervisor, which then ends the
children in order; on Linux the kernel ends them when the supervisor dies without having had the chance.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

PR_SET_PDEATHSIG = 1
NUM_TAIL_LINES = 30
COLOURS = (36, 35, 33, 32, 34, 31)  # ANSI foregrounds, by the order in which children are named

# Loaded before any fork: the forked child may not take locks, and loading a library does.
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. name: unique, shown before each line of output. environment: what is added to ours.

    inherited_fds: descriptors of ours that the child keeps under the same numbers.
    """

    name: str
    argv: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    inherited_fds: tuple[int, ...] = ()


class OutputPrinter:
    """Writes whole lines of several children to one stream, each after its child's name. Safe from any thread."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._width = 0
        self._colour_by_name: dict[str, int] = {}
        self._is_terminal = stream.isatty()

    def add_names(self, names: Sequence[str]) -> None:
        """Names that lines will carry, so that columns line up and each gets its colour."""
        for name in names:
            self._colour_by_name[name] = COLOURS[len(self._colour_by_name) % len(COLOURS)]
            self._width = max(self._width, len(name))

    def line(self, name: str, text: str) -> None:
        """Write one line. A stream that was closed under us is not worth dying for: the cluster goes on."""
        label = f"{name:<{self._width}} |"
        if self._is_terminal and name in self._colour_by_name:
            label = f"\x1b[{self._colour_by_name[name]}m{label}\x1b[0m"
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{label} {text}\n")
            self._stream.flush()


class ChildProcess:
    """A started child. Only the thread that started it may wait for it; start it from the main thread (see _die_with_parent)."""

    def __init__(self, spec: ChildSpec, show_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.started_at_s = time.monotonic()
        self.tail: collections.deque[str] = collections.deque(maxlen=NUM_TAIL_LINES)
        self._show_line = show_line
        self._process = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict(spec.environment)},
            start_new_session=True,
            pass_fds=spec.inherited_fds,
            preexec_fn=_die_with_parent(os.getpid()),
        )
        self._reader = threading.Thread(target=self._read_output, name=f"output-{spec.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id, which is also the id of its process group."""
        return self._process.pid

    def poll_exit_code(self) -> int | None:
        """Its exit code (minus the signal's number when a signal ended it), or None while it runs."""
        return self._process.poll()

    def describe_exit(self) -> str:
        """How it ended, in words."""
        code = self._process.poll()
        if code is not None and code < 0:
            return f"ended by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def send(self, signal_number: signal.Signals) -> None:
        """Send a signal to the child alone; nothing happens when it has already ended."""
        self._process.send_signal(signal_number)

    def kill_group(self) -> None:
        """SIGKILL the child and whatever it started. Safe to repeat."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # all gone; some systems say PermissionError for zombies
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within timeout_s; then all of its output has been shown."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(1.0)  # bounded: a grandchild may hold the pipe open
        return True

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for raw in pipe:
                text = raw.decode(errors="replace").rstrip("\r\n")
                self.tail.append(text)
                self._show_line(self.spec.name, text)


def _die_with_parent(parent_pid: int) -> Callable[[], None] | None:
    """A preexec function that asks Linux for SIGTERM when the thread that forked this child ends; elsewhere None.

    It runs between fork and exec of a process that has threads, so it does no more than two system calls.
    """
    libc = _libc
    if libc is None:
        return None

    def ask_kernel() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent_pid:  # the parent died before prctl: the signal would never come
            os._exit(1)

    return ask_kernel
