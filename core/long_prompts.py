"""engine.max_long_partial_prefills: while that many long prompts are being computed, other long ones let shorter ones pass.

A long prompt is one of which more than a chunk (engine.long_prefill_token_threshold) is left to compute. Plain state of the
scheduler's; step thread only.
"""

from __future__ import annotations

from core.request import Request, RequestStatus


class LongPrompts:
    """At most max_at_once of more than `threshold` tokens."""

    def __init__(self, threshold: int, max_at_once: int) -> None:
        self._threshold = threshold
        self._max_at_once = max_at_once
        self._running: list[Request] = []  # those that were long when they were admitted: hardly more than max_at_once
        self._has_declined = False

    def begin_step(self) -> None:
        """Admissions of a new step begin."""
        self._has_declined = False

    def is_next_in_vain(self, request: Request) -> bool:
        """Whether another one was declined in this step, and this one may be as long: it need not be looked at more closely."""
        return self._has_declined and len(request.token_ids) > self._threshold

    def try_admit(self, request: Request, num_tokens: int) -> bool:
        """Whether a request of which num_tokens are left may start now; it counts from then on, until less is left of it."""
        if num_tokens <= self._threshold:
            return True
        self._running = [other for other in self._running if other is not request and self._is_long(other)]
        self._has_declined = len(self._running) >= self._max_at_once
        if not self._has_declined:
            self._running.append(request)
        return not self._has_declined

    def _is_long(self, request: Request) -> bool:
        num_left = request.num_tokens_with_spec - request.num_computed_tokens
        return request.status is RequestStatus.RUNNING and num_left > self._threshold
