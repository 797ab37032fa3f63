"""A RouterCore with two honest nodes, and whatever else is fed to it: honest requests must not notice.

Honest nodes answer at once with the tokens that tests/unit/router/fake_node.py defines. Everything else goes through the wire's
decoder, as the dispatcher does it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.config import RouterOptions
from core.errors import WireError
from core.sampling_params import SamplingParams
from core.wire.messages import (
    Generate,
    NodeMessage,
    Register,
    RequestUpdate,
    Updates,
    decode_node_message,
    decode_router_message,
    encode,
)
from core.wire.numbering import Place
from router.flow_actions import Deliver, Fail, RequestSpec
from router.http_cluster import node_body
from router.metrics import RouterMetrics
from router.router_core import RouterCore
from tests.support.virtual_clock import VirtualClock
from tests.unit.router.fake_node import expected_tokens
from tests.unit.router.flow_bench import heartbeat_message, register_message

VOCAB_SIZE = 100
HONEST = {b"hp": ("honest-p", "prefill"), b"hd": ("honest-d", "decode")}
HOSTILE = {b"e0": ("evil-0", "prefill"), b"e1": ("evil-1", "decode")}  # registered like others, so that they get requests
NUM_TOKENS = 5


@dataclass
class Client:
    """One honest request and what came of it."""

    prompt: list[int]
    events: list[Deliver | Fail] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """What was delivered, checked to come without gap."""
        tokens: list[int] = []
        for event in self.events:
            if isinstance(event, Deliver):
                assert event.first_index == len(tokens)
                assert event.logprobs is None or [entry.token_id for entry in event.logprobs] == list(event.token_ids)
                tokens += event.token_ids
        return tokens


class RouterBench:
    """`inbox` holds dispatches that honest nodes have not answered yet; `wire_ids` all that were ever sent to anybody."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.metrics = RouterMetrics("tiny")
        options = RouterOptions(
            max_attempts=10_000, max_node_deaths=10_000, node_wait_s=1e6, request_timeout_s=1e6, kv_events="on"
        )
        self.core = RouterCore(options, self.clock, self._send, self.metrics, "x")
        self.clients: dict[str, Client] = {}
        self.inbox: list[tuple[bytes, Generate]] = []
        self.wire_ids: list[str] = ["x-0.1"]
        self.tainted: set[str] = set()  # requests that a hostile node has answered in a way that could be true
        for identity, (node_id, role) in {**HONEST, **HOSTILE}.items():
            self._tell(identity, register_message(node_id, role))

    def submit(self) -> None:
        """An honest request."""
        request_id = self.core.new_request_id()
        prompt = [3 + (7 * len(self.clients) + place) % 90 for place in range(12)]
        client = self.clients[request_id] = Client(prompt)
        spec = RequestSpec(request_id=request_id, prompt_token_ids=prompt, sampling=SamplingParams(seed=1, max_tokens=NUM_TOKENS))
        self.core.submit(spec, client.events.append)

    def feed(self, identity: bytes, payload: bytes) -> None:
        """Bytes from a hostile connection."""
        try:
            _, message = decode_node_message(payload)
        except WireError:
            with pytest.raises(WireError):
                self.core.receive(identity, payload)
            return
        node = self.core.registry.node_of(identity)
        if node is not None and not isinstance(message, Register):  # else its number would be all that is looked at
            payload = encode(message, Place(node.numbers.registration_index, node.numbers.num_received + 1))
        if isinstance(message, Updates) and node is not None:
            for update in message.updates:
                if update.request_id in node.in_flight and _could_be_true(update):
                    self.tainted.add(update.request_id.rpartition(".")[0])
        self.core.receive(identity, payload)

    def wire_id(self, identity: bytes, place: int) -> str:
        """A request to speak about: mostly one that this connection has."""
        node = self.core.registry.node_of(identity)
        known = [*node.in_flight] if node is not None and node.in_flight and place % 4 else self.wire_ids
        return known[place % len(known)]

    def answer_one(self) -> None:
        """An honest node answers one dispatch, whole."""
        if self.inbox:
            identity, message = self.inbox.pop(0)
            prompt, num_known = message.prompt_token_ids, len(message.output_token_ids)
            tokens = expected_tokens(prompt, NUM_TOKENS, VOCAB_SIZE)[num_known:]
            if message.stage == "prefill":
                update = RequestUpdate(message.request_id, num_known, (tokens[0],), "length", is_prefill_done=True)
            else:
                update = RequestUpdate(message.request_id, num_known, tuple(tokens), "length")
            self._tell(identity, Updates((update,)))

    def let_time_pass(self, seconds: float) -> None:
        """Honest nodes go on with their heartbeats."""
        for identity, (node_id, _role) in HONEST.items():
            self._tell(identity, heartbeat_message(node_id))
        self.clock.advance(seconds)
        self.core.on_time()

    def settle(self) -> None:
        """The hostile ones fall silent; everything honest must end."""
        for _ in range(400):
            self.let_time_pass(1.0)
            while self.inbox:
                self.answer_one()
            if not self.core.num_in_flight:
                break
        self.check()
        assert self.core.num_in_flight == 0
        for request_id, client in self.clients.items():
            last = client.events[-1]
            assert not isinstance(last, Fail), last
            if request_id not in self.tainted:
                assert client.tokens == expected_tokens(client.prompt, NUM_TOKENS, VOCAB_SIZE)
        assert not any(node.in_flight for node in self.core.registry.connected())

    def check(self) -> None:
        """Counts add up and everything can be shown."""
        registry = self.core.registry
        for node in registry.nodes.values():
            assert node.num_in_flight_tokens == sum(node.in_flight.values())
            if node.is_connected:
                assert registry.node_of(node.identity) is node, "two nodes behind one connection, or none"
        bodies = [node_body(node, self.clock.now_s()) for node in registry.nodes.values()]
        round_ = self.core.start_audit()
        del self.core.audits[round_.audit_id]
        replies = {node_id: (reply.counts, reply.problems) for node_id, reply in round_.replies.items()}
        json.loads(msgspec.json.encode({"nodes": bodies, "audit": replies}), parse_constant=_no_constant)
        check_exposition(self.metrics.render().decode())

    def _tell(self, identity: bytes, message: NodeMessage) -> None:
        self.core.handle_message(identity, decode_node_message(encode(message))[1])

    def _send(self, identity: bytes, frame: bytes) -> bool:
        _, message = decode_router_message(frame)
        if isinstance(message, Generate):
            self.wire_ids.append(message.request_id)
            if identity in HONEST:
                self.inbox.append((identity, message))
        return True


def _could_be_true(update: RequestUpdate) -> bool:
    """Whether nobody can tell that this update is a lie: only then may it change what the client gets."""
    is_news = bool(update.token_ids) or update.finish_reason in ("stop", "length")
    return is_news and all(0 <= token_id < VOCAB_SIZE for token_id in update.token_ids)


def check_exposition(text: str) -> None:
    """Valid in Prometheus' text format, with each series once."""
    seen = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = (sample.name, tuple(sorted(sample.labels.items())))
            assert series not in seen, f"twice: {series}"
            seen.add(series)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
