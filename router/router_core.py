"""Registry, placement and request flows wired together: messages and time in, messages and deliveries out, no sockets.

The dispatcher is its asyncio shell; a simulation drives it with a virtual clock and a fake network.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from core.clock import Clock
from core.config import RouterOptions
from core.errors import OverloadedError
from core.wire.messages import (
    MAX_KV_SOURCES,
    MAX_TEXT_CHARS,
    Abort,
    AdapterReply,
    AuditReply,
    AuditRequest,
    Drain,
    Heartbeat,
    KVEvents,
    NodeMessage,
    Ping,
    Register,
    RegisterAgain,
    RegisterReply,
    RouterMessage,
    Updates,
    decode_node_message,
    encode,
)
from core.wire.numbering import Arrival
from core.wire.warning_limit import WarningLimit
from router.adapters import AdapterRegistry, load_message
from router.flow_actions import Action, Count, Deliver, Dispatch, Fail, Release, RequestSpec
from router.kv_event_feed import KVEventFeed
from router.metrics import RouterMetrics
from router.policy import Placer
from router.prefix_index import PrefixIndex
from router.registry import HeartbeatOutcome, NodeRegistry, NodeState
from router.request_flow import RequestFlow
from router.tracked_request import Sink, TrackedRequest

logger = logging.getLogger("kvrelay.router")

OVERLOADED_RETRY_AFTER_S = 1.0

# (identity, frame) -> False when the peer is gone
Send = Callable[[bytes, bytes], bool]


@dataclass(frozen=True, slots=True)
class _LostNode:
    """A node that does not answer, or whose connection cannot be trusted.

    is_death: what it had in flight may be the cause, except the dispatch `undelivered`, which never reached it.
    """

    node_id: str
    reason: str
    is_death: bool = True
    undelivered: str = ""


@dataclass(slots=True)
class AuditRound:
    """One collection of AuditReply messages; complete when `missing` is empty."""

    audit_id: int
    missing: set[str]
    replies: dict[str, AuditReply]


class RouterCore:
    """Everything the router decides. Used from one thread; every public method finishes without waiting."""

    def __init__(self, options: RouterOptions, clock: Clock, send: Send, metrics: RouterMetrics, id_prefix: str) -> None:
        """id_prefix: differs for every start of a router, so that nodes never see an id twice. Raises ConfigError."""
        self.registry = NodeRegistry(options.heartbeat_timeout_s, options.step_stall_timeout_s)
        self.audits: dict[int, AuditRound] = {}
        self.adapters = AdapterRegistry(self._tell_all)
        self.index = PrefixIndex()
        self._options = options
        self._clock = clock
        self._send_to = send
        self._metrics = metrics
        self._placer = Placer(options, self.registry, self.index, id_prefix)
        self._kv_events = KVEventFeed(self.index, self._send, metrics)
        self._tracked: dict[str, TrackedRequest] = {}
        self._ids = (f"{id_prefix}-{count}" for count in itertools.count())
        self._audit_ids = itertools.count(1)
        self._lost: list[_LostNode] = []  # to be marked down once the current input is handled
        self._is_handling_lost = False
        self._refusals = WarningLimit()
        self._last_time_s = clock.now_s()
        metrics.watch_nodes(self.registry, clock)

    # -- requests ------------------------------------------------------------------------------------------------------
    @property
    def num_in_flight(self) -> int:
        """Flows that have not ended."""
        return len(self._tracked)

    @property
    def next_deadline_s(self) -> float | None:
        """When on_time has something to do for a request at the latest; None when there is none."""
        return min((tracked.flow.next_deadline_s for tracked in self._tracked.values()), default=None)

    def check_room(self, num_requests: int) -> None:
        """Raises OverloadedError when that many more requests would exceed max_num_requests."""
        if len(self._tracked) + num_requests > self._options.max_num_requests:
            self._metrics.admission_rejections.labels("too_many_requests").inc()
            limit = self._options.max_num_requests
            raise OverloadedError(f"{len(self._tracked)} requests are in flight of at most {limit}", OVERLOADED_RETRY_AFTER_S)

    @property
    def request_timeout_s(self) -> float:
        """How long one HTTP request may take, however many flows it has."""
        return self._options.request_timeout_s

    def new_request_id(self) -> str:
        """An id that no other request of this router has."""
        return next(self._ids)

    def submit(self, spec: RequestSpec, sink: Sink) -> None:
        """Start a request. Its events go to `sink`, maybe before this returns."""
        now_s = self._clock.now_s()
        tracked = TrackedRequest(RequestFlow(spec, self._options, self._placer, now_s), sink, self._metrics)
        assert spec.request_id not in self._tracked, f"request id {spec.request_id} is in use"
        self._tracked[spec.request_id] = tracked
        if spec.adapter is not None:
            self.adapters.use(spec.adapter)
        self._metrics.prompt_tokens.observe(len(spec.prompt_token_ids))
        self._guarded(tracked, lambda flow: flow.start(now_s))
        self._metrics.routing_decision.observe(self._clock.now_s() - now_s)
        self._handle_lost()

    def cancel(self, request_id: str, finished_reason: str) -> None:
        """End a request that nobody waits for any more; unknown ids are ignored. finished_reason is for the metrics."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        self._run(tracked, tracked.flow.cancel())
        tracked.observe_end(self._clock.now_s())
        self._metrics.request_success.labels(finished_reason).inc()
        self._handle_lost()

    def fail_all(self, kind: str, message: str, http_status: int) -> None:
        """End every request with an error."""
        for tracked in list(self._tracked.values()):
            self._run(tracked, tracked.flow.fail(kind, message, http_status))
        self._handle_lost()

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def receive(self, identity: bytes, frame: bytes) -> None:
        """Take one frame from a node. Raises WireError for what is no message."""
        place, message = decode_node_message(frame)
        node = self.registry.node_of(identity)
        if node is not None and not isinstance(message, Register):
            arrival = node.numbers.receive(place)
            if arrival is Arrival.OLD:
                return
            if arrival is Arrival.GAP:
                self._metrics.wire_gaps.inc()
                self._lost.append(_LostNode(node.node_id, "messages were lost on the way", is_death=False))
                self._handle_lost()  # from now on the identity is unknown, so that the node is asked to register again
        self.handle_message(identity, message)

    def handle_message(self, identity: bytes, message: NodeMessage) -> None:
        """Take one message from a node, whose place among the others was checked."""
        now_s = self._clock.now_s()
        if isinstance(message, Updates):
            node = self.registry.node_of(identity)
            if node is None:
                self._send_outside(identity, RegisterAgain())
            else:
                self._handle_updates(node, message, now_s)
        elif isinstance(message, Heartbeat):
            self._handle_heartbeat(identity, message, now_s)
        elif isinstance(message, Register):
            self._handle_register(identity, message, now_s)
        elif isinstance(message, KVEvents):
            if (node := self.registry.node_of(identity)) is not None:
                self._kv_events.take(node, message)
        elif isinstance(message, AdapterReply):
            node = self.registry.node_of(identity)
            is_news = node is not None and not self.adapters.take_reply(node.node_id, message)
            if is_news and (num := self._refusals.count(identity, now_s)):
                logger.warning("node %r cannot serve an adapter: %s (%d such)", identity, message.error, num)
        else:
            round_ = self.audits.get(message.audit_id)
            node = self.registry.node_of(identity)
            is_its_own = node is not None and node.node_id == message.node_id
            if round_ is not None and is_its_own and message.node_id in round_.missing:
                round_.missing.discard(message.node_id)
                round_.replies[message.node_id] = message
        self._handle_lost()

    def on_time(self) -> None:
        """Act on deadlines of requests and on missing heartbeats."""
        now_s = self._clock.now_s()
        if now_s - self._last_time_s > self._options.heartbeat_timeout_s / 2:
            self.registry.excuse_silence(now_s)  # we were away, not they: their heartbeats lie unread
        self._last_time_s = now_s
        for node_id in self.registry.expired_node_ids(now_s):
            self._lost.append(_LostNode(node_id, f"sent no heartbeat for {self._options.heartbeat_timeout_s:g} s"))
        for node_id in self.registry.forget_long_down(now_s):
            self._metrics.forget_node(node_id)
        for tracked in list(self._tracked.values()):
            if now_s >= tracked.flow.next_deadline_s:
                self._guarded(tracked, lambda flow: flow.on_time(now_s))
        for node in self.registry.overdue_drains(now_s):
            for _, tracked in self._tracked_of(list(node.in_flight)):
                self._guarded(tracked, lambda flow, node_id=node.node_id: flow.on_drain_overdue(node_id, now_s))  # type: ignore[misc]
        self._handle_lost()

    def drain(self, node_id: str) -> bool:
        """Let a node finish what it has and leave; what takes longer than drain_timeout_s goes on elsewhere.

        Safe to repeat. False when no such node is connected.
        """
        node = self.registry.nodes.get(node_id)
        if node is None or not node.is_connected:
            return False
        logger.info("node %s drains: %d requests in flight", node_id, len(node.in_flight))
        self.registry.start_drain(node_id, self._clock.now_s() + self._options.drain_timeout_s)
        self._kv_events.stop(node_id)
        self._send(node, Drain())
        self._handle_lost()
        return True

    def list_requests(self) -> list[dict[str, object]]:
        """Every request in flight, oldest first, for people and tools."""
        now_s = self._clock.now_s()
        return [_request_body(tracked.flow, now_s) for tracked in self._tracked.values()]

    def ping_all(self) -> None:
        """Find out which nodes are gone by sending to each."""
        for node in self.registry.connected():
            self._send(node, Ping())
        self._handle_lost()

    def start_audit(self, block_hashes: tuple[bytes, ...] = ()) -> AuditRound:
        """Ask all connected nodes; replies are gathered in the round until the caller removes it from `audits`."""
        nodes = self.registry.connected()
        round_ = AuditRound(next(self._audit_ids), {node.node_id for node in nodes}, {})
        self.audits[round_.audit_id] = round_
        for node in nodes:
            self._send(node, AuditRequest(round_.audit_id, block_hashes))
        self._handle_lost()
        return round_

    # -- inside: messages ----------------------------------------------------------------------------------------------
    def _handle_register(self, identity: bytes, message: Register, now_s: float) -> None:
        old = self.registry.nodes.get(message.node_id)
        is_death = old is not None and old.generation != message.generation
        outcome = self.registry.register(message, identity, now_s)
        interval_s = self._options.heartbeat_interval_s
        reply = RegisterReply(outcome.refusal[:MAX_TEXT_CHARS], interval_s, message.registration_index)
        self._send_outside(identity, reply)
        if outcome.refusal:
            if num := self._refusals.count(identity, now_s):
                logger.warning("refused node %s: %s (%d such since the last line)", message.node_id, outcome.refusal, num)
            return
        logger.info("node %s registered as %s (generation %d)", message.node_id, message.role, message.generation)
        others = {node.connector for node in self.registry.connected()} - {message.connector}
        if others:  # allowed, but it computes again what the others have
            logger.warning("node %s has the store %s, others %s", message.node_id, message.connector, ", ".join(sorted(others)))
        lost = _LostNode(message.node_id, "registered again without its requests", is_death)
        for adapter in self.adapters.known():
            self._send(self.registry.nodes[message.node_id], load_message(adapter))
        self._fail_over(lost, outcome.lost_request_ids, now_s)
        if self.registry.nodes[message.node_id].drain_deadline_s is not None:
            self._send(self.registry.nodes[message.node_id], Drain())  # the first one may have been lost
        elif self._options.wants_kv_events:
            self._kv_events.start(self.registry.nodes[message.node_id])
        self._node_became_available(now_s)

    def _handle_heartbeat(self, identity: bytes, message: Heartbeat, now_s: float) -> None:
        outcome = self.registry.heartbeat(message, identity, now_s)
        if outcome is HeartbeatOutcome.UNKNOWN:
            self._send_outside(identity, RegisterAgain())
            return
        if outcome is HeartbeatOutcome.SUPERSEDED:
            # The two processes may share a socket identity; then an answer would reach the newer one.
            if self.registry.node_of(identity) is None:
                self._send_outside(identity, RegisterAgain())  # which is then refused, with the reason
            return
        self._send(self.registry.nodes[message.node_id], Ping())
        if message.is_draining:
            self._kv_events.stop(message.node_id)
        if outcome is HeartbeatOutcome.STALLED:
            logger.warning("node %s is stalled: its last step ended %.1f s ago", message.node_id, message.load.step_age_s)
            in_flight = tuple(self.registry.nodes[message.node_id].in_flight)
            self._fail_over(_LostNode(message.node_id, f"made no step for {message.load.step_age_s:.1f} s"), in_flight, now_s)
        elif outcome is HeartbeatOutcome.RECOVERED:
            logger.info("node %s works again", message.node_id)
            self._node_became_available(now_s)

    def _handle_updates(self, node: NodeState, message: Updates, now_s: float) -> None:
        vocab_size = node.model.vocab_size
        for update in message.updates:
            if update.token_ids:
                node.end_prefill(update.request_id)
            tracked = self._tracked.get(update.request_id.rpartition(".")[0])
            if tracked is not None:
                self._guarded(
                    tracked,
                    lambda flow, update=update: flow.on_update(node.node_id, update, now_s, vocab_size),  # type: ignore[misc]
                )

    def _node_became_available(self, now_s: float) -> None:
        for tracked in list(self._tracked.values()):
            if tracked.flow.attempt is None:
                self._guarded(tracked, lambda flow: flow.on_node_available(now_s))

    def _fail_over(self, lost: _LostNode, wire_ids: Sequence[str], now_s: float) -> None:
        for wire_id, tracked in self._tracked_of(wire_ids):
            is_death = lost.is_death and wire_id != lost.undelivered
            self._guarded(
                tracked,
                lambda flow, is_death=is_death: flow.on_node_lost(lost.node_id, lost.reason, now_s, is_death=is_death),  # type: ignore[misc]
            )

    def _tracked_of(self, wire_ids: Iterable[str]) -> list[tuple[str, TrackedRequest]]:
        found = ((wire_id, self._tracked.get(wire_id.rpartition(".")[0])) for wire_id in wire_ids)
        return [(wire_id, tracked) for wire_id, tracked in found if tracked is not None]

    def _handle_lost(self) -> None:
        """Mark nodes down that were found gone. At the end of every input: failing over sends, which may find more."""
        if self._is_handling_lost:
            return
        self._is_handling_lost = True
        try:
            while self._lost:
                lost = self._lost.pop(0)
                node_id, reason = lost.node_id, lost.reason
                if node_id in self.registry.nodes and self.registry.nodes[node_id].is_connected:
                    node = self.registry.nodes[node_id]
                    if node.drain_deadline_s is not None and not node.in_flight:
                        reason = "drained"
                    logger.warning("node %s is down: %s", node_id, reason)
                    wire_ids = self.registry.mark_down(node_id, reason)
                    for round_ in self.audits.values():
                        round_.missing.discard(node_id)
                    self.adapters.forget_node(node_id)
                    self._kv_events.stop(node_id)
                    self._fail_over(lost, wire_ids, self._clock.now_s())
        finally:
            self._is_handling_lost = False

    # -- inside: actions -----------------------------------------------------------------------------------------------
    def _guarded(self, tracked: TrackedRequest, step: Callable[[RequestFlow], list[Action]]) -> None:
        """Run one input of one flow. The router's one broad except: a bug ends the request that met it, not the others."""
        try:
            self._run(tracked, step(tracked.flow))
        except Exception as error:
            request_id = tracked.flow.spec.request_id
            logger.exception("request %s failed in the router", request_id)
            self._forget(tracked)
            if (attempt := tracked.flow.attempt) is not None:
                self.registry.end_dispatch(attempt.node_id, attempt.wire_id)
            self._metrics.request_errors.labels("internal").inc()
            tracked.sink(Fail("internal", f"internal error of the router: {type(error).__name__}", 500))

    def _run(self, tracked: TrackedRequest, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Dispatch():
                    self._dispatch(tracked, action)
                case Release():
                    self.registry.end_dispatch(action.node_id, action.wire_id)
                    node = self.registry.nodes.get(action.node_id)
                    if action.must_abort and node is not None and node.is_connected:
                        self._send(node, Abort((action.wire_id,)))
                case Deliver():
                    tracked.observe_delivery(action, self._clock.now_s())
                    tracked.sink(action)
                case Fail():
                    self._metrics.request_errors.labels(action.kind).inc()
                    tracked.observe_end(self._clock.now_s())
                    tracked.sink(action)
                case Count():
                    tracked.count(action)
        if tracked.flow.is_done:
            self._forget(tracked)

    def _forget(self, tracked: TrackedRequest) -> None:
        spec = tracked.flow.spec
        if self._tracked.pop(spec.request_id, None) is not None and spec.adapter is not None:
            self.adapters.release(spec.adapter)

    def _dispatch(self, tracked: TrackedRequest, action: Dispatch) -> None:
        message = action.message
        if kv_sources := self.registry.kv_addresses(action.source_node_ids)[:MAX_KV_SOURCES]:
            message = msgspec.structs.replace(message, kv_sources=kv_sources)
        num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
        self.registry.start_dispatch(
            action.node_id, message.request_id, num_tokens, is_suspect=action.is_suspect, prefill_ms=action.prefill_ms
        )
        self._metrics.routed_requests.labels(self._options.policy, action.node_id, action.reason).inc()
        tracked.observe_dispatch(action, self._clock.now_s())
        self._send(self.registry.nodes[action.node_id], message, undelivered=message.request_id)

    def _send(self, node: NodeState, message: RouterMessage, undelivered: str = "") -> None:
        if not self._send_to(node.identity, encode(message, node.numbers.next_place())):
            self._lost.append(_LostNode(node.node_id, "connection closed", undelivered=undelivered))

    def _tell_all(self, message: RouterMessage) -> set[str]:
        """Send to all connected nodes; their ids. One that is found gone is marked down with the next input."""
        nodes = self.registry.connected()
        for node in nodes:
            self._send(node, message)
        return {node.node_id for node in nodes}

    def _send_outside(self, identity: bytes, message: RegisterReply | RegisterAgain) -> None:
        self._send_to(identity, encode(message))


def _request_body(flow: RequestFlow, now_s: float) -> dict[str, object]:
    return {
        "request_id": flow.spec.client_request_id,
        "router_request_id": flow.spec.request_id,
        "phase": flow.phase.value,
        "node_id": flow.attempt.node_id if flow.attempt is not None else "",
        "age_s": round(now_s - flow.arrival_s, 3),
        "adapter": flow.spec.adapter.name if flow.spec.adapter is not None else "",
        "num_prompt_tokens": len(flow.spec.prompt_token_ids),
        "num_output_tokens": len(flow.output_token_ids),
        "num_dispatches": flow.num_dispatches,
        "num_faults": flow.num_faults,
        "num_node_deaths": flow.num_node_deaths,
    }
