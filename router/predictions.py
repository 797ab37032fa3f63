"""What a prompt would take on each node, in milliseconds, from what the nodes measured themselves (NodeCosts): nothing to tune.

    time to the first token = prompts ahead + min(computing what the pool lacks, loading from a store and computing the rest)

Pure functions over snapshots; router/policies.py chooses by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from core.wire.messages import NodeCosts
from router.registry import NodeSnapshot

# Until somebody has measured: a small model on a CPU, so that nothing looks free.
ASSUMED_COSTS = NodeCosts(
    prefill_overhead_ms=10.0,
    prefill_ms_per_token=0.5,
    prefill_ms_per_attended=1e-6,
    load_latency_ms=5.0,
    load_ms_per_block=1.0,
    decode_step_ms=20.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFacts:
    """A request as policies see it.

    num_tokens: known tokens. num_pool_blocks: leading blocks by node_id in the nodes' pools, there or on their way there;
    num_stored_blocks: that a store holds. session_key: "" when the client named no session.
    """

    num_tokens: int = 0
    block_size: int = 1
    num_pool_blocks: Mapping[str, int] = field(default_factory=dict)
    num_stored_blocks: int = 0
    session_key: str = ""


class Prediction(NamedTuple):
    """For one node, whose complete costs are `costs`.

    queue_ms until the prompt's turn comes, own_ms from then to its first token, decode_ms as in decode_load_ms. score_ms is the
    sum of the three: what placing the request here costs, the least being the best.
    """

    node: NodeSnapshot
    costs: NodeCosts
    queue_ms: float
    own_ms: float
    decode_ms: float
    score_ms: float

    @property
    def ttft_ms(self) -> float:
        """Predicted time to the first token."""
        return self.queue_ms + self.own_ms

    @property
    def is_measured(self) -> bool:
        """Whether the node itself has measured what computing takes."""
        return self.node.costs.prefill_ms_per_token > 0.0

    @property
    def step_ms(self) -> float:
        """A step without prompts."""
        return self.costs.decode_step_ms


def complete_costs(measured: Sequence[NodeCosts]) -> list[NodeCosts]:
    """Nodes' costs without gaps: what one has not measured (0) is the mean of those that have, or assumed."""
    typical = {}
    for name in NodeCosts.__struct_fields__:
        known = [value for costs in measured if (value := getattr(costs, name)) > 0.0]
        if len(known) < len(measured):
            typical[name] = sum(known) / len(known) if known else getattr(ASSUMED_COSTS, name)
    if not typical:
        return list(measured)
    return [
        msgspec.structs.replace(costs, **{name: value for name, value in typical.items() if getattr(costs, name) == 0.0})
        for costs in measured
    ]


def compute_ms(costs: NodeCosts, num_tokens: int, first_position: int) -> float:
    """Computing num_tokens tokens from first_position on, a step's overhead included."""
    num_attended = num_tokens * (first_position + num_tokens / 2)
    return costs.prefill_overhead_ms + num_tokens * costs.prefill_ms_per_token + num_attended * costs.prefill_ms_per_attended


def load_ms(costs: NodeCosts, num_blocks: int) -> float:
    """Bringing num_blocks blocks from a store into the pool."""
    return costs.load_latency_ms + num_blocks * costs.load_ms_per_block if num_blocks > 0 else 0.0


def prefill_ms(costs: NodeCosts, prompt: PromptFacts, num_pool_blocks: int) -> float:
    """The prompt on an idle node whose pool has num_pool_blocks of it. One token is computed in any case: the next one's logits
    come from it."""
    block_size = prompt.block_size
    most = max(prompt.num_tokens - 1, 0) // block_size
    num_pool_blocks = min(num_pool_blocks, most)
    num_stored_blocks = min(prompt.num_stored_blocks, most)
    start = num_pool_blocks * block_size
    computed_ms = compute_ms(costs, prompt.num_tokens - start, start)
    if num_stored_blocks <= num_pool_blocks:
        return computed_ms
    start = num_stored_blocks * block_size
    loaded_ms = load_ms(costs, num_stored_blocks - num_pool_blocks) + compute_ms(costs, prompt.num_tokens - start, start)
    return min(computed_ms, loaded_ms)


def queue_ms(node: NodeSnapshot, costs: NodeCosts) -> float:
    """Prompts ahead: ours as they were predicted, and the waiting tokens of what the node has besides from other routers."""
    num_total = node.load.num_running + node.load.num_waiting
    num_foreign = num_total - node.num_in_flight
    if num_foreign <= 0:
        return node.prefill_backlog_ms
    return node.prefill_backlog_ms + node.load.num_waiting_tokens * costs.prefill_ms_per_token * num_foreign / num_total


def decode_load_ms(node: NodeSnapshot, costs: NodeCosts) -> float:
    """One more request in a step makes each of the others wait longer, in sum at most a step for each."""
    return costs.decode_step_ms * max(0, node.num_in_flight - node.num_prefilling) if node.role == "decode" else 0.0


def predict(nodes: Sequence[NodeSnapshot], costs: Sequence[NodeCosts], prompt: PromptFacts) -> list[Prediction]:
    """One for each node, in their order. costs: the nodes', complete."""
    num_pool_blocks = prompt.num_pool_blocks
    is_stored = prompt.num_stored_blocks > 0
    num_tokens, num_attended = prompt.num_tokens, prompt.num_tokens * prompt.num_tokens / 2
    predictions = []
    for node, node_costs in zip(nodes, costs, strict=True):  # the whole cluster, for each request: the common cases without calls
        load, num_in_flight = node.load, node.num_in_flight
        if is_stored or node.node_id in num_pool_blocks:
            own_ms = prefill_ms(node_costs, prompt, num_pool_blocks.get(node.node_id, 0))
        else:  # as compute_ms says
            own_ms = (
                node_costs.prefill_overhead_ms
                + num_tokens * node_costs.prefill_ms_per_token
                + num_attended * node_costs.prefill_ms_per_attended
            )
        is_ours = load.num_running + load.num_waiting <= num_in_flight
        ahead_ms = node.prefill_backlog_ms if is_ours else queue_ms(node, node_costs)
        decode_ms = decode_load_ms(node, node_costs) if num_in_flight else 0.0
        predictions.append(Prediction(node, node_costs, ahead_ms, own_ms, decode_ms, ahead_ms + own_ms + decode_ms))
    return predictions
