"""Time that moves only when a test says so."""

from __future__ import annotations


class VirtualClock:
    """core.clock.Clock under a test's control."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """The present moment, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now_s += seconds
