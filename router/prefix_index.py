"""Which node holds which KV blocks, as far as nodes' events tell: answers how many leading blocks of a prompt each node has.

A dict from block hash to a bit mask of nodes, so that one walk along a prompt's hashes answers for all nodes at once. Plain
state without clocks and sockets, used from the router's event loop alone; RouterCore feeds it, Placer asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

MAX_BLOCKS_PER_NODE = 1_000_000  # what a node reports beyond is not believed: a lying node does not fill our memory
MAX_BLOCKS_PER_STORE = 4_000_000  # the oldest are forgotten
EXPECTED_FOR_S = 5.0  # blocks that a dispatched request will bring are expected for this long, at most for twice as long
_WALKED_BLOCKS = 64  # a multiple of _STRIDE
_STRIDE = 64  # a power of 2
_SWEPT_PER_CALL = 2048  # entries of dropped nodes that one change takes out: about a millisecond


class PrefixIndex:
    """Blocks by node (medium "") and by store (medium: its connector's name), which outlives the nodes that told of it.

    No holes are believed: an answer counts leading blocks that are there without a gap. Of a very long prompt only the first
    _WALKED_BLOCKS are looked up one by one; behind them it is searched for the place where each node's blocks end, since pools
    give up a prompt's blocks from its tail (a hole there would cost a prediction, never an answer).
    A dropped node's bit is retired at once, and its entries are swept out little by little by the changes that follow, since
    there may be a million of them.
    """

    def __init__(self, max_blocks_per_node: int = MAX_BLOCKS_PER_NODE, max_blocks_per_store: int = MAX_BLOCKS_PER_STORE) -> None:
        self._max_blocks_per_node = max_blocks_per_node
        self._max_blocks_per_store = max_blocks_per_store
        self._masks: dict[bytes, int] = {}
        self._stored: dict[str, dict[bytes, None]] = {}  # by medium, the oldest first
        self._expected_masks: dict[bytes, int] = {}  # of the running period
        self._last_expected_masks: dict[bytes, int] = {}  # of the period before
        self._period_end_s = 0.0
        self._bits: dict[str, int] = {}
        self._node_ids: dict[int, str] = {}  # by the bit's number plus one: what int.bit_length says of it
        self._num_blocks: dict[int, int] = {}  # by bit
        self._live_mask = 0
        self._retired_mask = 0
        self._swept_mask = 0  # the retired bits that the running sweep takes out
        self._to_sweep: list[tuple[dict[bytes, int], list[bytes]]] = []

    # -- changes -------------------------------------------------------------------------------------------------------
    def store(self, node_id: str, block_hashes: Sequence[bytes], medium: str = "") -> None:
        """The node has these blocks, or the store `medium` has them. What exceeds the bound per node is left out."""
        if medium:
            self._store_shared(block_hashes, self._stored.setdefault(medium, {}))
            return
        bit = self._bit_of(node_id)
        masks = self._masks
        room = self._max_blocks_per_node - self._num_blocks[bit]
        for block_hash in block_hashes:
            mask = masks.get(block_hash, 0)
            if mask & bit:
                continue
            if room <= 0:
                break
            room -= 1
            masks[block_hash] = mask | bit if mask else bit  # nodes' bits are shared objects: most masks are just one
        self._num_blocks[bit] = self._max_blocks_per_node - room
        self._sweep()

    def remove(self, node_id: str, block_hashes: Sequence[bytes], medium: str = "") -> None:
        """The node, or the store `medium`, has these blocks no more; unknown ones are ignored."""
        if medium:
            stored = self._stored.get(medium, {})
            for block_hash in block_hashes:
                stored.pop(block_hash, None)
            return
        bit = self._bits.get(node_id, 0)
        for block_hash in block_hashes:
            mask = self._masks.get(block_hash, 0)
            if mask & bit:
                self._num_blocks[bit] -= 1
                if mask == bit:
                    del self._masks[block_hash]
                else:
                    self._masks[block_hash] = mask ^ bit
        self._sweep()

    def drop_node(self, node_id: str) -> None:
        """Nothing is known of this node's pool any more, nor expected of it."""
        bit = self._bits.pop(node_id, 0)
        if not bit:
            return
        del self._node_ids[bit.bit_length()]
        del self._num_blocks[bit]
        self._live_mask ^= bit
        self._retired_mask |= bit
        self._sweep()

    def expect(self, node_id: str, block_hashes: Sequence[bytes], now_s: float, num_known: int = 0) -> None:
        """A request with these blocks was sent to the node: it will have them soon, or loses them unseen after a while.

        block_hashes: from the prompt's first block on. num_known: leading ones that are there, of which nothing is to be noted.
        Behind the first _WALKED_BLOCKS only each _STRIDE-th is noted and stands for those before it, so that noting a prompt of
        100,000 tokens takes no longer than choosing a node for it.
        """
        self.expire(now_s)
        bit = self._bit_of(node_id)
        masks = self._expected_masks
        for block_hash in block_hashes[num_known:_WALKED_BLOCKS]:
            masks[block_hash] = masks.get(block_hash, 0) | bit
        first = max(num_known, _WALKED_BLOCKS) | (_STRIDE - 1)
        for block_hash in block_hashes[first::_STRIDE]:
            masks[block_hash] = masks.get(block_hash, 0) | bit

    def expire(self, now_s: float) -> None:
        """Forget expectations whose time is over."""
        if now_s < self._period_end_s:
            return
        is_long_ago = now_s >= self._period_end_s + EXPECTED_FOR_S
        self._last_expected_masks = {} if is_long_ago else self._expected_masks
        self._expected_masks = {}
        self._period_end_s = now_s + EXPECTED_FOR_S

    # -- queries -------------------------------------------------------------------------------------------------------
    def match(self, block_hashes: Sequence[bytes], *, is_expecting: bool = False) -> dict[str, int]:
        """Leading blocks by node_id in the nodes' own pools; nodes without the first block are left out.

        is_expecting: also what is expected there, in any mixture.
        """
        of_nodes, expected, last_expected = self._masks.get, self._expected_masks.get, self._last_expected_masks.get
        is_expecting = is_expecting and bool(self._expected_masks or self._last_expected_masks)
        num_leading: dict[str, int] = {}
        remaining = self._live_mask
        for place, block_hash in enumerate(islice(block_hashes, _WALKED_BLOCKS)):
            mask = of_nodes(block_hash, 0) & remaining
            if mask == remaining:
                continue
            if is_expecting:
                mask |= (expected(block_hash, 0) | last_expected(block_hash, 0)) & remaining
            if mask != remaining:
                if place:
                    self._set(num_leading, remaining ^ mask, place)
                if not mask:
                    return num_leading
                remaining = mask
        if len(block_hashes) > _WALKED_BLOCKS:
            self._search(num_leading, remaining, block_hashes, is_expecting)
        elif block_hashes:
            self._set(num_leading, remaining, len(block_hashes))
        return num_leading

    def match_stored(self, block_hashes: Sequence[bytes]) -> int:
        """Leading blocks that stores hold, whichever of them holds which."""
        stores = [stored for stored in self._stored.values() if stored]
        for place, block_hash in enumerate(block_hashes):
            if not any(block_hash in stored for stored in stores):
                return place
        return len(block_hashes)

    def num_blocks(self, node_id: str) -> int:
        """Blocks known to be in the node's own pool."""
        bit = self._bits.get(node_id, 0)
        return self._num_blocks[bit] if bit else 0

    # -- inside --------------------------------------------------------------------------------------------------------
    def _bit_of(self, node_id: str) -> int:
        bit = self._bits.get(node_id)
        if bit is None:
            taken = self._live_mask | self._retired_mask
            bit = ~taken & (taken + 1)  # the lowest that is free
            self._bits[node_id] = bit
            self._node_ids[bit.bit_length()] = node_id
            self._num_blocks[bit] = 0
            self._live_mask |= bit
        return bit

    def _search(self, num_leading: dict[str, int], remaining: int, block_hashes: Sequence[bytes], is_expecting: bool) -> None:
        """The rest of a long prompt, of which `remaining` have the first _WALKED_BLOCKS: in growing steps, then by halves."""

        def mask_at(place: int) -> int:
            mask = self._masks.get(block_hashes[place], 0)
            noted = place | (_STRIDE - 1)
            if is_expecting and noted <= last:
                block_hash = block_hashes[noted]
                mask |= self._expected_masks.get(block_hash, 0) | self._last_expected_masks.get(block_hash, 0)
            return mask & remaining

        had, step, last = _WALKED_BLOCKS - 1, 1, len(block_hashes) - 1  # all of `remaining` have block `had`
        while remaining and had < last:
            missed = min(had + step, last)
            if mask_at(missed) == remaining:
                had, step = missed, step * 2
                continue
            while missed - had > 1:
                middle = (had + missed) // 2
                if mask_at(middle) == remaining:
                    had = middle
                else:
                    missed = middle
            left = mask_at(missed)
            self._set(num_leading, remaining ^ left, missed)
            remaining, had, step = left, missed, 1
        self._set(num_leading, remaining, len(block_hashes))

    def _set(self, num_leading: dict[str, int], mask: int, count: int) -> None:
        while mask:
            lowest = mask & -mask
            num_leading[self._node_ids[lowest.bit_length()]] = count
            mask ^= lowest

    def _store_shared(self, block_hashes: Sequence[bytes], stored: dict[bytes, None]) -> None:
        for block_hash in block_hashes:
            stored.pop(block_hash, None)
            stored[block_hash] = None
        while len(stored) > self._max_blocks_per_store:
            del stored[next(iter(stored))]

    def _sweep(self) -> None:
        """Take some entries of retired bits out. A bit is free again when a sweep that began after its retirement has ended."""
        if not self._retired_mask:
            return
        if not self._swept_mask:
            self._swept_mask = self._retired_mask
            maps = (self._masks, self._expected_masks, self._last_expected_masks)
            self._to_sweep = [(masks, list(masks)) for masks in maps if masks]
        kept = ~self._swept_mask
        budget = _SWEPT_PER_CALL
        while self._to_sweep and budget > 0:
            masks, block_hashes = self._to_sweep[-1]
            for block_hash in block_hashes[-budget:]:
                mask = masks.get(block_hash, 0)
                if mask & self._swept_mask:
                    if mask & kept:
                        masks[block_hash] = mask & kept
                    else:
                        del masks[block_hash]
            swept = min(budget, len(block_hashes))
            budget -= swept
            del block_hashes[len(block_hashes) - swept :]
            if not block_hashes:
                self._to_sweep.pop()
        if not self._to_sweep:
            self._retired_mask ^= self._swept_mask
            self._swept_mask = 0
