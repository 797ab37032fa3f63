"""engine.scheduler_delay_factor: new prompts are kept back for a moment while others decode, and are computed in one step.

Plain state of the scheduler's, which brings the time. Step thread only.
"""

from __future__ import annotations


class PromptDelay:
    """The delay is factor times the latency of the last step that started prompts, from the arrival of who waits first."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._prompt_step_s = 0.0
        self._prompt_step_started_s: float | None = None  # while that step is the last one
        self._delayed_since_s: float | None = None

    def note_prompt_step(self, now_s: float) -> None:
        """A step that starts prompts has been scheduled."""
        self._prompt_step_started_s = now_s

    def is_over(self, now_s: float, head_arrival_s: float | None, *, is_anyone_running: bool) -> bool:
        """Whether prompts may start in the step that is being scheduled; they always may when there is nothing else to do.

        head_arrival_s: of the head of the queue, None when it is empty. A delay ends when it should have, also when another
        request has become the head: no stream of them prolongs it.
        """
        if self._prompt_step_started_s is not None:
            self._prompt_step_s = now_s - self._prompt_step_started_s
            self._prompt_step_started_s = None
        if head_arrival_s is None or not is_anyone_running:
            self._delayed_since_s = None
            return True
        if self._delayed_since_s is None:
            self._delayed_since_s = head_arrival_s
        if now_s - self._delayed_since_s < self.factor * self._prompt_step_s:
            return False
        self._delayed_since_s = None
        return True
