"""Routing policies: pure functions from node snapshots and a request's facts to one of the nodes. router/policy.py applies them.

A new policy is a function with the signature of RoutingPolicy and one line in POLICIES. Chance is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from core.wire.messages import NodeCosts
from router.predictions import Prediction, PromptFacts, complete_costs, predict
from router.registry import NodeSnapshot

SESSION_SLACK = 1.25  # a session leaves its node when that has so many times the mean of requests per slot, and one more


@dataclass(frozen=True, slots=True)
class Turn:
    """What a choice may depend on besides nodes and request.

    number: decisions made before for this role. chances: two numbers in [0, 1). costs: the nodes', complete; () computes them
    from the snapshots. temperature: see RouterOptions.policy_temperature.
    """

    number: int = 0
    chances: tuple[float, float] = (0.0, 0.0)
    costs: Sequence[NodeCosts] = ()
    temperature: float = 0.0


# (eligible nodes, never empty and in order of node_id; the request; the turn) -> one of the nodes
RoutingPolicy = Callable[[Sequence[NodeSnapshot], PromptFacts, Turn], NodeSnapshot]


def round_robin(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> NodeSnapshot:
    """Each node in turn, whatever its load."""
    return nodes[turn.number % len(nodes)]


def least_loaded(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> NodeSnapshot:
    """The node with the least work per slot; equal nodes take turns."""
    works = [work(node) for node in nodes]
    least = min(works)
    return round_robin([node for node, amount in zip(nodes, works, strict=True) if amount == least], prompt, turn)


def power_of_two_choices(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> NodeSnapshot:
    """Of two different nodes drawn by chance the one with less work: routers that know little do not all run to one node."""
    if len(nodes) == 1:
        return nodes[0]
    first = int(turn.chances[0] * len(nodes))
    second = int(turn.chances[1] * (len(nodes) - 1))
    second += second >= first
    return min(nodes[first], nodes[second], key=work)


def session_sticky(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> NodeSnapshot:
    """A session's requests go to one node, chosen by rendezvous hashing, so that a node's end moves its own sessions only.

    When that node has too much to do (see SESSION_SLACK) or no free slot, the session's next node takes the request; when all
    have, or no session is named, the least loaded one.
    """
    if not prompt.session_key:
        return least_loaded(nodes, prompt, turn)
    key = prompt.session_key.encode()
    mean = sum(node.num_in_flight / node.max_num_seqs for node in nodes) / len(nodes)
    ranked = sorted(nodes, key=lambda node: blake2b(b"%b\0%b" % (node.node_id.encode(), key), digest_size=8).digest())
    for node in ranked:
        if node.num_in_flight < min(node.max_num_seqs, SESSION_SLACK * mean * node.max_num_seqs + 1):
            return node
    return least_loaded(nodes, prompt, turn)


def kv_aware(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> NodeSnapshot:
    """The least predicted milliseconds (router/predictions.py) among nodes with a free slot; equal ones take turns."""
    return choose_by_score(predictions_with_slots(nodes, prompt, turn), turn).node


POLICIES: dict[str, RoutingPolicy] = {
    "kv_aware": kv_aware,
    "least_loaded": least_loaded,
    "power_of_two_choices": power_of_two_choices,
    "round_robin": round_robin,
    "session_sticky": session_sticky,
}


def work(node: NodeSnapshot) -> tuple[float, float]:
    """Work per slot, to be compared among nodes of one role.

    Prefill work is tokens, decode work is requests: a decode step costs nearly the same for short and long requests, and slots
    are what runs out. The router's own counts come first since heartbeats are up to an interval old.
    """
    num_requests = max(node.num_in_flight, node.load.num_running + node.load.num_waiting)
    requests_per_slot = num_requests / max(node.max_num_seqs, 1)
    if node.role == "prefill":
        return max(node.num_in_flight_tokens, node.load.num_waiting_tokens), requests_per_slot
    return requests_per_slot, node.load.kv_usage


def predictions_with_slots(nodes: Sequence[NodeSnapshot], prompt: PromptFacts, turn: Turn) -> list[Prediction]:
    """Of the nodes with a free slot; of all when none has one."""
    costs = turn.costs or complete_costs([node.costs for node in nodes])
    predictions = predict(nodes, costs, prompt)
    if all(node.num_in_flight < node.max_num_seqs for node in nodes):
        return predictions
    return [each for each in predictions if each.node.num_in_flight < each.node.max_num_seqs] or predictions


def choose_by_score(predictions: Sequence[Prediction], turn: Turn) -> Prediction:
    """The least score, or at a temperature a softmax over minus the scores, in units of temperature * (the least score, at
    least a millisecond): at temperature 1 a node that costs twice the least is chosen 1/e times as often."""
    scores = [each.score_ms for each in predictions]
    least = min(scores)
    if turn.temperature > 0.0:
        unit = turn.temperature * max(least, 1.0)
        weights = [math.exp((least - score) / unit) for score in scores]
        left = turn.chances[0] * sum(weights)
        for each, weight in zip(predictions, weights, strict=True):
            left -= weight
            if left < 0.0:
                return each
    best = [each for each, score in zip(predictions, scores, strict=True) if score == least]
    return best[turn.number % len(best)]
