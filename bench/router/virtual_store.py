"""A store that all simulated nodes share: which blocks it holds, least recently used ones out first. It takes no time itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.kv.block_pool import BlockPool
from core.kv.kv_events import KVEventLog


class VirtualStore:
    """num_blocks blocks; a real block pool keeps account of them."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks)
        self._log = KVEventLog(self._pool.cached_hashes, num_blocks, "")
        self._pool.event_log = self._log

    def num_leading(self, block_names: Sequence[bytes]) -> int:
        """How many of the first blocks are there."""
        return len(self._pool.find_longest_prefix(block_names, len(block_names)))

    def use(self, block_names: Iterable[bytes]) -> list[bytes]:
        """Use blocks in this order, each after storing it if it is missing: what was used longest ago is evicted for it.

        Returns what was evicted.
        """
        self._log.pool.clear()
        for name in block_names:
            block_ids = self._pool.find_longest_prefix((name,), 1)
            if block_ids:
                self._pool.add_references(block_ids)
            else:
                allocated = self._pool.try_allocate(1)
                assert allocated is not None  # nothing is referred to between uses
                block_ids = allocated
                self._pool.set_hash(block_ids[0], name)
            self._pool.release_references(block_ids)
        return [name for name, is_there in self._log.pool.items() if not is_there]
