"""Where a request goes: prompts and what follows them, by one of the policies of policies.py, and whether a prefill node helps.

Request flows ask Placer, and count the reasons that it gives. All from the event loop.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from core.config import RouterOptions
from core.errors import ConfigError
from core.kv.hashing import Namespace, extend_block_hashes
from core.wire.messages import ModelInfo, NodeCosts
from router.disaggregation import local_prefill_reason, measured_reason, nodes_within_target
from router.policies import POLICIES, Turn, predictions_with_slots
from router.predictions import Prediction, PromptFacts, complete_costs
from router.prefix_index import PrefixIndex
from router.registry import NodeRegistry, NodeSnapshot

KV_POLICY = "kv_aware"


@dataclass(frozen=True, slots=True)
class Placement:
    """Outcome of a decision. node_id is empty when there is no such node; reason is a short word for metrics.

    prefill_ms: predicted from the prompt's turn on that node to its first token; 0 where nothing was predicted.
    """

    node_id: str
    reason: str = ""
    prefill_ms: float = 0.0


@dataclass(slots=True)
class Siblings:
    """Requests that share a prompt: choices of one prompt, beams of one search. Their specs hold the same object; Placer writes.

    They go where the last of them went, so that one computes (or loads) the prompt and the others hit it, also while it is at it,
    and a batch reads the prompt's KV once. Only a node without a free slot sends the next ones elsewhere.
    """

    node_id_by_role: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedRequest:
    """What placing a request depends on.

    num_tokens: known tokens. block_hashes: of the prompt's full blocks as nodes name them; () where no policy asks for them.
    is_handoff: a prefill node has computed the prompt and saved its blocks. now_s: the router's clock.
    """

    num_tokens: int = 0
    block_hashes: Sequence[bytes] = ()
    session_key: str = ""
    is_handoff: bool = False
    now_s: float = 0.0
    siblings: Siblings | None = None


NOTHING_KNOWN = RoutedRequest()


class Placer:
    """Applies one policy to the registry's nodes and what the index knows of their caches.

    Its own state: how many decisions were made per role, its random numbers, and nodes' costs with gaps filled in.
    """

    def __init__(
        self, options: RouterOptions, registry: NodeRegistry, index: PrefixIndex | None = None, seed: int | str = 0
    ) -> None:
        """seed: routers of one cluster should differ in it. Raises ConfigError when options.policy is no known policy."""
        if options.policy not in POLICIES:
            raise ConfigError("router.policy", options.policy, f"one of {', '.join(sorted(POLICIES))}")
        self._policy = POLICIES[options.policy]
        self._options = options
        self._registry = registry
        self._index = index if index is not None else PrefixIndex()
        self._chance = random.Random(seed)
        self._num_decisions = {"prefill": 0, "decode": 0}
        self._measured_by_role: dict[str, list[tuple[str, NodeCosts]]] = {}
        self._costs_by_role: dict[str, dict[str, NodeCosts]] = {}  # complete, by node_id
        self._namespace: tuple[ModelInfo, Namespace] | None = None

    @property
    def knows_kv(self) -> bool:
        """Whether decisions depend on block hashes, so that a request should bring them."""
        return self._options.policy == KV_POLICY

    def block_hashes(self, prompt_token_ids: Sequence[int], cache_salt: str, adapter_fingerprint: bytes) -> tuple[bytes, ...]:
        """Names of a prompt's full blocks; () before the first node has come, and where decisions do not depend on them."""
        model = self._registry.model
        if model is None or not self.knows_kv:
            return ()
        if self._namespace is None or self._namespace[0] is not model:
            self._namespace = (model, Namespace(model.model_fingerprint, model.layout_fingerprint, model.block_size))
        root_hash = self._namespace[1].root_hash(cache_salt, adapter_fingerprint)
        names: list[bytes] = []
        extend_block_hashes(names, prompt_token_ids, model.block_size, root_hash)
        return tuple(names)

    def has_decode_node(self) -> bool:
        """True when some decode node may get new requests."""
        return self._registry.has_candidate("decode")

    def place_prefill(self, request: RoutedRequest) -> Placement:
        """A prefill node, or an empty node_id and the reason for which the decode node does it."""
        nodes = self._registry.candidates("prefill")
        block_size = self._block_size
        reason = local_prefill_reason(request.num_tokens, bool(nodes), block_size, self._options.local_prefill_max_tokens)
        siblings = request.siblings
        if not reason and siblings is not None and "decode" in siblings.node_id_by_role:
            reason = "sibling"  # has brought the prompt to a decode node
        if reason:
            return Placement("", reason)
        if self.knows_kv:
            self._learn_costs("prefill", nodes)
        facts = self._facts(request)
        if self.knows_kv and (siblings is None or "prefill" not in siblings.node_id_by_role):
            reason = self._measured_reason(nodes, facts)
            if reason:
                return Placement("", reason)
        return self._pick("prefill", nodes, (), request, facts)

    def place_decode(
        self, request: RoutedRequest = NOTHING_KNOWN, avoided_node_ids: Collection[str] = (), *, is_suspect: bool = False
    ) -> Placement:
        """A decode node, one that is not avoided if there is any. Empty node_id: none may take it now, for `reason`.

        is_suspect: nodes have died with this request, one more and it is given up. Such a request shares a node with no other
        suspect, so that the next death tells which one it was, and is kept from the last living node while others are missing.
        """
        nodes = self._registry.candidates("decode")
        if not nodes:
            return Placement("", "no_node")
        if self.knows_kv:
            self._learn_costs("decode", nodes)
        if is_suspect:
            if len(nodes) == 1 and self._registry.is_missing("decode"):
                return Placement("", "last_node")
            nodes = [node for node in nodes if not node.has_suspect]
            if not nodes:
                return Placement("", "other_suspect")
        facts = self._facts(request)
        if self.knows_kv and not request.is_handoff and self._options.itl_target_ms > 0.0:
            predictions = self._predict("decode", nodes, facts)
            nodes = [each.node for each in nodes_within_target(predictions, self._options.itl_target_ms)] or nodes
        return self._pick("decode", nodes, avoided_node_ids, request, facts)

    # -- inside --------------------------------------------------------------------------------------------------------
    @property
    def _block_size(self) -> int:
        model = self._registry.model
        return model.block_size if model is not None else 1

    def _facts(self, request: RoutedRequest) -> PromptFacts:
        block_hashes = request.block_hashes
        if not self.knows_kv:
            return PromptFacts(num_tokens=request.num_tokens, session_key=request.session_key)
        self._index.expire(request.now_s)
        num_stored_blocks = len(block_hashes) if request.is_handoff else self._index.match_stored(block_hashes)
        return PromptFacts(
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            num_pool_blocks=self._index.match(block_hashes, is_expecting=True),
            num_stored_blocks=num_stored_blocks,
        )

    def _measured_reason(self, prefill_nodes: Sequence[NodeSnapshot], facts: PromptFacts) -> str:
        decode_nodes = self._registry.candidates("decode")
        if not decode_nodes:
            return ""
        self._learn_costs("decode", decode_nodes)
        there = self._predict("prefill", prefill_nodes, facts)
        here = self._predict("decode", decode_nodes, facts)
        return measured_reason(there, here, facts, self._options.itl_target_ms)

    def _pick(
        self,
        role: str,
        nodes: Sequence[NodeSnapshot],
        avoided_node_ids: Collection[str],
        request: RoutedRequest,
        facts: PromptFacts,
    ) -> Placement:
        if avoided_node_ids:
            nodes = [node for node in nodes if node.node_id not in avoided_node_ids] or nodes
        chosen, reason = None, "sibling"
        siblings = request.siblings
        if siblings is not None and (home := siblings.node_id_by_role.get(role)) and home not in avoided_node_ids:
            chosen = next((node for node in nodes if node.node_id == home and node.num_in_flight < node.max_num_seqs), None)
        if chosen is None:
            chosen, reason = self._choose(role, nodes, facts), self._options.policy
        if siblings is not None:
            siblings.node_id_by_role[role] = chosen.node_id
        if not self.knows_kv:
            return Placement(chosen.node_id, reason)
        if reason == KV_POLICY:
            stored = facts.num_stored_blocks > facts.num_pool_blocks.get(chosen.node_id, 0)
            reason = "stored" if stored else "cached" if chosen.node_id in facts.num_pool_blocks else "load"
        own_ms = self._predict(role, [chosen], facts)[0].own_ms
        num_known = facts.num_pool_blocks.get(chosen.node_id, 0)
        if num_known < len(request.block_hashes):
            self._index.expect(chosen.node_id, request.block_hashes, request.now_s, num_known)
        return Placement(chosen.node_id, reason, own_ms)

    def _choose(self, role: str, nodes: Sequence[NodeSnapshot], facts: PromptFacts) -> NodeSnapshot:
        costs = self._costs_of(role, nodes) if self.knows_kv else ()
        chances = (self._chance.random(), self._chance.random())
        turn = Turn(self._num_decisions[role], chances, costs, self._options.policy_temperature)
        self._num_decisions[role] += 1
        return self._policy(nodes, facts, turn)

    def _learn_costs(self, role: str, nodes: Sequence[NodeSnapshot]) -> None:
        """Fill the gaps in what these nodes, all candidates of their role, measured; anew only when that has changed."""
        measured = [(node.node_id, node.costs) for node in nodes]
        if self._measured_by_role.get(role) != measured:
            self._measured_by_role[role] = measured
            complete = complete_costs([costs for _, costs in measured])
            self._costs_by_role[role] = {node.node_id: costs for node, costs in zip(nodes, complete, strict=True)}

    def _predict(self, role: str, nodes: Sequence[NodeSnapshot], facts: PromptFacts) -> list[Prediction]:
        return predictions_with_slots(nodes, facts, Turn(costs=self._costs_of(role, nodes)))

    def _costs_of(self, role: str, nodes: Sequence[NodeSnapshot]) -> list[NodeCosts]:
        costs = self._costs_by_role[role]
        return [costs[node.node_id] for node in nodes]
