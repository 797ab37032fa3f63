"""Policies against plain oracles, over random nodes and prompts."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest

from core.wire.messages import NodeCosts, NodeLoad
from router.disaggregation import measured_reason
from router.policies import POLICIES, Turn, kv_aware, power_of_two_choices, session_sticky
from router.predictions import ASSUMED_COSTS, PromptFacts, complete_costs, predict
from router.registry import NodeSnapshot

KNOWN = NodeCosts(
    prefill_overhead_ms=4.0,
    prefill_ms_per_token=0.5,
    prefill_ms_per_attended=0.001,
    load_latency_ms=3.0,
    load_ms_per_block=1.0,
    decode_step_ms=8.0,
)


def random_costs(source: random.Random) -> NodeCosts:
    return NodeCosts(**{name: source.choice([0.0, source.uniform(0.01, 9.0)]) for name in NodeCosts.__struct_fields__})


def random_nodes(source: random.Random, role: str = "decode") -> list[NodeSnapshot]:
    nodes = []
    for place in range(source.randint(1, 6)):
        num_in_flight = source.randint(0, 4)
        num_prefilling = source.randint(0, num_in_flight)
        nodes.append(
            NodeSnapshot(
                node_id=f"n{place}",
                role=role,
                max_num_seqs=source.choice([2, 4, 8]),
                num_in_flight=num_in_flight,
                num_prefilling=num_prefilling,
                prefill_backlog_ms=num_prefilling * 11.0,
                load=NodeLoad(num_running=source.randint(0, 6), num_waiting_tokens=source.choice([0, 500])),
                costs=random_costs(source),
            )
        )
    return nodes


def random_prompt(source: random.Random, nodes: list[NodeSnapshot]) -> PromptFacts:
    num_tokens = source.randint(1, 400)
    most = num_tokens // 16
    hits = {node.node_id: source.randint(1, most) for node in nodes if most and source.random() < 0.5}
    return PromptFacts(
        num_tokens=num_tokens, block_size=16, num_pool_blocks=hits, num_stored_blocks=source.choice([0, source.randint(0, most)])
    )


def oracle_cost(name: str, node: NodeSnapshot, nodes: list[NodeSnapshot]) -> float:
    """A node's own measurement, else the mean of the others', else what is assumed."""
    known = [getattr(each.costs, name) for each in nodes if getattr(each.costs, name)]
    return float(getattr(node.costs, name) or (sum(known) / len(known) if known else getattr(ASSUMED_COSTS, name)))


def oracle_score(node: NodeSnapshot, nodes: list[NodeSnapshot], prompt: PromptFacts) -> float:
    """Every way of filling the pool is tried, position by position."""

    def cost(name: str) -> float:
        return oracle_cost(name, node, nodes)

    def compute(start: int) -> float:
        attended = sum(position + 0.5 for position in range(start, prompt.num_tokens))
        return (
            cost("prefill_overhead_ms")
            + cost("prefill_ms_per_token") * (prompt.num_tokens - start)
            + cost("prefill_ms_per_attended") * attended
        )

    useful = [blocks for blocks in range(prompt.num_tokens) if blocks * 16 < prompt.num_tokens]
    in_pool = max(blocks for blocks in useful if blocks <= prompt.num_pool_blocks.get(node.node_id, 0))
    stored = max(blocks for blocks in useful if blocks <= prompt.num_stored_blocks)
    ways = [compute(in_pool * 16)]
    if stored > in_pool:
        ways.append(cost("load_latency_ms") + cost("load_ms_per_block") * (stored - in_pool) + compute(stored * 16))
    total = node.load.num_running + node.load.num_waiting
    foreign = max(0, total - node.num_in_flight) / total if total else 0.0
    queue = node.prefill_backlog_ms + foreign * node.load.num_waiting_tokens * cost("prefill_ms_per_token")
    decoding = node.num_in_flight - node.num_prefilling if node.role == "decode" else 0
    return queue + min(ways) + decoding * cost("decode_step_ms")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kv_aware_random_nodes_costs_no_more_than_any_other_with_a_slot(role: str) -> None:
    source = random.Random(role)
    for number in range(400):
        nodes = random_nodes(source, role)
        prompt = random_prompt(source, nodes)
        chosen = kv_aware(nodes, prompt, Turn(number))
        eligible = [node for node in nodes if node.num_in_flight < node.max_num_seqs] or nodes
        assert chosen in eligible
        scores = {node.node_id: oracle_score(node, nodes, prompt) for node in eligible}
        assert scores[chosen.node_id] == pytest.approx(min(scores.values()), rel=1e-9), (scores, chosen.node_id)


def test_predict_random_nodes_scores_as_the_oracle_does() -> None:
    source = random.Random(5)
    for _ in range(300):
        nodes = random_nodes(source)
        prompt = random_prompt(source, nodes)
        for each in predict(nodes, complete_costs([node.costs for node in nodes]), prompt):
            assert each.score_ms == pytest.approx(oracle_score(each.node, nodes, prompt), rel=1e-9)


def test_kv_aware_temperature_spreads_as_a_softmax_of_the_scores_says() -> None:
    nodes = [
        NodeSnapshot(node_id=name, role="prefill", max_num_seqs=4, prefill_backlog_ms=backlog, costs=KNOWN)
        for name, backlog in (("a", 0.0), ("b", 60.0), ("c", 500.0))
    ]
    prompt = PromptFacts(num_tokens=100, block_size=16)
    scores = [oracle_score(node, nodes, prompt) for node in nodes]
    weights = [math.exp((scores[0] - score) / (0.5 * scores[0])) for score in scores]
    num = 2000
    chosen = Counter(kv_aware(nodes, prompt, Turn(0, ((place + 0.5) / num, 0.0), (), 0.5)).node_id for place in range(num))
    for node, weight in zip(nodes, weights, strict=True):
        assert chosen[node.node_id] / num == pytest.approx(weight / sum(weights), abs=2 / num)
    cold = {kv_aware(nodes, prompt, Turn(0, (place / num, 0.0))).node_id for place in range(num)}
    assert cold == {"a"}


def test_power_of_two_choices_draws_every_pair_alike_and_takes_the_less_loaded() -> None:
    nodes = [NodeSnapshot(node_id=f"n{place}", role="decode", max_num_seqs=8, num_in_flight=place) for place in range(4)]
    draws = [((first + 0.5) / 4, (second + 0.5) / 3) for first in range(4) for second in range(3)]
    chosen = Counter(power_of_two_choices(nodes, PromptFacts(), Turn(0, chances)).node_id for chances in draws)
    expected = Counter(f"n{min(pair)}" for pair in itertools.permutations(range(4), 2))
    assert chosen == expected
    assert power_of_two_choices(nodes[:1], PromptFacts(), Turn(0, (0.9, 0.9))) is nodes[0]


def test_session_sticky_lost_node_moves_only_its_own_sessions() -> None:
    nodes = [NodeSnapshot(node_id=f"n{place}", role="decode", max_num_seqs=8) for place in range(5)]
    homes = {key: session_sticky(nodes, PromptFacts(session_key=key), Turn()).node_id for key in map(str, range(500))}
    assert all(50 < count < 200 for count in Counter(homes.values()).values()), "sessions are spread"
    without = [node for node in nodes if node.node_id != "n2"]
    for key, home in homes.items():
        now = session_sticky(without, PromptFacts(session_key=key), Turn(number=7)).node_id
        assert now == home or home == "n2"


def test_session_sticky_overloaded_home_sends_the_session_to_its_next_node() -> None:
    def nodes(loads: dict[str, int]) -> list[NodeSnapshot]:
        return [
            NodeSnapshot(node_id=f"n{place}", role="decode", max_num_seqs=8, num_in_flight=loads.get(f"n{place}", 0))
            for place in range(4)
        ]

    prompt = PromptFacts(session_key="a session")
    home = session_sticky(nodes({}), prompt, Turn()).node_id
    moved = session_sticky(nodes({home: 6}), prompt, Turn()).node_id
    remaining = [node for node in nodes({}) if node.node_id != home]
    assert moved == session_sticky(remaining, prompt, Turn()).node_id != home
    assert session_sticky(nodes({f"n{place}": 5 + (f"n{place}" == home) for place in range(4)}), prompt, Turn()).node_id == home
    full = nodes({f"n{place}": 8 + place for place in range(4)})
    assert session_sticky(full, prompt, Turn()).node_id == "n0", "all are full: the least loaded"
    assert session_sticky(nodes({"n0": 1}), PromptFacts(), Turn()).node_id == "n1", "no session: the least loaded"


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_policies_same_arguments_choose_the_same_node_among_those_given(policy: str) -> None:
    source = random.Random(policy)
    for number in range(200):
        nodes = random_nodes(source)
        prompt = random_prompt(source, nodes)
        turn = Turn(number, (source.random(), source.random()), (), source.choice([0.0, 1.0]))
        chosen = POLICIES[policy](nodes, prompt, turn)
        assert chosen in nodes
        assert POLICIES[policy](nodes, prompt, turn) is chosen


def reason(
    *,
    hits: int = 0,
    backlog: float = 0.0,
    decoding: int = 0,
    target: float = 0.0,
    costs: NodeCosts = KNOWN,
    local_backlog: float = 0.0,
) -> str:
    """Of a prompt of 320 tokens that one prefill and one decode node could compute in about 215 ms."""
    prefill = [NodeSnapshot(node_id="p", role="prefill", max_num_seqs=8, prefill_backlog_ms=backlog, costs=costs)]
    decode = [
        NodeSnapshot(
            node_id="d", role="decode", max_num_seqs=8, num_in_flight=decoding, prefill_backlog_ms=local_backlog, costs=costs
        )
    ]
    prompt = PromptFacts(num_tokens=320, block_size=16, num_pool_blocks={"d": hits} if hits else {})
    there, here = (predict(nodes, complete_costs([node.costs for node in nodes]), prompt) for nodes in (prefill, decode))
    return measured_reason(there, here, prompt, target)


def test_measured_reason_by_queues_caches_and_target() -> None:
    assert reason(costs=NodeCosts()) == "", "nothing is measured"
    assert reason() == "faster_here", "nobody is held up, and the handoff is spared"
    assert reason(decoding=1) == "", "a request that decodes would be held up"
    assert reason(decoding=1, backlog=1000.0) == "prefill_saturated"
    assert reason(decoding=1, backlog=1000.0, target=300.0) == "prefill_saturated", "8 ms + 215 ms is within the target"
    assert reason(decoding=1, backlog=1000.0, target=100.0) == "", "it is not, however long the prefill node's queue"
    assert reason(decoding=1, backlog=1000.0, target=300.0, local_backlog=100.0) == "", "with the prompts ahead it is not"
    assert reason(decoding=0, backlog=1000.0, target=100.0) == "faster_here", "nobody decodes there"
    assert reason(hits=19, decoding=4) == "cached"
    assert reason(hits=17, decoding=1) == "faster_here", "what is left is computed sooner than handed over"
