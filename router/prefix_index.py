"""Which node's cache holds which blocks, and what shared stores hold, as far as the router was told. Plain state, no I/O.

Written by router/kv_event_feed.py, read by routing policies; all from the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

MAX_BLOCKS_PER_NODE = 1 << 22  # a node that tells of more is believed up to here
MAX_STORED_BLOCKS = 1 << 22  # of all stores together; the oldest are forgotten


class PrefixIndex:
    """Blocks by hash. A block counts only while all before it are there, too: no hole is believed to be filled."""

    def __init__(self) -> None:
        self._nodes_by_hash: dict[bytes, set[str]] = {}
        self._hashes_by_node: dict[str, set[bytes]] = {}
        self._media_by_hash: OrderedDict[bytes, set[str]] = OrderedDict()

    def store(self, node_id: str, block_hashes: Sequence[bytes], medium: str = "") -> None:
        """The node has these blocks in its own pool, or has seen them in the store `medium`."""
        if medium:
            for block_hash in block_hashes:
                self._media_by_hash.setdefault(block_hash, set()).add(medium)
                self._media_by_hash.move_to_end(block_hash)
            while len(self._media_by_hash) > MAX_STORED_BLOCKS:
                self._media_by_hash.popitem(last=False)
            return
        held = self._hashes_by_node.setdefault(node_id, set())
        for block_hash in block_hashes:
            if len(held) < MAX_BLOCKS_PER_NODE:
                held.add(block_hash)
                self._nodes_by_hash.setdefault(block_hash, set()).add(node_id)

    def remove(self, node_id: str, block_hashes: Sequence[bytes], medium: str = "") -> None:
        """They are gone from there. Unknown ones are ignored."""
        for block_hash in block_hashes:
            if medium:
                _discard(self._media_by_hash, block_hash, medium)
            else:
                self._hashes_by_node.get(node_id, set()).discard(block_hash)
                _discard(self._nodes_by_hash, block_hash, node_id)

    def drop_node(self, node_id: str) -> None:
        """Forget the node's own pool; what it has told of stores stays."""
        for block_hash in self._hashes_by_node.pop(node_id, ()):
            _discard(self._nodes_by_hash, block_hash, node_id)

    def num_blocks(self, node_id: str) -> int:
        """Blocks known to be in the node's own pool."""
        return len(self._hashes_by_node.get(node_id, ()))

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of a prompt each node has in its own pool; nodes with none are left out."""
        counts: dict[str, int] = {}
        still: set[str] | None = None
        for place, block_hash in enumerate(block_hashes):
            holders = self._nodes_by_hash.get(block_hash, set())
            still = holders if still is None else still & holders
            if not still:
                break
            counts.update(dict.fromkeys(still, place + 1))
        return counts

    def match_stored(self, block_hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a prompt a store holds."""
        for place, block_hash in enumerate(block_hashes):
            if block_hash not in self._media_by_hash:
                return place
        return len(block_hashes)


def _discard(names_by_hash: dict[bytes, set[str]], block_hash: bytes, name: str) -> None:
    names = names_by_hash.get(block_hash)
    if names is not None:
        names.discard(name)
        if not names:
            del names_by_hash[block_hash]
