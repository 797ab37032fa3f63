"""Stops asking a store that keeps failing, and probes it again later. Plain state; the caller brings the time."""

from __future__ import annotations

_MAX_CONSECUTIVE_FAILURES = 3
_FIRST_PAUSE_S = 0.5
_MAX_PAUSE_S = 4.0  # a recovered store is used again within five seconds
_COMPLAINT_S = 60.0  # nobody may ask an idle engine's store, and so find out that it is well again


class CircuitBreaker:
    """Closed: everything passes. Open: nothing passes until the pause is over; then one failure reopens it for longer."""

    def __init__(self) -> None:
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S
        self._open_until_s = self._failed_at_s = float("-inf")

    def allows(self, now_s: float) -> bool:
        """True when the store may be asked."""
        return now_s >= self._open_until_s

    def complaint(self, now_s: float) -> str:
        """For an operator, while the last that is known of the store, and not long ago, is that it keeps failing; else ""."""
        age_s = now_s - self._failed_at_s
        if self._num_failures < _MAX_CONSECUTIVE_FAILURES or age_s >= _COMPLAINT_S:
            return ""
        return f"{self._num_failures} operations in a row failed, the last one {age_s:.0f} s ago"

    def record_success(self) -> None:
        """The store did what it was asked, or said honestly that it has not got it."""
        self._num_failures = 0
        self._pause_s = _FIRST_PAUSE_S

    def trip(self, now_s: float) -> None:
        """The store hangs: no need to wait for it again and again to know."""
        self._num_failures = _MAX_CONSECUTIVE_FAILURES
        self.record_failure(now_s)

    def record_failure(self, now_s: float) -> None:
        """The store raised, reported an error or missed a deadline."""
        self._num_failures += 1
        self._failed_at_s = now_s
        if self._num_failures >= _MAX_CONSECUTIVE_FAILURES:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
