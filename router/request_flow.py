"""The life of one request as a state machine over plain state: inputs with the time in, actions out, no I/O.

RouterCore feeds it and carries out its actions; a simulation can do the same under a virtual clock.

    start ─► PREFILL ──(first token, then is_prefill_done)──► DECODE ─► DONE
       └────────┬── no prefill node, short prompt, timeout or fault ──►┘▲
             WAITING ◄── no decode node, or a pause before the same node is tried again
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import Enum

from core.config import RouterOptions
from core.step import TokenLogprob
from core.wire.messages import Generate, RequestUpdate
from router.flow_actions import Action, Count, Deliver, Dispatch, Fail, Release, RequestSpec
from router.policy import Placement, Placer, RoutedRequest
from router.update_check import update_problem

RETRY_BACKOFF_S = 0.05
MAX_RETRY_BACKOFF_S = 1.0
SUSPECT_RETRY_S = 0.25
SUSPECT_PATIENCE = 3  # times node_wait_s: a node that died is loading its model
NODE_RETRY_AFTER_S = 1.0  # what clients are told when no decode node is alive


class FlowPhase(Enum):
    """Where a request stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(slots=True)
class Attempt:
    """The dispatch that is current. Updates that carry another wire id belong to an older one and are ignored.

    num_moved_tokens: how many known tokens came along from a node that was lost or drained; 0 once their source is counted.
    """

    wire_id: str
    node_id: str
    num_moved_tokens: int = 0
    num_cached_tokens: int = 0
    is_prefill_done: bool = False


