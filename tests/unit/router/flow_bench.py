"""Drives one RequestFlow against a real registry and placer under a hand-moved clock, and keeps what a client would see."""

from __future__ import annotations

from typing import Any

from core.config import RouterOptions
from core.sampling_params import SamplingParams
from core.stats import EngineStats
from core.wire.messages import Heartbeat, NodeLoad, Register, RequestUpdate
from router.flow_actions import Action, Count, Deliver, Dispatch, Fail, Release, RequestSpec
from router.policy import Placer
from router.registry import NodeRegistry
from router.request_flow import RequestFlow
from tests.unit.router.fake_node import model_info

PROMPT = list(range(10, 30))


def register_message(node_id: str, role: str, *, generation: int = 1, fingerprint: bytes = b"m" * 16) -> Register:
    """A Register as a node sends it."""
    return Register(
        node_id=node_id,
        role=role,
        generation=generation,
        model=model_info(100, 256, fingerprint),
        max_num_seqs=8,
        num_blocks=64,
        connector="none",
    )


def heartbeat_message(node_id: str, *, generation: int = 1, is_draining: bool = False, step_age_s: float = 0.0) -> Heartbeat:
    """A Heartbeat as a node sends it."""
    load = NodeLoad(step_age_s=step_age_s)
    return Heartbeat(node_id=node_id, generation=generation, load=load, stats=EngineStats(), is_draining=is_draining)


class FlowBench:
    """Nodes p0, p1, … and d0, d1, …; `tokens`, `finish_reason` and `fail` are the client's view; `open` maps wire id to node."""

    def __init__(
        self, num_prefill: int = 1, num_decode: int = 1, *, sampling: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.now_s = 100.0
        self.options = RouterOptions(**options)
        self.registry = NodeRegistry(5.0, 60.0)
        for role, count in (("prefill", num_prefill), ("decode", num_decode)):
            for place in range(count):
                self.registry.register(register_message(f"{role[0]}{place}", role), f"{role[0]}{place}".encode(), self.now_s)
        spec = RequestSpec(
            request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(seed=1, **{"max_tokens": 6, **(sampling or {})})
        )
        self.flow = RequestFlow(spec, self.options, Placer(self.options, self.registry), self.now_s)
        self.tokens: list[int] = []
        self.delivered: list[Deliver] = []
        self.finish_reason = ""
        self.fail: Fail | None = None
        self.open: dict[str, str] = {}
        self.dispatches: list[Dispatch] = []
        self.aborted: list[str] = []
        self.counts: list[Count] = []

    def start(self) -> FlowBench:
        """Begin; returns itself."""
        return self.take(self.flow.start(self.now_s))

    def take(self, actions: list[Action]) -> FlowBench:
        """Carry out actions and check what must always hold."""
        for action in actions:
            assert not self.finish_reason or isinstance(action, Release | Count), f"{action} after the end"
            match action:
                case Dispatch():
                    assert not self.open, "two dispatches at a time"
                    assert action.message.output_token_ids == self.tokens
                    assert action.message.request_id not in {sent.message.request_id for sent in self.dispatches}
                    self.open[action.message.request_id] = action.node_id
                    self.dispatches.append(action)
                case Release():
                    assert self.open.pop(action.wire_id) == action.node_id
                    self.aborted += [action.wire_id] if action.must_abort else []
                case Deliver():
                    assert action.first_index == len(self.tokens), "a token is repeated or missing"
                    self.tokens += action.token_ids
                    self.delivered.append(action)
                    self.finish_reason = action.finish_reason
                case Fail():
                    assert self.fail is None
                    self.fail = action
                case Count():
                    self.counts.append(action)
        if self.flow.is_done:
            assert not self.open, "a dispatch was not released"
        return self

    def update(self, *token_ids: int, wire_id: str | None = None, node_id: str | None = None, **fields: Any) -> FlowBench:
        """An update of the open dispatch (or of wire_id), in order unless first_index says otherwise."""
        if wire_id is None:
            (wire_id, current), *_ = self.open.items()
            node_id = node_id or current
        fields.setdefault("first_index", len(self.tokens))
        message = RequestUpdate(request_id=wire_id, token_ids=token_ids, **fields)
        return self.take(self.flow.on_update(node_id or "", message, self.now_s))

    def lose(self, node_id: str) -> FlowBench:
        """The node dies."""
        self.registry.mark_down(node_id, "died")
        return self.take(self.flow.on_node_lost(node_id, "died", self.now_s))

    def add(self, node_id: str, role: str, generation: int = 2) -> FlowBench:
        """A node registers."""
        self.registry.register(
            register_message(node_id, role, generation=generation), f"{node_id}:{generation}".encode(), self.now_s
        )
        return self.take(self.flow.on_node_available(self.now_s))

    def wait(self, seconds: float) -> FlowBench:
        """Let time pass, stopping at every deadline."""
        end_s = self.now_s + seconds
        while not self.flow.is_done and self.flow.next_deadline_s <= end_s:
            self.now_s = max(self.now_s, self.flow.next_deadline_s)
            self.take(self.flow.on_time(self.now_s))
        self.now_s = end_s
        return self

    @property
    def nodes(self) -> list[str]:
        """Where dispatches went, in order."""
        return [dispatch.node_id for dispatch in self.dispatches]

    def counted(self, what: str) -> list[str]:
        """Reasons of the counts of one kind."""
        return [count.reason for count in self.counts if count.what == what]
