"""A flow with where its deliveries go and what its metrics need: times of arrival, dispatch and tokens.

RouterCore keeps one for each request in flight, and tells it what happens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from router.flow_actions import Count, Deliver, Dispatch, Fail
from router.metrics import RouterMetrics
from router.request_flow import RequestFlow

# Takes a flow's deliveries in order; Fail or a Deliver with a finish_reason is the last. Must not raise and not call back.
Sink = Callable[[Deliver | Fail], None]


@dataclass(slots=True)
class TrackedRequest:
    """All times are the router's clock's seconds."""

    flow: RequestFlow
    sink: Sink
    metrics: RouterMetrics
    first_dispatch_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    is_handing_off: bool = False

    def observe_dispatch(self, dispatch: Dispatch, now_s: float) -> None:
        """It is being sent to a node."""
        if self.first_dispatch_s is None:
            self.first_dispatch_s = now_s
            self.metrics.queue_time.observe(now_s - self.flow.arrival_s)
        self.is_handing_off = dispatch.reason == "handoff"

    def observe_delivery(self, delivery: Deliver, now_s: float) -> None:
        """Tokens arrived, or the end."""
        num_tokens = len(delivery.token_ids)
        if num_tokens and self.first_token_s is None:
            self.first_token_s = now_s
            self.metrics.time_to_first_token.observe(now_s - self.flow.arrival_s)
            self.metrics.prefill_time.observe(now_s - (self.first_dispatch_s or now_s))
            self.metrics.prompt_cached_tokens.inc(delivery.num_cached_tokens)
        elif num_tokens and self.last_token_s is not None:
            since_s = now_s - self.last_token_s
            if self.is_handing_off:
                self.metrics.handoff_time.observe(since_s)
                self.is_handing_off = False
            for _ in range(num_tokens):
                self.metrics.inter_token_latency.observe(since_s / num_tokens)
        if num_tokens:
            self.last_token_s = now_s
        if delivery.finish_reason:
            self.metrics.request_success.labels(delivery.finish_reason).inc()
            self.observe_end(now_s)

    def observe_end(self, now_s: float) -> None:
        """No token follows."""
        num_tokens = len(self.flow.output_token_ids)
        self.metrics.e2e_latency.observe(now_s - self.flow.arrival_s)
        self.metrics.generation_tokens.observe(num_tokens)
        if self.first_token_s is not None and self.last_token_s is not None:
            self.metrics.decode_time.observe(self.last_token_s - self.first_token_s)
            if num_tokens > 1:
                self.metrics.time_per_output_token.observe((self.last_token_s - self.first_token_s) / (num_tokens - 1))

    def count(self, action: Count) -> None:
        """What a flow wants counted."""
        match action.what:
            case "local_prefill":
                self.metrics.local_prefill.labels(action.reason).inc()
            case "retry":
                self.metrics.retries.labels(action.reason).inc()
            case "migration":
                self.metrics.migrations.labels(action.reason, action.outcome).inc()
            case "decision":
                self.metrics.decisions.labels(action.outcome, action.reason).inc()
            case "moved_tokens":
                self.metrics.moved_tokens.labels(action.reason).inc(action.amount)
            case _:
                raise AssertionError(f"no metric for {action.what}")
