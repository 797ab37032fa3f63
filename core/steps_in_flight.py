"""Runs the scheduler's plans one after the other: where steps overlap on a thread of its own, else when a result is asked for."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from core.clock import Clock
from core.step import ModelRunner, StepPlan, StepResult

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What came of a plan. result None: error says why, in words; was_skipped: because an earlier one failed, which it built on.

    duration_s: of the runner's work. num_attended: as it was given to begin().
    """

    plan: StepPlan
    num_attended: float
    result: StepResult | None
    error: str = ""
    was_skipped: bool = False
    duration_s: float = 0.0


class StepsInFlight:
    """Plans that were begun and whose outcome was not taken yet, oldest first. Called from the step thread."""

    def __init__(self, runner: ModelRunner, clock: Clock, *, on_thread: bool) -> None:
        self._runner = runner
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model") if on_thread else None
        self._in_flight: deque[Callable[[], StepOutcome]] = deque()
        self._has_failed = False  # a plan, on which those in flight build

    def __len__(self) -> int:
        return len(self._in_flight)

    def begin(self, plan: StepPlan, num_attended: float) -> None:
        """Hand a plan to the runner. num_attended: what attention has to look at; given back with the outcome."""
        if self._thread is None:
            self._in_flight.append(lambda: self._run(plan, num_attended))
        else:
            self._in_flight.append(self._thread.submit(self._run, plan, num_attended).result)

    def finish(self) -> StepOutcome:
        """Wait for the oldest plan. Assertions of the runner are raised: they are bugs."""
        outcome = self._in_flight.popleft()()
        if not self._in_flight:
            self._has_failed = False
        return outcome

    def close(self) -> None:
        """Wait for what runs; whatever else is in flight is forgotten."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._in_flight.clear()

    def _run(self, plan: StepPlan, num_attended: float) -> StepOutcome:
        """The process's one broad except: a step that the model cannot compute fails its requests, not the engine."""
        if self._has_failed:
            return StepOutcome(plan, num_attended, None, "the step before it failed", was_skipped=True)
        started_s = self._clock.now_s()
        try:
            result = self._runner.execute(plan)
        except AssertionError:
            raise
        except Exception as error:
            self._has_failed = True
            _logger.exception("step %d failed with %d requests", plan.step_id, len(plan.num_scheduled_tokens))
            return StepOutcome(plan, num_attended, None, f"the model runner failed: {error}")
        return StepOutcome(plan, num_attended, result, duration_s=self._clock.now_s() - started_s)
