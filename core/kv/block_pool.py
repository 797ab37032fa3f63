"""Which block of the pool holds what, and who refers to it: reference counts, the prefix cache's index, the free list.

A block is free when nobody refers to it: no request, no transfer. A free block keeps its hash until it is reused, so that the
prefix cache costs no memory of its own. Called from the step thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from core.kv.kv_events import KVEventLog


class BlockPool:
    """num_blocks blocks with ids 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.event_log: KVEventLog | None = None  # told which hashes come and go, if anybody wants to know
        self._ref_counts = [0] * num_blocks
        self._hash_by_block: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._duplicates_by_hash: dict[bytes, list[int]] = {}  # further blocks with a hash that is already indexed
        self._free_unhashed = list(range(num_blocks - 1, -1, -1))  # a stack: most recently used memory first
        self._free_hashed: OrderedDict[int, None] = OrderedDict()  # least recently used first, O(1) removal anywhere

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, those with a cached hash included."""
        return len(self._free_unhashed) + len(self._free_hashed)

    @property
    def num_cached_free(self) -> int:
        """Free blocks that still serve prefix hits."""
        return len(self._free_hashed)

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, each with one reference and no hash; None when there are not enough, and nothing has changed then."""
        if num_blocks > self.num_free:
            return None
        unhashed, ref_counts = self._free_unhashed, self._ref_counts
        block_ids = []
        for _ in range(num_blocks):
            if unhashed:
                block_id = unhashed.pop()
            else:
                block_id, _none = self._free_hashed.popitem(last=False)
                self._forget_hash(block_id)
                self.num_evictions += 1
            ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def add_references(self, block_ids: Iterable[int]) -> None:
        """Refer to blocks once more each; free ones leave the free list. Only cached or referenced blocks may be named."""
        ref_counts, free_hashed = self._ref_counts, self._free_hashed
        for block_id in block_ids:
            count = ref_counts[block_id]
            if count == 0:
                del free_hashed[block_id]
            ref_counts[block_id] = count + 1

    def release_references(self, block_ids: Iterable[int]) -> None:
        """Drop one reference each, in the given order: among the blocks that become free the first is reused first, so a
        request's blocks are passed tail first and a prefix outlives its continuations."""
        ref_counts = self._ref_counts
        for block_id in block_ids:
            count = ref_counts[block_id] - 1
            assert count >= 0, f"block {block_id} released more often than referred to"
            ref_counts[block_id] = count
            if count == 0:
                if self._hash_by_block[block_id] is None:
                    self._free_unhashed.append(block_id)
                else:
                    self._free_hashed[block_id] = None

    def set_hash(self, block_id: int, block_hash: bytes) -> None:
        """Make a referenced, full block findable by content. Another block with the same hash may exist."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free: its content may change"
        assert self._hash_by_block[block_id] is None, f"block {block_id} already has a hash"
        self._hash_by_block[block_id] = block_hash
        if block_hash in self._block_by_hash:
            self._duplicates_by_hash.setdefault(block_hash, []).append(block_id)
        else:
            self._block_by_hash[block_hash] = block_id
            if self.event_log is not None:
                self.event_log.pool[block_hash] = True

    def find_longest_prefix(self, block_hashes: Sequence[bytes], max_blocks: int) -> list[int]:
        """Blocks holding the leading hashes, up to the first one missing or max_blocks. Takes no references."""
        block_ids = []
        lookup = self._block_by_hash.get
        for block_hash in islice(block_hashes, max_blocks):
            block_id = lookup(block_hash)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def ref_count(self, block_id: int) -> int:
        """References to a block."""
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """The hash that a block is findable by, if any."""
        return self._hash_by_block[block_id]

    def cached_hashes(self) -> Iterable[bytes]:
        """All hashes that blocks are findable by, each once, oldest first."""
        return self._block_by_hash.keys()

    def num_references(self) -> int:
        """Sum of all references; for audits."""
        return sum(self._ref_counts)

    def try_reset_hashes(self) -> bool:
        """Forget all cached content. Declines, changing nothing, while any block is in use."""
        if self.num_free != self.num_blocks:
            return False
        self._free_unhashed.extend(self._free_hashed)
        self._free_hashed.clear()
        self._hash_by_block = [None] * self.num_blocks
        self._block_by_hash.clear()
        self._duplicates_by_hash.clear()
        if self.event_log is not None:
            self.event_log.start_over()
        return True

    def _forget_hash(self, block_id: int) -> None:
        block_hash = self._hash_by_block[block_id]
        assert block_hash is not None
        self._hash_by_block[block_id] = None
        duplicates = self._duplicates_by_hash.get(block_hash)
        if duplicates is None:
            del self._block_by_hash[block_hash]
            if self.event_log is not None:
                self.event_log.pool[block_hash] = False
            return
        if self._block_by_hash[block_hash] == block_id:
            self._block_by_hash[block_hash] = duplicates.pop()
        else:
            duplicates.remove(block_id)
        if not duplicates:
            del self._duplicates_by_hash[block_hash]
