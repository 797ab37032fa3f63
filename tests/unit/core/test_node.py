"""A node over the real wire: the fake model, a real ROUTER socket, the node's loop in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import TypeVar

import msgspec
import pytest
import zmq

from core.config import Config, EngineOptions, NodeOptions
from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.pool_memory import KVPoolMemory
from core.node import NodeServer
from core.sampling_params import SamplingParams
from core.wire import messages
from core.wire.numbering import OUTSIDE, MessageNumbers, Place, add_header
from core.wire.sockets import configure_router_socket
from tests.support.fake_runner import FakeRunner, fake_layout, fake_model, oracle_tokens
from tests.support.memory_connector import MemoryConnector

MessageT = TypeVar("MessageT")
DEADLINE_S = 20.0


class NodeUnderTest:
    """The node's thread and the router's end of its connection."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        configure_router_socket(self.socket)
        port = self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        config = Config(
            engine=EngineOptions(block_size=4, max_num_seqs=4, max_num_batched_tokens=64),
            node=NodeOptions(router=f"127.0.0.1:{port}", node_id="n1", metrics_port=-1),
        )
        pool = KVPoolMemory(fake_layout(4), 64)
        self.connector = MemoryConnector()
        self.node = NodeServer(config, "prefill", fake_model(4, 256), pool, FakeRunner(pool), self.connector)
        self.exit_code: int | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.identity = b""
        self.numbers = MessageNumbers(0)

    def _run(self) -> None:
        self.exit_code = self.node.run()

    def wait_for(self, kind: type[MessageT]) -> MessageT:
        """The next message of a kind; others are skipped."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            if self.socket.poll(100):
                self.identity, payload = self.socket.recv_multipart()
                place, message = messages.decode_node_message(payload)
                assert place == OUTSIDE if isinstance(message, messages.Register) else place.number > 0
                if isinstance(message, kind):
                    return message
        raise AssertionError(f"no {kind.__name__} came")

    def wait_for_tokens(self, request_id: str, count: int) -> list[int]:
        """Tokens of a request until there are `count`, checked to come without gap."""
        tokens: list[int] = []
        while len(tokens) < count:
            for update in self.wait_for(messages.Updates).updates:
                if update.request_id == request_id and update.token_ids:
                    assert update.first_index == len(tokens)
                    tokens += update.token_ids
        return tokens

    def send(self, message: messages.RouterMessage) -> None:
        self.send_at(self.numbers.next_place(), message)

    def send_at(self, place: Place, message: messages.RouterMessage) -> None:
        self.socket.send_multipart([self.identity, messages.encode(message, place)])

    def register(self) -> messages.Register:
        registration = self.wait_for(messages.Register)
        index = registration.registration_index
        self.numbers = MessageNumbers(index)
        self.send_at(OUTSIDE, messages.RegisterReply(heartbeat_interval_s=0.05, registration_index=index))
        return registration

    def audit(self) -> messages.AuditReply:
        self.send(messages.AuditRequest(7))
        return self.wait_for(messages.AuditReply)

    def close(self) -> None:
        self.node.stop()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        self.context.destroy(linger=0)


@pytest.fixture
def node() -> Iterator[NodeUnderTest]:
    under_test = NodeUnderTest()
    yield under_test
    under_test.close()


def _generate(request_id: str, stage: str = "decode", max_tokens: int = 5) -> messages.Generate:
    return messages.Generate(
        request_id=request_id,
        stage=stage,
        prompt_token_ids=[1, 2, 3, 4, 5, 6],
        output_token_ids=[],
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        time_left_s=60.0,
    )


def test_node_registers_and_generates_the_right_tokens(node: NodeUnderTest) -> None:
    registration = node.register()
    assert (registration.node_id, registration.role, registration.num_blocks) == ("n1", "prefill", 64)
    node.send(_generate("a"))
    assert node.wait_for_tokens("a", 5) == oracle_tokens([1, 2, 3, 4, 5, 6], 5)


def test_node_registers_where_its_kv_is_and_hands_the_sources_of_a_request_to_its_connector(node: NodeUnderTest) -> None:
    assert node.register().kv_address == "memory:1"
    sources = ("10.0.0.1:7", "10.0.0.2:7")
    node.send(msgspec.structs.replace(_generate("a"), kv_sources=sources))
    assert node.wait_for_tokens("a", 5) == oracle_tokens([1, 2, 3, 4, 5, 6], 5)
    assert node.connector.sources == {"a": sources}


def test_node_prefill_stage_reports_token_then_done(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a", stage="prefill", max_tokens=50))
    updates = []
    while not updates or not updates[-1].is_prefill_done:
        updates += node.wait_for(messages.Updates).updates
    assert [token for update in updates for token in update.token_ids] == oracle_tokens([1, 2, 3, 4, 5, 6], 1)
    assert [update.finish_reason for update in updates if update.finish_reason] == ["length"]


def test_node_abort_ends_request_and_audit_is_empty(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a", max_tokens=200))
    node.wait_for_tokens("a", 2)
    node.send(messages.Abort(("a", "unknown")))
    reply = node.audit()
    assert (reply.problems, reply.counts["requests"], reply.counts["request_references"]) == ((), 0, 0)


def test_node_audit_counts_the_leading_blocks_of_a_prompt_that_it_has(node: NodeUnderTest) -> None:
    model = node.register().model
    prompt = list(range(1, 3 * model.block_size + 2))
    names: list[bytes] = []
    root = Namespace(model.model_fingerprint, model.layout_fingerprint, model.block_size).root_hash("salt")
    extend_block_hashes(names, [*prompt, *range(100, 100 + model.block_size)], model.block_size, root)
    assert messages.LEADING_BLOCKS not in node.audit().counts
    node.send(msgspec.structs.replace(_generate("a", max_tokens=1), prompt_token_ids=prompt, cache_salt="salt"))
    node.wait_for_tokens("a", 1)
    node.send(messages.AuditRequest(8, tuple(names)))
    assert node.wait_for(messages.AuditReply).counts[messages.LEADING_BLOCKS] == 3
    node.send(messages.AuditRequest(9, tuple(names[1:2])))  # whatever it begins with
    assert node.wait_for(messages.AuditReply).counts[messages.LEADING_BLOCKS] == 1


def test_node_bad_request_is_refused_with_the_reason(node: NodeUnderTest) -> None:
    node.register()
    for stage, prompt, fragment in (("decode", [], "prompt"), ("nonsense", [1], "nonsense"), ("decode", [10**6], "prompt")):
        node.send(
            messages.Generate(
                request_id="bad",
                stage=stage,
                prompt_token_ids=prompt,
                output_token_ids=[],
                sampling=SamplingParams(),
                time_left_s=9.0,
            )
        )
        (update,) = node.wait_for(messages.Updates).updates
        assert update.finish_reason == "error" and fragment in update.error


def test_node_garbage_on_the_wire_is_ignored(node: NodeUnderTest) -> None:
    node.register()
    place = node.numbers.next_place()
    garbage = (
        b"",
        b"\x00",
        b"\xff" * 100,
        add_header(place, b"\x81\xa4type\xa4evil"),
        messages.encode(messages.Ping(), place)[:-1],
    )
    node.numbers = MessageNumbers(0)  # garbage does not count
    for payload in garbage:
        node.socket.send_multipart([node.identity, payload])
    node.send(_generate("a"))
    assert len(node.wait_for_tokens("a", 5)) == 5


def test_node_forgotten_by_router_drops_requests_and_registers_again(node: NodeUnderTest) -> None:
    first = node.register()
    node.send(_generate("a", max_tokens=240))
    node.wait_for_tokens("a", 1)
    node.send_at(OUTSIDE, messages.RegisterAgain())
    second = node.register()
    assert second.generation == first.generation
    assert node.audit().counts["requests"] == 0


def test_node_message_repeated_or_late_is_ignored(node: NodeUnderTest) -> None:
    node.register()
    place = node.numbers.next_place()
    for _ in range(3):
        node.send_at(place, _generate("a"))
    assert node.wait_for_tokens("a", 5) == oracle_tokens([1, 2, 3, 4, 5, 6], 5)
    node.send_at(Place(7, 2), _generate("of another registration"))
    assert node.audit().counts["requests"] == 0


def test_node_message_lost_on_the_way_drops_requests_and_registers_anew(node: NodeUnderTest) -> None:
    first = node.register()
    node.send(_generate("a", max_tokens=240))
    node.wait_for_tokens("a", 1)
    node.numbers.next_place()  # a message that never arrives
    node.send(messages.Ping())
    second = node.register()
    assert second.registration_index == first.registration_index + 1
    assert node.audit().counts["requests"] == 0


def test_node_connection_breaks_requests_are_dropped_and_node_registers_anew(node: NodeUnderTest) -> None:
    first = node.register()
    node.send(_generate("a", max_tokens=240))
    node.wait_for_tokens("a", 1)
    node.socket.close(linger=0)
    node.socket = node.context.socket(zmq.ROUTER)  # as a router that was restarted
    configure_router_socket(node.socket)
    end_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            node.socket.bind(f"tcp://127.0.0.1:{node.port}")
            break
        except zmq.ZMQError:  # the old socket closes in the background
            assert time.monotonic() < end_s
            time.sleep(0.01)
    second = node.register()
    assert (second.generation, second.registration_index) == (first.generation, first.registration_index + 1)
    assert node.audit().counts["requests"] == 0


def test_node_heartbeats_carry_load_and_stats(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a", max_tokens=3))
    node.wait_for_tokens("a", 3)
    heartbeat = node.wait_for(messages.Heartbeat)
    while heartbeat.stats.num_generation_tokens < 3:
        heartbeat = node.wait_for(messages.Heartbeat)
    assert heartbeat.stats.requests_finished == {"length": 1}
    assert heartbeat.load.num_running == 0


def test_node_drained_finishes_what_runs_then_ends(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a", max_tokens=240))  # long enough to be still running when the late one comes
    node.send(messages.Drain())
    node.send(_generate("late"))
    seen: list[messages.RequestUpdate] = []
    while not {"a", "late"} <= {update.request_id for update in seen if update.finish_reason}:
        seen += node.wait_for(messages.Updates).updates
    assert next(update for update in seen if update.request_id == "late").error == "this node is draining"
    assert sum(len(update.token_ids) for update in seen if update.request_id == "a") == 240
    node.thread.join(DEADLINE_S)
    assert node.exit_code == 0


def test_node_refused_ends_with_exit_code_one(node: NodeUnderTest) -> None:
    node.wait_for(messages.Register)
    node.send_at(OUTSIDE, messages.RegisterReply(refusal="another model"))
    node.thread.join(DEADLINE_S)
    assert node.exit_code == 1


def test_node_asked_for_kv_events_tells_its_cache_and_then_what_changes(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a", max_tokens=1))
    node.wait_for_tokens("a", 1)
    node.send(messages.KVSnapshotRequest())
    told = node.wait_for(messages.KVEvents)
    assert told.first_sequence == 0 and told.events[0] == messages.PoolCleared()
    (stored,) = [event for event in told.events if isinstance(event, messages.BlockStored)]
    assert len(stored.block_hashes) == 1, "the one full block of six tokens"
    node.send(_generate("b", max_tokens=3))
    change = node.wait_for(messages.KVEvents)
    assert change.first_sequence == len(told.events)
    node.send(messages.KVSnapshotRequest())
    assert node.wait_for(messages.KVEvents).first_sequence > change.first_sequence
    costs, end_s = messages.NodeCosts(), time.monotonic() + DEADLINE_S
    while costs == messages.NodeCosts() and time.monotonic() < end_s:
        costs = node.wait_for(messages.Heartbeat).costs
    assert costs.prefill_overhead_ms + costs.prefill_ms_per_token + costs.prefill_ms_per_attended > 0
