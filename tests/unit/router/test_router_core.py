"""The wired router without sockets: what it sends, and that one fault stays where it happened."""

from __future__ import annotations

import msgspec
import pytest

from core.config import RouterOptions
from core.errors import OverloadedError
from core.sampling_params import SamplingParams
from core.wire.messages import (
    Abort,
    AuditReply,
    Generate,
    Ping,
    RegisterAgain,
    RegisterReply,
    RequestUpdate,
    RouterMessage,
    Updates,
    decode_router_message,
)
from router.flow_actions import Deliver, Fail, RequestSpec
from router.metrics import RouterMetrics
from router.router_core import RouterCore
from tests.support.virtual_clock import VirtualClock
from tests.unit.router.flow_bench import PROMPT, heartbeat_message, register_message


class CoreBench:
    """A RouterCore whose peers are a list of sent messages and a set of names that are gone."""

    def __init__(self, *node_ids: str, **options: object) -> None:
        self.clock = VirtualClock()
        self.sent: list[tuple[str, RouterMessage]] = []
        self.gone: set[str] = set()
        self.core = RouterCore(RouterOptions(**options), self.clock, self._send, RouterMetrics("tiny"), "x")  # type: ignore[arg-type]
        for node_id in node_ids:
            self.core.handle_message(node_id.encode(), register_message(node_id, "prefill" if node_id[0] == "p" else "decode"))

    def submit(self, request_id: str) -> list[Deliver | Fail]:
        """Start a request; the list fills with its events."""
        events: list[Deliver | Fail] = []
        sampling = SamplingParams(seed=1, max_tokens=4)
        self.core.submit(RequestSpec(request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling), events.append)
        return events

    def generated(self) -> list[tuple[str, str]]:
        """(node, wire id) of every dispatch."""
        return [(node_id, message.request_id) for node_id, message in self.sent if isinstance(message, Generate)]

    def _send(self, identity: bytes, frame: bytes) -> bool:
        if identity.decode() in self.gone:
            return False
        self.sent.append((identity.decode(), decode_router_message(frame)[1]))
        return True


def test_router_core_registration_is_answered_with_the_interval() -> None:
    assert CoreBench("d0", heartbeat_interval_s=0.25).sent == [("d0", RegisterReply("", 0.25))]


@pytest.mark.parametrize("message", [Updates((RequestUpdate(request_id="a.1"),)), heartbeat_message("d9")])
def test_router_core_word_from_an_unknown_node_asks_it_to_register(message: Updates) -> None:
    bench = CoreBench()
    bench.core.handle_message(b"d9", message)
    assert bench.sent == [("d9", RegisterAgain())]


def test_router_core_names_connected_nodes_that_had_the_request_as_sources_of_its_kv() -> None:
    bench = CoreBench()
    for node_id, role, address in (("p0", "prefill", "10.0.0.1:7"), ("d0", "decode", "10.0.0.2:7"), ("d1", "decode", "")):
        message = msgspec.structs.replace(register_message(node_id, role), kv_address=address)
        bench.core.handle_message(node_id.encode(), message)
    bench.submit("a")
    bench.submit("b")

    def finish_prefill(request_id: str) -> Generate:
        update = RequestUpdate(request_id=f"{request_id}.1", token_ids=(5,), is_prefill_done=True)
        bench.core.handle_message(b"p0", Updates((update,)))
        return [message for _node_id, message in bench.sent if isinstance(message, Generate)][-1]

    assert all(message.kv_sources == () for _node_id, message in bench.sent if isinstance(message, Generate))
    assert finish_prefill("a").kv_sources == ("10.0.0.1:7",)
    (decode_node,) = [node_id for node_id, wire_id in bench.generated() if wire_id == "a.2"]
    bench.gone = {decode_node}
    bench.core.ping_all()
    moved = [message for _node_id, message in bench.sent if isinstance(message, Generate)][-1]
    assert (moved.request_id, moved.kv_sources) == ("a.3", ("10.0.0.1:7",)), "a node that is down is not named"
    bench.gone = {decode_node, "p0"}
    bench.core.ping_all()
    (last,) = [message for _node_id, message in bench.sent if isinstance(message, Generate) and message.request_id == "b.2"]
    assert last.kv_sources == ()


def test_router_core_dispatch_to_a_node_that_is_gone_goes_to_the_next() -> None:
    bench = CoreBench("d0", "d1")
    bench.gone = {"d0"}
    bench.submit("a")
    bench.submit("b")
    assert {node_id for node_id, _ in bench.generated()} == {"d1"}
    assert not bench.core.registry.nodes["d0"].is_connected


