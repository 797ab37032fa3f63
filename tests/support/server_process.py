"""A server of a test's that is a process of ours: what is done to it by signals."""

from __future__ import annotations

import signal
import subprocess


class ServerProcess:
    """Whoever starts it sets `_process`."""

    _process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        """kill -9, and wait until it is gone. Safe to repeat."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
