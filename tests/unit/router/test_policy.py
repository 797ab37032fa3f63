"""Routing policies against a plain oracle, and the choice to use a prefill node."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from core.config import RouterOptions
from core.errors import ConfigError
from core.kv.hashing import Namespace, extend_block_hashes
from core.wire.messages import NodeCosts, NodeLoad
from router.disaggregation import local_prefill_reason
from router.policies import Turn, least_loaded, round_robin
from router.policy import Placement, Placer, RoutedRequest, Siblings
from router.predictions import PromptFacts
from router.prefix_index import PrefixIndex
from router.registry import NodeRegistry, NodeSnapshot
from tests.unit.router.flow_bench import heartbeat_message, register_message


def snapshots(source: random.Random, role: str) -> list[NodeSnapshot]:
    return [
        NodeSnapshot(
            node_id=f"n{place}",
            role=role,
            max_num_seqs=source.choice([1, 4, 8]),
            num_in_flight=source.randint(0, 3),
            num_in_flight_tokens=source.choice([0, 10, 20]),
            load=NodeLoad(
                num_running=source.randint(0, 3), num_waiting_tokens=source.choice([0, 15]), kv_usage=source.choice([0.0, 0.5])
            ),
        )
        for place in range(source.randint(1, 6))
    ]


def oracle(nodes: list[NodeSnapshot]) -> set[str]:
    """Ids of the nodes than which none has less work, found by comparing every pair."""

    def has_less(one: NodeSnapshot, other: NodeSnapshot) -> bool:
        slots = [max(node.num_in_flight, node.load.num_running) / node.max_num_seqs for node in (one, other)]
        tokens = [max(node.num_in_flight_tokens, node.load.num_waiting_tokens) for node in (one, other)]
        if one.role == "prefill":
            return tokens[0] < tokens[1] or (tokens[0] == tokens[1] and slots[0] < slots[1])
        return slots[0] < slots[1] or (slots[0] == slots[1] and one.load.kv_usage < other.load.kv_usage)

    return {node.node_id for node in nodes if not any(has_less(other, node) for other in nodes)}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_least_loaded_random_nodes_agrees_with_the_oracle(role: str) -> None:
    source = random.Random(role)
    for turn in range(300):
        nodes = snapshots(source, role)
        assert least_loaded(nodes, PromptFacts(), Turn(turn)).node_id in oracle(nodes)


def test_least_loaded_equal_nodes_take_turns() -> None:
    nodes = [NodeSnapshot(node_id=f"n{place}", role="decode", max_num_seqs=8) for place in range(3)]
    assert [least_loaded(nodes, PromptFacts(), Turn(turn)).node_id for turn in range(4)] == ["n0", "n1", "n2", "n0"]


def test_round_robin_ignores_load() -> None:
    nodes = [
        NodeSnapshot(node_id="a", role="decode", max_num_seqs=1, num_in_flight=9),
        NodeSnapshot(node_id="b", role="decode", max_num_seqs=1),
    ]
    assert [round_robin(nodes, PromptFacts(), Turn(turn)).node_id for turn in range(3)] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("num_tokens", "has_node", "block_size", "threshold", "reason"),
    [
        (1000, False, 16, 0, "no_prefill_node"),
        (16, True, 16, 0, "short_prompt"),
        (17, True, 16, 0, ""),
        (17, True, 16, 100, "short_prompt"),
        (100, True, 16, 100, "short_prompt"),
        (101, True, 16, 100, ""),
    ],
)
def test_local_prefill_reason_by_length_and_nodes(
    num_tokens: int, has_node: bool, block_size: int, threshold: int, reason: str
) -> None:
    assert local_prefill_reason(num_tokens, has_node, block_size, threshold) == reason


def test_placer_in_flight_work_spreads_a_burst_before_any_heartbeat() -> None:
    registry = NodeRegistry(5.0, 60.0)
    for name in ("d0", "d1", "d2"):
        registry.register(register_message(name, "decode"), name.encode(), 0.0)
    placer = Placer(RouterOptions(), registry)
    chosen = []
    for number in range(6):
        placement = placer.place_decode()
        registry.start_dispatch(placement.node_id, f"r{number}.1", 10)
        chosen.append(placement.node_id)
    assert sorted(chosen) == ["d0", "d0", "d1", "d1", "d2", "d2"]


def test_placer_idle_nodes_take_turns() -> None:
    registry = NodeRegistry(5.0, 60.0)
    for name in ("d0", "d1"):
        registry.register(register_message(name, "decode"), name.encode(), 0.0)
    placer = Placer(RouterOptions(), registry)
    assert [placer.place_decode().node_id for _ in range(4)] == ["d0", "d1", "d0", "d1"]


def test_placer_avoided_node_is_used_only_when_there_is_no_other() -> None:
    registry = NodeRegistry(5.0, 60.0)
    placer = Placer(RouterOptions(), registry)
    assert placer.place_decode().node_id == ""
    registry.register(register_message("d0", "decode"), b"d0", 0.0)
    assert placer.place_decode(avoided_node_ids={"d0"}).node_id == "d0"
    registry.register(register_message("d1", "decode"), b"d1", 0.0)
    assert {placer.place_decode(avoided_node_ids={"d0"}).node_id for _ in range(4)} == {"d1"}


def test_placer_siblings_stay_together_until_their_node_is_full_or_avoided() -> None:
    registry = NodeRegistry(5.0, 60.0)
    for name in ("d0", "d1", "d2"):
        registry.register(register_message(name, "decode"), name.encode(), 0.0)
    placer, siblings = Placer(RouterOptions(), registry), Siblings()
    max_num_seqs = registry.nodes["d0"].max_num_seqs
    chosen = []
    for number in range(max_num_seqs + 1):
        chosen.append(placer.place_decode(RoutedRequest(siblings=siblings)).node_id)
        registry.start_dispatch(chosen[-1], f"r{number}.1", 10)
    assert len(set(chosen[:-1])) == 1 and chosen[-1] != chosen[0], "a full node sends the next ones to another"
    assert placer.place_decode(RoutedRequest(siblings=siblings)).node_id == chosen[-1]
    moved = placer.place_decode(avoided_node_ids={chosen[-1]}, request=RoutedRequest(siblings=siblings)).node_id
    assert moved != chosen[-1]
    assert placer.place_decode(RoutedRequest(siblings=siblings)).node_id == moved, "the others follow the one that lost its node"


def test_placer_sibling_of_one_at_a_decode_node_needs_no_prefill_node() -> None:
    registry = NodeRegistry(5.0, 60.0)
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d0", "decode")):
        registry.register(register_message(name, role), name.encode(), 0.0)
    placer, siblings = Placer(RouterOptions(), registry), Siblings()
    first = placer.place_prefill(RoutedRequest(num_tokens=1000, siblings=siblings)).node_id
    registry.start_dispatch(first, "r0.1", 1000)
    assert placer.place_prefill(RoutedRequest(num_tokens=1000, siblings=siblings)).node_id == first
    assert placer.place_prefill(RoutedRequest(num_tokens=1000)).node_id not in ("", first), "others go by load"
    placer.place_decode(RoutedRequest(siblings=siblings))
    assert placer.place_prefill(RoutedRequest(num_tokens=1000, siblings=siblings)) == Placement("", "sibling")


def test_placer_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"router\.policy.*fastest.*least_loaded"):
        Placer(RouterOptions(policy="fastest"), NodeRegistry(5.0, 60.0))


def kv_placer(costs: NodeCosts, *names: str, **options: Any) -> tuple[Placer, NodeRegistry, PrefixIndex]:
    """Nodes d0, p0, … that have measured `costs`; blocks have as many tokens as model_info says."""
    registry, index = NodeRegistry(5.0, 60.0), PrefixIndex()
    for name in names:
        registry.register(register_message(name, "prefill" if name[0] == "p" else "decode"), name.encode(), 0.0)
        beat = msgspec.structs.replace(heartbeat_message(name), costs=costs)
        registry.heartbeat(beat, name.encode(), 0.0)
    return Placer(RouterOptions(policy="kv_aware", **options), registry, index), registry, index


SLOW = NodeCosts(
    prefill_overhead_ms=1.0, prefill_ms_per_token=1.0, load_latency_ms=1.0, load_ms_per_block=0.1, decode_step_ms=5.0
)


def test_placer_kv_aware_goes_where_the_prefix_is_until_the_queue_there_is_longer() -> None:
    placer, registry, index = kv_placer(SLOW, "d0", "d1", "d2")
    block_size = registry.model.block_size if registry.model else 0
    names = placer.block_hashes(range(10 * block_size), "", b"")
    assert len(names) == 10
    index.store("d1", names[:9])
    request = RoutedRequest(num_tokens=10 * block_size, block_hashes=names)
    first = placer.place_decode(request)
    assert (first.node_id, first.reason) == ("d1", "cached")
    registry.start_dispatch("d1", "r.1", 10, prefill_ms=20.0 * block_size)
    second = placer.place_decode(request)
    assert second.node_id != "d1" and second.reason == "load"
    assert second.prefill_ms == pytest.approx(1.0 + 10 * block_size, rel=1e-3)


def test_placer_kv_aware_simultaneous_requests_of_one_prefix_go_together() -> None:
    placer, registry, _ = kv_placer(SLOW, "d0", "d1", "d2")
    block_size = registry.model.block_size if registry.model else 0
    num_tokens = 50 * block_size
    names = placer.block_hashes(range(num_tokens), "", b"")
    other_names = placer.block_hashes(range(1, num_tokens + 1), "", b"")
    chosen = []
    for number, block_hashes in enumerate([names, other_names, names, other_names]):
        placement = placer.place_decode(RoutedRequest(num_tokens=num_tokens, block_hashes=block_hashes, now_s=1.0))
        chosen.append(placement.node_id)
        registry.start_dispatch(placement.node_id, f"r{number}.1", num_tokens, prefill_ms=placement.prefill_ms)
        registry.nodes[placement.node_id].end_prefill(f"r{number}.1")
    assert chosen[0] == chosen[2] and chosen[1] == chosen[3]
    assert chosen[0] != chosen[1]


def test_placer_kv_aware_names_blocks_as_nodes_do() -> None:
    placer, registry, _ = kv_placer(SLOW, "d0")
    model = registry.model
    assert model is not None
    namespace = Namespace(model.model_fingerprint, model.layout_fingerprint, model.block_size)
    expected: list[bytes] = []
    extend_block_hashes(expected, range(100), model.block_size, namespace.root_hash("salt", b"a" * 16))
    assert placer.block_hashes(range(100), "salt", b"a" * 16) == tuple(expected)
    assert Placer(RouterOptions(), registry).block_hashes(range(100), "", b"") == (), "nobody asks for them"


def test_placer_kv_aware_prompt_that_a_decode_node_has_needs_no_prefill_node() -> None:
    placer, registry, index = kv_placer(SLOW, "p0", "d0", "d1")
    block_size = registry.model.block_size if registry.model else 0
    num_tokens = 10 * block_size
    names = placer.block_hashes(range(num_tokens), "", b"")
    registry.start_dispatch("d0", "a.1", 1)
    registry.start_dispatch("d1", "b.1", 1)
    for node_id, wire_id in (("d0", "a.1"), ("d1", "b.1")):
        registry.nodes[node_id].end_prefill(wire_id)
    request = RoutedRequest(num_tokens=num_tokens, block_hashes=names)
    assert placer.place_prefill(request).node_id == "p0", "others decode, and would be held up"
    index.store("d1", names)
    assert placer.place_prefill(request) == Placement("", "cached")


def test_placer_kv_aware_decode_nodes_within_the_target_take_prompts() -> None:
    placer, registry, index = kv_placer(SLOW, "d0", "d1", itl_target_ms=40.0)
    block_size = registry.model.block_size if registry.model else 0
    names = placer.block_hashes(range(20 * block_size), "", b"")
    index.store("d0", names[:10])
    registry.start_dispatch("d0", "a.1", 1)
    registry.nodes["d0"].end_prefill("a.1")
    request = RoutedRequest(num_tokens=20 * block_size, block_hashes=names)
    assert placer.place_decode(request).node_id == "d1", "on d0 a request would wait for longer than 40 ms"
    other_names = placer.block_hashes(range(1, 20 * block_size + 1), "", b"")
    index.store("d0", other_names[:10])
    handoff = RoutedRequest(num_tokens=20 * block_size, block_hashes=other_names, is_handoff=True)
    registry.start_dispatch("d1", "b.1", 1)
    registry.nodes["d1"].end_prefill("b.1")
    assert placer.place_decode(handoff).node_id == "d0", "computed already: what d0 lacks is less"