def test_router_core_all_nodes_gone_at_once_requests_wait() -> None:
    bench = CoreBench("d0", "d1", "p0", node_wait_s=3.0)
    bench.gone = {"d0", "d1", "p0"}
    events = bench.submit("a")
    assert (bench.generated(), events, bench.core.num_in_flight) == ([], [], 1)
    bench.clock.advance(3.0)
    bench.core.on_time()
    assert isinstance(events[0], Fail) and events[0].kind == "no_decode_node"
    assert bench.core.num_in_flight == 0


def test_router_core_ping_finds_the_dead_and_moves_their_requests() -> None:
    bench = CoreBench("d0")
    events = bench.submit("a")
    bench.core.handle_message(b"d1", register_message("d1", "decode"))
    bench.core.handle_message(b"d0", Updates((RequestUpdate(request_id="a.1", token_ids=(7,)),)))
    bench.gone = {"d0"}
    bench.core.ping_all()
    assert ("d1", Ping()) in bench.sent
    assert bench.generated() == [("d0", "a.1"), ("d1", "a.2")]
    bench.core.handle_message(
        b"d1", Updates((RequestUpdate(request_id="a.2", first_index=1, token_ids=(8,), finish_reason="stop"),))
    )
    assert [event.token_ids for event in events if isinstance(event, Deliver)] == [(7,), (8,)]


def test_router_core_bug_in_one_flow_fails_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = CoreBench("d0")
    first, second = bench.submit("a"), bench.submit("b")
    tracked = bench.core._tracked["a"]
    monkeypatch.setattr(type(tracked.flow), "_deliver", _raise_for(tracked.flow, type(tracked.flow)._deliver))
    updates = tuple(RequestUpdate(request_id=f"{name}.1", token_ids=(7,), finish_reason="stop") for name in "ab")
    bench.core.handle_message(b"d0", Updates(updates))
    assert isinstance(first[0], Fail) and first[0].kind == "internal"
    assert isinstance(second[0], Deliver) and second[0].finish_reason == "stop"
    assert bench.core.num_in_flight == 0
    assert bench.core.registry.nodes["d0"].in_flight == {}


def _raise_for(broken: object, original: object) -> object:
    def deliver(flow: object, update: RequestUpdate) -> object:
        if flow is broken:
            raise KeyError("planted")
        return original(flow, update)  # type: ignore[operator]

    return deliver


def test_router_core_cancel_aborts_at_the_node_and_is_safe_to_repeat() -> None:
    bench = CoreBench("d0")
    bench.submit("a")
    for _ in range(2):
        bench.core.cancel("a", "abort")
    assert bench.sent[-1] == ("d0", Abort(("a.1",)))
    assert [message for _, message in bench.sent].count(Abort(("a.1",))) == 1


def test_router_core_room_is_counted_in_requests() -> None:
    bench = CoreBench("d0", max_num_requests=2)
    bench.submit("a")
    bench.core.check_room(1)
    with pytest.raises(OverloadedError, match="of at most 2"):
        bench.core.check_room(2)


def test_router_core_audit_does_not_wait_for_a_node_that_dies_meanwhile() -> None:
    bench = CoreBench("d0", "d1")
    round_ = bench.core.start_audit()
    bench.core.handle_message(b"d0", AuditReply(audit_id=round_.audit_id, node_id="d0", counts={"requests": 0}, problems=()))
    assert round_.missing == {"d1"}
    bench.gone = {"d1"}
    bench.core.ping_all()
    assert (round_.missing, set(round_.replies)) == (set(), {"d0"})


def test_router_core_fail_all_ends_everything_with_one_error_each() -> None:
    bench = CoreBench("d0")
    events = [bench.submit("a"), bench.submit("b")]
    bench.core.fail_all("shutdown", "ending", 503)
    bench.core.fail_all("shutdown", "ending", 503)
    assert [[event.kind for event in each if isinstance(event, Fail)] for each in events] == [["shutdown"], ["shutdown"]]
    assert bench.core.num_in_flight == 0


def test_router_core_that_was_away_itself_blames_no_node_for_the_silence() -> None:
    bench = CoreBench("d0", "d1", heartbeat_timeout_s=5.0)
    bench.core.on_time()
    bench.clock.advance(60.0)  # the whole process was stopped; the nodes' heartbeats lie unread
    bench.core.on_time()
    assert all(node.is_connected for node in bench.core.registry.nodes.values())
    for _ in range(6):
        bench.clock.advance(1.0)
        bench.core.on_time()
    assert not any(node.is_connected for node in bench.core.registry.nodes.values()), "now they had their time"
