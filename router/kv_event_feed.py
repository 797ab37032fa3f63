"""From the nodes' KV events to the prefix index: a node is believed as long as none of its events is missing.

RouterCore says which nodes come and go and hands over their messages; all from the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from core.wire.messages import BlockStored, KVEvents, KVSnapshotRequest, PoolCleared
from router.metrics import RouterMetrics
from router.prefix_index import PrefixIndex
from router.registry import NodeState

_logger = logging.getLogger(__name__)


class KVEventFeed:
    """Keeps the index true for the nodes that it listens to: by node_id, the sequence number that comes next (None: all of it
    was asked for and has not begun to arrive, so that what arrives before means nothing)."""

    def __init__(self, index: PrefixIndex, ask: Callable[[NodeState, KVSnapshotRequest], None], metrics: RouterMetrics) -> None:
        self._index = index
        self._ask = ask
        self._metrics = metrics
        self._next_by_node: dict[str, int | None] = {}

    def start(self, node: NodeState) -> None:
        """Listen to a node that has registered: whatever was known of it counts no more."""
        self.stop(node.node_id)
        self._ask_for_all(node)

    def stop(self, node_id: str) -> None:
        """The node is down, or leaves. Safe to repeat."""
        self._next_by_node.pop(node_id, None)
        self._index.drop_node(node_id)
        self._metrics.index_blocks.remove_by_labels({"node_id": node_id})

    def take(self, node: NodeState, message: KVEvents) -> None:
        """Apply a node's events; when some before them are missing, drop what is known of the node and ask for everything."""
        if node.node_id not in self._next_by_node or not message.events:
            return
        expected = self._next_by_node[node.node_id]
        if not isinstance(message.events[0], PoolCleared):
            if expected is None:
                return
            if message.first_sequence != expected:
                self._metrics.index_gaps.inc()
                _logger.warning("KV events of node %s are missing: asking for all of its cache", node.node_id)
                self._ask_for_all(node)
                return
        self._next_by_node[node.node_id] = message.first_sequence + len(message.events)
        for event in message.events:
            if isinstance(event, PoolCleared):
                self._index.drop_node(node.node_id)
            elif isinstance(event, BlockStored):
                self._index.store(node.node_id, event.block_hashes, event.medium)
            else:
                self._index.remove(node.node_id, event.block_hashes, event.medium)
        self._count(node.node_id)
        if self._index.num_blocks(node.node_id) > node.num_blocks:
            _logger.warning("node %s tells of more blocks than it has: not believed until it registers anew", node.node_id)
            self.stop(node.node_id)

    def _ask_for_all(self, node: NodeState) -> None:
        self._index.drop_node(node.node_id)
        self._next_by_node[node.node_id] = None
        self._count(node.node_id)
        self._ask(node, KVSnapshotRequest())

    def _count(self, node_id: str) -> None:
        self._metrics.index_blocks.labels(node_id).set(self._index.num_blocks(node_id))
