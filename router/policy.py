"""Where a request goes: routing policies as pure functions over node snapshots, and the choice to use a prefill node at all.

A new policy is a function with the signature of RoutingPolicy and one line in POLICIES. Request flows ask Placer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from core.config import RouterOptions
from core.errors import ConfigError
from router.registry import NodeRegistry, NodeSnapshot

# (eligible nodes, never empty and in order of node_id; how many decisions were made before for this role) -> one of them
RoutingPolicy = Callable[[Sequence[NodeSnapshot], int], NodeSnapshot]


def round_robin(nodes: Sequence[NodeSnapshot], turn: int) -> NodeSnapshot:
    """Each node in turn, whatever its load."""
    return nodes[turn % len(nodes)]


def least_loaded(nodes: Sequence[NodeSnapshot], turn: int) -> NodeSnapshot:
    """The node with the least work per slot; equal nodes take turns.

    Prefill work is tokens, decode work is requests: a decode step costs nearly the same for short and long requests, and slots
    are what runs out. The router's own counts come first since heartbeats are up to an interval old.
    """

    def work(node: NodeSnapshot) -> tuple[float, float]:
        num_requests = max(node.num_in_flight, node.load.num_running + node.load.num_waiting)
        requests_per_slot = num_requests / max(node.max_num_seqs, 1)
        if node.role == "prefill":
            return max(node.num_in_flight_tokens, node.load.num_waiting_tokens), requests_per_slot
        return requests_per_slot, node.load.kv_usage

    least = min(work(node) for node in nodes)
    return round_robin([node for node in nodes if work(node) == least], turn)


POLICIES: dict[str, RoutingPolicy] = {"least_loaded": least_loaded, "round_robin": round_robin}


def local_prefill_reason(num_tokens: int, has_prefill_node: bool, block_size: int, local_prefill_max_tokens: int) -> str:
    """Why a request of `num_tokens` known tokens is prefilled on its decode node; empty when a prefill node takes it.

    Only full blocks can be handed over, so that a prompt of one block or less gains nothing from a prefill node.
    """
    if not has_prefill_node:
        return "no_prefill_node"
    if num_tokens <= max(local_prefill_max_tokens, block_size):
        return "short_prompt"
    return ""


@dataclass(frozen=True, slots=True)
class Placement:
    """Outcome of a decision. node_id is empty when there is no such node; reason is a short word for metrics."""

    node_id: str
    reason: str = ""


@dataclass(slots=True)
class Siblings:
    """Requests that share a prompt: choices of one prompt, beams of one search. Their specs hold the same object; Placer writes.

    They go where the last of them went, so that one computes (or loads) the prompt and the others hit it, also while it is at it,
    and a batch reads the prompt's KV once. Only a node without a free slot sends the next ones elsewhere.
    """

    node_id_by_role: dict[str, str] = field(default_factory=dict)


class Placer:
    """Applies one policy to the registry's nodes; its only own state is how many decisions were made per role."""

    def __init__(self, options: RouterOptions, registry: NodeRegistry) -> None:
        """Raises ConfigError when options.policy is no known policy."""
        if options.policy not in POLICIES:
            raise ConfigError("router.policy", options.policy, f"one of {', '.join(sorted(POLICIES))}")
        self._policy = POLICIES[options.policy]
        self._local_prefill_max_tokens = options.local_prefill_max_tokens
        self._registry = registry
        self._num_decisions = {"prefill": 0, "decode": 0}

    def has_decode_node(self) -> bool:
        """True when some decode node may get new requests."""
        return self._registry.has_candidate("decode")

    def place_prefill(self, num_tokens: int, siblings: Siblings | None = None) -> Placement:
        """A prefill node, or an empty node_id and the reason for which the decode node does it."""
        model = self._registry.model
        reason = local_prefill_reason(
            num_tokens,
            self._registry.has_candidate("prefill"),
            model.block_size if model else 0,
            self._local_prefill_max_tokens,
        )
        if not reason and siblings is not None and "decode" in siblings.node_id_by_role:
            reason = "sibling"  # has brought the prompt to a decode node
        if reason:
            return Placement("", reason)
        return Placement(self._pick("prefill", self._registry.candidates("prefill"), (), siblings), "prefill")

    def place_decode(
        self, avoided_node_ids: Collection[str] = (), *, is_suspect: bool = False, siblings: Siblings | None = None
    ) -> Placement:
        """A decode node, one that is not avoided if there is any. Empty node_id: none may take it now, for `reason`.

        is_suspect: nodes have died with this request, one more and it is given up. Such a request shares a node with no other
        suspect, so that the next death tells which one it was, and is kept from the last living node while others are missing.
        """
        nodes = self._registry.candidates("decode")
        if not nodes:
            return Placement("", "no_node")
        if is_suspect:
            if len(nodes) == 1 and self._registry.is_missing("decode"):
                return Placement("", "last_node")
            nodes = [node for node in nodes if not node.has_suspect]
            if not nodes:
                return Placement("", "other_suspect")
        return Placement(self._pick("decode", nodes, avoided_node_ids, siblings))

    def _pick(
        self, role: str, nodes: Sequence[NodeSnapshot], avoided_node_ids: Collection[str], siblings: Siblings | None
    ) -> str:
        preferred = [node for node in nodes if node.node_id not in avoided_node_ids]
        if siblings is not None:
            home = siblings.node_id_by_role.get(role)
            for node in preferred:
                if node.node_id == home and node.num_in_flight < node.max_num_seqs:
                    return home
        turn = self._num_decisions[role]
        self._num_decisions[role] += 1
        node_id = self._policy(preferred or nodes, turn).node_id
        if siblings is not None:
            siblings.node_id_by_role[role] = node_id
        return node_id
