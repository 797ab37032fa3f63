"""The router's side of a simulated cluster: the real registry and the real policy, told what nodes tell."""

from __future__ import annotations

from collections.abc import Sequence

from bench.router.trace import BLOCK_TOKENS
from bench.router.virtual_node import VirtualNode
from core.config import RouterOptions
from core.kv.kv_events import KVChanges
from core.stats import EngineStats
from core.wire.messages import Heartbeat, ModelInfo, Register
from router.policy import Placement, Placer, RoutedRequest
from router.prefix_index import PrefixIndex
from router.registry import NodeRegistry

_STATS = EngineStats()


class VirtualRouter:
    """Places requests. Nodes are known by their node_id, which is their socket's identity too."""

    def __init__(self, policy: str, nodes: Sequence[VirtualNode], block_size: int = BLOCK_TOKENS) -> None:
        """Raises ConfigError for an unknown policy."""
        model = ModelInfo(
            model_name="simulated",
            model_fingerprint=bytes(16),
            layout_fingerprint=bytes(16),
            block_size=block_size,
            max_model_len=2**20,
            vocab_size=2**16,
            dtype="bfloat16",
        )
        options = RouterOptions(policy=policy)
        self.index = PrefixIndex()
        self.registry = NodeRegistry(options.heartbeat_timeout_s, options.step_stall_timeout_s)
        self.placer = Placer(options, self.registry, self.index)
        for node in nodes:
            message = Register(
                node_id=node.node_id,
                role=node.role,
                generation=1,
                model=model,
                max_num_seqs=node.max_num_seqs,
                num_blocks=node.pool.num_blocks,
                connector="tcp",
            )
            refusal = self.registry.register(message, node.node_id.encode(), 0.0).refusal
            assert not refusal, refusal

    def place_prefill(self, num_tokens: int, block_names: Sequence[bytes], now_s: float) -> Placement:
        """A prefill node; an empty node_id when the decode node does it."""
        return self.placer.place_prefill(RoutedRequest(num_tokens=num_tokens, block_hashes=block_names, now_s=now_s))

    def place_decode(self, num_tokens: int, block_names: Sequence[bytes], now_s: float, *, is_handoff: bool = False) -> Placement:
        """A decode node. is_handoff: a prefill node has computed the prompt."""
        request = RoutedRequest(num_tokens=num_tokens, block_hashes=block_names, is_handoff=is_handoff, now_s=now_s)
        return self.placer.place_decode(request)

    def heartbeat(self, node: VirtualNode, now_s: float) -> None:
        """A node tells of its load."""
        message = Heartbeat(node_id=node.node_id, generation=1, load=node.load(), stats=_STATS, costs=node.measured_costs())
        self.registry.heartbeat(message, node.node_id.encode(), now_s)

    def take_events(self, node_id: str, changes: KVChanges) -> None:
        """What changed in a node's pool, and in the store as far as the node had to do with it."""
        if changes.starts_over:
            self.index.drop_node(node_id)
        for change in changes.changes:
            apply = self.index.store if change.is_stored else self.index.remove
            apply(node_id, change.block_hashes, change.medium)
