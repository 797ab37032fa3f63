"""A Python module run as a process that obeys commands: a JSON line in, a JSON line out. This is the parent's end."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

ANSWER_S = 120.0  # longer than a child waits for a transfer
ROOT = Path(__file__).parents[2]


class CommandedProcess:
    """Runs from its making to kill()."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", module, *arguments]
        # Unbuffered: with a line read ahead, the pipe would look empty to select.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, cwd=ROOT)

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")

    def answer(self) -> Any:
        """The next answer. Fails when the process has died or hangs."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], ANSWER_S)[0], "the process hangs"
        line = self._process.stdout.readline()
        assert line, f"the process died with {self._process.wait()}"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """A command and its answer."""
        self.send(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL: it has no chance to clean up. Safe to repeat."""
        self._process.kill()
        self._process.communicate()
