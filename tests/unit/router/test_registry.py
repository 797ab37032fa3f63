"""Nodes that come, go, stall, drain and come back under the same name."""

from __future__ import annotations

import msgspec
import pytest

from router.registry import FORGET_AFTER_S, HeartbeatOutcome, NodeRegistry, NodeStatus
from tests.unit.router.flow_bench import heartbeat_message, register_message


@pytest.fixture
def registry() -> NodeRegistry:
    registry = NodeRegistry(heartbeat_timeout_s=5.0, step_stall_timeout_s=60.0)
    assert registry.register(register_message("d0", "decode"), b"d0:1", 0.0).refusal == ""
    return registry


def test_registry_other_model_is_refused_with_the_difference(registry: NodeRegistry) -> None:
    outcome = registry.register(register_message("d1", "decode", fingerprint=b"x" * 16), b"d1", 1.0)
    assert "model.model_fingerprint" in outcome.refusal and (b"x" * 16).hex() in outcome.refusal
    assert "d1" not in registry.nodes


def test_registry_other_model_is_welcome_once_all_others_are_gone(registry: NodeRegistry) -> None:
    registry.mark_down("d0", "died")
    message = register_message("d1", "decode", fingerprint=b"x" * 16)
    assert registry.register(message, b"d1", 1.0).refusal == ""
    assert registry.model == message.model


@pytest.mark.parametrize(
    ("change", "word"), [({"role": "both"}, "role"), ({"protocol_version": 99}, "protocol_version"), ({"node_id": ""}, "node_id")]
)
def test_registry_impossible_registration_is_refused(registry: NodeRegistry, change: dict[str, object], word: str) -> None:
    message = msgspec.structs.replace(register_message("d1", "decode"), **change)
    assert registry.register(message, b"d1", 1.0).refusal.startswith(word)


def test_registry_new_generation_replaces_and_loses_what_was_in_flight(registry: NodeRegistry) -> None:
    registry.start_dispatch("d0", "r.1", 10)
    outcome = registry.register(register_message("d0", "decode", generation=2), b"d0:2", 1.0)
    assert outcome.lost_request_ids == ("r.1",)
    assert registry.nodes["d0"].in_flight == {}
    registry.end_dispatch("d0", "r.1")
    assert registry.nodes["d0"].num_in_flight_tokens == 0


def test_registry_repeated_registration_loses_nothing_and_a_new_one_does(registry: NodeRegistry) -> None:
    registry.start_dispatch("d0", "r.1", 10)
    message = register_message("d0", "decode")
    assert registry.register(message, b"d0:1", 1.0).lost_request_ids == (), "our answer was slow, it asked twice"
    again = msgspec.structs.replace(message, registration_index=1)
    assert registry.register(again, b"d0:1", 2.0).lost_request_ids == ("r.1",)


def test_registry_superseded_process_neither_heartbeats_nor_returns(registry: NodeRegistry) -> None:
    registry.register(register_message("d0", "decode", generation=2), b"d0:2", 1.0)
    assert registry.heartbeat(heartbeat_message("d0", generation=1), b"d0:1", 2.0) is HeartbeatOutcome.SUPERSEDED
    assert "taken over" in registry.register(register_message("d0", "decode", generation=1), b"d0:1", 3.0).refusal
    assert registry.nodes["d0"].generation == 2
    assert registry.heartbeat(heartbeat_message("d0", generation=2), b"d0:2", 4.0) is HeartbeatOutcome.KNOWN


def test_registry_unknown_or_down_node_must_register_again(registry: NodeRegistry) -> None:
    assert registry.heartbeat(heartbeat_message("d9"), b"d9", 1.0) is HeartbeatOutcome.UNKNOWN
    registry.mark_down("d0", "died")
    assert registry.heartbeat(heartbeat_message("d0"), b"d0:1", 1.0) is HeartbeatOutcome.UNKNOWN
    assert registry.node_of(b"d0:1") is None


def test_registry_missing_heartbeats_expire_a_node(registry: NodeRegistry) -> None:
    registry.heartbeat(heartbeat_message("d0"), b"d0:1", 3.0)
    assert registry.expired_node_ids(8.0) == []
    assert registry.expired_node_ids(8.1) == ["d0"]
    registry.mark_down("d0", "silent")
    assert registry.expired_node_ids(99.0) == []


def test_registry_node_named_like_the_router_is_refused(registry: NodeRegistry) -> None:
    assert "router" in registry.register(register_message("router", "decode"), b"x", 0.0).refusal


def test_registry_draining_node_gets_nothing_new_and_stays_connected(registry: NodeRegistry) -> None:
    registry.heartbeat(heartbeat_message("d0", is_draining=True), b"d0:1", 1.0)
    assert not registry.has_candidate("decode")
    assert registry.nodes["d0"].status is NodeStatus.DRAINING
    assert registry.connected() == [registry.nodes["d0"]]


def test_registry_stalled_node_is_told_once_and_recovers(registry: NodeRegistry) -> None:
    stalled = heartbeat_message("d0", step_age_s=61.0)
    assert registry.heartbeat(stalled, b"d0:1", 1.0) is HeartbeatOutcome.STALLED
    assert registry.heartbeat(stalled, b"d0:1", 2.0) is HeartbeatOutcome.KNOWN
    assert not registry.has_candidate("decode")
    assert registry.heartbeat(heartbeat_message("d0"), b"d0:1", 3.0) is HeartbeatOutcome.RECOVERED
    assert registry.has_candidate("decode")


def test_registry_in_flight_counts_tokens_and_ends_once(registry: NodeRegistry) -> None:
    registry.start_dispatch("d0", "a.1", 10)
    registry.start_dispatch("d0", "b.1", 5)
    registry.end_dispatch("d0", "a.1")
    registry.end_dispatch("d0", "a.1")
    snapshot = registry.candidates("decode")[0]
    assert (snapshot.num_in_flight, snapshot.num_in_flight_tokens) == (1, 5)
    assert registry.mark_down("d0", "died") == ("b.1",)
    assert registry.mark_down("d0", "died") == ()


def test_registry_long_dead_nodes_are_forgotten(registry: NodeRegistry) -> None:
    registry.mark_down("d0", "died")
    registry.forget_long_down(FORGET_AFTER_S)
    assert "d0" in registry.nodes
    registry.forget_long_down(FORGET_AFTER_S + 1)
    assert registry.nodes == {}


def test_registry_thousands_of_restarts_keep_memory_bounded(registry: NodeRegistry) -> None:
    for number in range(3000):
        registry.register(register_message(f"x{number}", "decode", generation=number), f"x{number}".encode(), 1.0)
        registry.mark_down(f"x{number}", "died")
        registry.register(register_message("d0", "decode", generation=number + 10), b"d0", 1.0)
        registry.forget_long_down(2.0)
    assert len(registry.nodes) < 300
    assert len(registry._superseded) <= 1024
