"""The one source of time inside an engine or router: passed in, so that a cluster can run under a virtual clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time in seconds; only differences mean anything."""

    def now_s(self) -> float:
        """Return the current monotonic time in seconds."""
        ...


class MonotonicClock:
    """The operating system's monotonic clock. Safe from any thread."""

    def now_s(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()