@dataclass(slots=True)
class RequestFlow:
    """One request. Every input returns the actions that follow from it; after DONE all inputs return none.

    A fault is a dispatch that ended without its answer because of the node; options.max_attempts faults end the request, and so
    do options.max_node_deaths of nodes: it may be what kills them. Handoff, drain and prefill timeout are none. At most one
    dispatch per request is a prefill: content-addressed KV makes whatever a failed one stored a prefix hit for the decode node.
    The decode node is chosen at handoff, not before.
    """

    spec: RequestSpec
    options: RouterOptions
    placer: Placer
    arrival_s: float
    phase: FlowPhase = FlowPhase.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    attempt: Attempt | None = None
    num_dispatches: int = 0
    num_faults: int = 0
    num_node_deaths: int = 0
    num_cached_tokens: int = 0
    _phase_deadline_s: float | None = None  # PREFILL: prefill timeout; WAITING: node wait
    _waits_for: str = ""  # WAITING: why the last placement found no node
    _retry_at_s: float = 0.0
    _has_tried_prefill: bool = False
    _has_moved: bool = False  # lost or left its node since the last dispatch
    _faulty_node_ids: set[str] = field(default_factory=set)
    _past_node_ids: list[str] = field(default_factory=list)  # that have had it, the latest first, each once
    _last_fault: str = ""
    _moving_reason: str = ""  # set while a request with output tokens is between a lost decode node and its next token
    _block_hashes: tuple[bytes, ...] = ()
    _prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    _are_prompt_logprobs_delivered: bool = False

    # -- inputs --------------------------------------------------------------------------------------------------------
    def start(self, now_s: float) -> list[Action]:
        """First dispatch, or begin to wait for a node."""
        return self._place(now_s)

    def on_update(self, node_id: str, update: RequestUpdate, now_s: float, vocab_size: int = 2**31) -> list[Action]:
        """News from a node. Late, repeated and foreign updates change nothing; one that cannot be true is a fault."""
        attempt = self.attempt
        if attempt is None or update.request_id != attempt.wire_id or node_id != attempt.node_id:
            return []
        num_known = len(self.output_token_ids)
        if problem := update_problem(update, vocab_size, len(self.spec.prompt_token_ids) + num_known):
            return self._fault("bad_update", f"{node_id} sent {problem}", now_s)
        if update.token_ids and update.first_index > num_known:
            return self._fault("token_gap", f"{node_id} sent token {update.first_index} after token {num_known - 1}", now_s)
        attempt.num_cached_tokens = max(attempt.num_cached_tokens, update.num_cached_tokens)
        actions = self._deliver(update)
        if self.phase is FlowPhase.DONE:
            return actions
        is_prefill = self.phase is FlowPhase.PREFILL
        attempt.is_prefill_done |= is_prefill and update.is_prefill_done
        if is_prefill and update.finish_reason == "length" and self.output_token_ids:
            pass  # a prefill stage samples exactly one token: its end is not the request's
        elif update.finish_reason:
            reason = "node_abort" if update.finish_reason == "abort" else "node_error"
            detail = update.error or f"ended with finish_reason {update.finish_reason!r}"
            return actions + self._fault(reason, f"{node_id}: {detail}", now_s)
        if attempt.is_prefill_done and self.output_token_ids:
            actions.append(self._release(must_abort=False))
            actions += self._place_decode("handoff", now_s)
        return actions

    def on_node_lost(self, node_id: str, reason: str, now_s: float, *, is_death: bool = True) -> list[Action]:
        """The node died or stalled (is_death), or merely forgot its requests. reason is for people."""
        if self.attempt is None or self.attempt.node_id != node_id:
            return []
        self.num_node_deaths += is_death
        return self._fault("node_down", f"{node_id} {reason}", now_s)

    def on_drain_overdue(self, node_id: str, now_s: float) -> list[Action]:
        """The node wants to leave and has waited long enough: go on at another one, if there is any."""
        if self.attempt is None or self.attempt.node_id != node_id or not self.placer.has_decode_node():
            return []
        actions: list[Action] = []
        if self.phase is FlowPhase.PREFILL:
            actions.append(Count("local_prefill", "drain"))
        elif self.output_token_ids:
            self._moving_reason = "drain"
        self._has_moved = True
        actions.append(self._release(must_abort=True))
        return actions + self._place_decode("drain", now_s)

    def on_node_available(self, now_s: float) -> list[Action]:
        """A node registered or recovered: waiting requests try again."""
        if self.phase is not FlowPhase.WAITING or now_s < self._retry_at_s:
            return []
        return self._place(now_s)

    def on_time(self, now_s: float) -> list[Action]:
        """Act on deadlines that have passed; call when next_deadline_s is reached, earlier is harmless."""
        if self.phase is FlowPhase.DONE:
            return []
        if now_s >= self.deadline_s:
            where = f"after {len(self.output_token_ids)} output tokens, while {self.phase.value}"
            return self._fail("deadline", f"not finished within {self.options.request_timeout_s:g} s ({where})", 504)
        has_passed = self._phase_deadline_s is not None and now_s >= self._phase_deadline_s
        if self.phase is FlowPhase.PREFILL and has_passed:
            actions: list[Action] = [self._release(must_abort=True), Count("local_prefill", "prefill_timeout")]
            return actions + self._place_decode("local_prefill", now_s)
        if self.phase is FlowPhase.WAITING and now_s >= self._retry_at_s and (self._retry_at_s or has_passed):
            return self._place(now_s)
        return []

    def cancel(self) -> list[Action]:
        """Nobody wants more: the client is gone, or a stop string ended the text. Nothing is delivered any more."""
        return self._end([])

    def fail(self, kind: str, message: str, http_status: int, retry_after_s: float = 0.0) -> list[Action]:
        """End with an error that comes from outside, e.g. the router's own shutdown."""
        return self._fail(kind, message, http_status, retry_after_s)

    # -- queries -------------------------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        """True once the last action was returned."""
        return self.phase is FlowPhase.DONE

    @property
    def is_suspect(self) -> bool:
        """True when one more node's death ends it: until then it is not trusted with just any node."""
        return 0 < self.options.max_node_deaths - 1 <= self.num_node_deaths

    @property
    def deadline_s(self) -> float:
        """When the request must have ended."""
        return self.arrival_s + min(self.options.request_timeout_s, self.spec.time_left_s)

    @property
    def next_deadline_s(self) -> float:
        """When on_time has something to do at the latest."""
        times = [self.deadline_s]
        if self._phase_deadline_s is not None:
            times.append(self._phase_deadline_s)
        if self.phase is FlowPhase.WAITING and self._retry_at_s:
            times.append(self._retry_at_s)
        return min(times)

    # -- tokens --------------------------------------------------------------------------------------------------------
    def _deliver(self, update: RequestUpdate) -> list[Action]:
        """Take what is new in an update; ends the request when it is complete. The update starts at or before our last token."""
        first_index = len(self.output_token_ids)
        num_skipped = first_index - update.first_index if update.token_ids else 0
        room = self.spec.sampling.max_tokens - first_index
        token_ids = update.token_ids[num_skipped : num_skipped + room]
        logprobs = update.logprobs[num_skipped : num_skipped + room] if update.logprobs is not None else None
        if not self.output_token_ids:
            self.num_cached_tokens = max(self.num_cached_tokens, update.num_cached_tokens)
        self.output_token_ids += token_ids
        prompt_logprobs = self._take_prompt_logprobs(update)

        finish_reason = ""
        is_full = len(self.output_token_ids) >= self.spec.sampling.max_tokens
        if update.finish_reason == "stop":
            finish_reason = "stop"
        elif is_full or (update.finish_reason == "length" and self.phase is FlowPhase.DECODE):
            finish_reason = "length"
        actions: list[Action] = self._count_move() if token_ids else []
        if token_ids or finish_reason or prompt_logprobs is not None:
            actions.append(
                Deliver(
                    first_index=first_index,
                    token_ids=token_ids,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=self.num_cached_tokens,
                    finish_reason=finish_reason,
                    stop_token_id=update.stop_token_id if finish_reason == "stop" else None,
                )
            )
        if finish_reason:
            return self._end(actions, must_abort=not update.finish_reason)
        return actions

    def _count_move(self) -> list[Action]:
        """The first token after a move: where did the KV of what was known before come from?"""
        actions: list[Action] = []
        if self._moving_reason:
            actions.append(Count("migration", self._moving_reason, "resumed"))
            self._moving_reason = ""
        if self.attempt is not None and (num_moved := self.attempt.num_moved_tokens):
            num_cached = min(self.attempt.num_cached_tokens, num_moved)
            actions.append(Count("moved_tokens", "cached", amount=num_cached))
            actions.append(Count("moved_tokens", "recomputed", amount=num_moved - num_cached))
            self.attempt.num_moved_tokens = 0
        return actions

    def _take_prompt_logprobs(self, update: RequestUpdate) -> tuple[TokenLogprob, ...] | None:
        """Collect them chunk by chunk; return all of them once, when the last arrived."""
        if self.spec.sampling.prompt_logprobs is None or self._are_prompt_logprobs_delivered:
            return None
        self._prompt_logprobs += update.prompt_logprobs or ()
        num_wanted = len(self.spec.prompt_token_ids) - 1  # the first prompt token has none
        if len(self._prompt_logprobs) < num_wanted:
            return None
        self._are_prompt_logprobs_delivered = True
        return tuple(self._prompt_logprobs[:num_wanted])

    # -- dispatching ---------------------------------------------------------------------------------------------------
    def _place(self, now_s: float) -> list[Action]:
        if self._has_tried_prefill or self.output_token_ids or not self.placer.has_decode_node():
            return self._place_decode("retry" if self.num_dispatches else "local_prefill", now_s)
        placement = self.placer.place_prefill(self._routed(now_s))
        self._has_tried_prefill = True
        if not placement.node_id:
            counts: list[Action] = [Count("local_prefill", placement.reason), Count("decision", placement.reason, "prefill")]
            return counts + self._place_decode("local_prefill", now_s)
        self.phase = FlowPhase.PREFILL
        self._phase_deadline_s = now_s + self.options.prefill_timeout_s
        return [Count("decision", placement.reason, "prefill"), self._dispatch(placement, "prefill", "prefill", now_s)]

    def _place_decode(self, reason: str, now_s: float) -> list[Action]:
        placement = self.placer.place_decode(
            self._routed(now_s, is_handoff=reason == "handoff"), self._faulty_node_ids, is_suspect=self.is_suspect
        )
        if not placement.node_id:
            return self._wait_for_node(placement.reason, now_s)
        if placement.node_id in self._faulty_node_ids and not self._retry_at_s:
            # Only nodes that failed this request are left: a pause keeps a node that refuses at once from using up all attempts.
            self.phase = FlowPhase.WAITING
            self._phase_deadline_s = None
            self._retry_at_s = now_s + min(RETRY_BACKOFF_S * 2 ** (self.num_faults - 1), MAX_RETRY_BACKOFF_S)
            return []
        self.phase = FlowPhase.DECODE
        self._phase_deadline_s = None
        self._retry_at_s = 0.0
        return [Count("decision", placement.reason, "decode"), self._dispatch(placement, "decode", reason, now_s)]

    def _wait_for_node(self, reason: str, now_s: float) -> list[Action]:
        if reason == "other_suspect":  # it will end or be cleared: no node is missing, so only the request's deadline counts
            self.phase = FlowPhase.WAITING
            self._phase_deadline_s = None
            self._retry_at_s = now_s + SUSPECT_RETRY_S
            return []
        if self.phase is not FlowPhase.WAITING or self._phase_deadline_s is None or self._waits_for != reason:
            self.phase, self._waits_for = FlowPhase.WAITING, reason
            patience = SUSPECT_PATIENCE if reason == "last_node" else 1
            self._phase_deadline_s = now_s + self.options.node_wait_s * patience
        self._retry_at_s = 0.0
        if now_s < self._phase_deadline_s:
            return []
        what = f"no decode node is alive (waited {self.options.node_wait_s:g} s)"
        if reason == "last_node":
            what = f"{self.num_node_deaths} nodes died with this request, and only one decode node is alive"
        return self._fail("no_decode_node", self._with_last_fault(what), 503, NODE_RETRY_AFTER_S)

    def _routed(self, now_s: float, *, is_handoff: bool = False) -> RoutedRequest:
        spec = self.spec
        uses_cache = spec.sampling.prompt_logprobs is None or self._are_prompt_logprobs_delivered
        if not self._block_hashes and uses_cache:
            adapter_fingerprint = spec.adapter.fingerprint if spec.adapter is not None else b""
            self._block_hashes = self.placer.block_hashes(spec.prompt_token_ids, spec.cache_salt, adapter_fingerprint)
        return RoutedRequest(
            num_tokens=len(spec.prompt_token_ids) + len(self.output_token_ids),
            block_hashes=self._block_hashes,
            session_key=spec.session_key,
            is_handoff=is_handoff,
            now_s=now_s,
            siblings=spec.siblings,
        )

    def _dispatch(self, placement: Placement, stage: str, reason: str, now_s: float) -> Dispatch:
        node_id = placement.node_id
        assert self.attempt is None, "a request has one dispatch at a time"
        self.num_dispatches += 1
        num_known_tokens = len(self.spec.prompt_token_ids) + len(self.output_token_ids)
        num_moved_tokens = num_known_tokens if self._has_moved else 0
        self._has_moved = False
        self.attempt = Attempt(f"{self.spec.request_id}.{self.num_dispatches}", node_id, num_moved_tokens)
        if not self._are_prompt_logprobs_delivered:
            self._prompt_logprobs.clear()  # an unfinished set of an earlier dispatch: this one computes them all
        sampling = self.spec.sampling
        if self._are_prompt_logprobs_delivered:
            # They would keep the node from using its prefix hits, since logprobs of the prompt need the prompt computed.
            sampling = dataclasses.replace(sampling, prompt_logprobs=None)
        message = Generate(
            request_id=self.attempt.wire_id,
            stage=stage,
            prompt_token_ids=self.spec.prompt_token_ids,
            output_token_ids=list(self.output_token_ids),
            sampling=sampling,
            time_left_s=self.deadline_s - now_s,
            priority=self.spec.priority,
            cache_salt=self.spec.cache_salt,
            adapter_name=self.spec.adapter.name if self.spec.adapter is not None else "",
            adapter_fingerprint=self.spec.adapter.fingerprint if self.spec.adapter is not None else b"",
        )
        self._past_node_ids = [node_id, *(past for past in self._past_node_ids if past != node_id)]
        return Dispatch(node_id, message, reason, self.is_suspect, tuple(self._past_node_ids[1:]), placement.prefill_ms)

    # -- faults and ends -----------------------------------------------------------------------------------------------
    def _fault(self, reason: str, detail: str, now_s: float) -> list[Action]:
        assert self.attempt is not None
        self.num_faults += 1
        self._has_moved = True
        self._last_fault = detail
        self._faulty_node_ids.add(self.attempt.node_id)
        actions: list[Action] = []
        if self.phase is FlowPhase.PREFILL:
            actions.append(Count("local_prefill", "prefill_failed"))
        elif self.output_token_ids:
            self._moving_reason = reason
        actions.append(self._release(must_abort=True))
        if self.num_faults >= self.options.max_attempts:
            what = f"gave up after {self.num_faults} failed attempts"
            return actions + self._fail("too_many_attempts", self._with_last_fault(what), 500)
        if self.num_node_deaths >= self.options.max_node_deaths:
            what = f"gave up: {self.num_node_deaths} nodes died while they had this request, which may be the cause"
            return actions + self._fail("too_many_node_deaths", self._with_last_fault(what), 500)
        actions.append(Count("retry", reason))
        return actions + self._place_decode("retry", now_s)

    def _release(self, must_abort: bool) -> Release:
        assert self.attempt is not None
        release = Release(self.attempt.node_id, self.attempt.wire_id, must_abort)
        self.attempt = None
        return release

    def _fail(self, kind: str, message: str, http_status: int, retry_after_s: float = 0.0) -> list[Action]:
        if self.phase is FlowPhase.DONE:
            return []
        actions = self._end([])
        actions.append(Fail(kind, message, http_status, retry_after_s))
        return actions

    def _end(self, actions: list[Action], must_abort: bool = True) -> list[Action]:
        if self._moving_reason:
            actions.append(Count("migration", self._moving_reason, "failed"))
            self._moving_reason = ""
        if self.attempt is not None:
            actions.append(self._release(must_abort))
        self.phase = FlowPhase.DONE
        self._phase_deadline_s = None
        return actions

    def _with_last_fault(self, what: str) -> str:
        return f"{what}; last fault: {self._last_fault}" if self._last_fault else what
