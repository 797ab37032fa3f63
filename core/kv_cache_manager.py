"""Blocks of requests: what a request gets, when its content becomes findable by others, and how it is given back.

A block may be written by any step in flight that was scheduled while its request had it. So what is given back meanwhile is free
only when the newest of those steps is done. Sits between the scheduler and the block pool; no I/O and no transfers. Called from
the step thread only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from core.kv.block_pool import BlockPool
from core.kv.hashing import extend_block_hashes
from core.request import Request


class KVCacheManager:
    """Block tables over one pool. block_size in tokens."""

    def __init__(self, pool: BlockPool, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._steps_in_flight: deque[int] = deque()
        self._fenced: deque[tuple[int, list[int]]] = deque()  # by the step that must be done before these blocks are free

    # -- steps in flight -----------------------------------------------------------------------------------------------
    @property
    def num_steps_in_flight(self) -> int:
        """Steps that were begun and not ended."""
        return len(self._steps_in_flight)

    @property
    def num_fenced_references(self) -> int:
        """References of requests that gave them back, held until a step in flight is done."""
        return sum(len(block_ids) for _step_id, block_ids in self._fenced)

    def begin_step(self, step_id: int) -> None:
        """A step will write to the blocks that its requests have now. Ids ascend."""
        self._steps_in_flight.append(step_id)

    def end_step(self, step_id: int) -> None:
        """The oldest step in flight has ended, whatever came of it."""
        oldest = self._steps_in_flight.popleft()
        assert oldest == step_id, f"step {step_id} ended before step {oldest}"
        while self._fenced and self._fenced[0][0] <= step_id:
            self.pool.release_references(reversed(self._fenced.popleft()[1]))

    # -- blocks --------------------------------------------------------------------------------------------------------
    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def find_local_hit(self, request: Request) -> list[int]:
        """Blocks of the longest cached prefix. At least one token is left to compute: its output is what a step samples from."""
        if not (self.enable_prefix_caching and request.may_hit):
            return []
        self.extend_hashes(request)
        return self.pool.find_longest_prefix(request.block_hashes, self.max_hit_blocks(request))

    def next_hit_hash(self, request: Request, num_hit_blocks: int) -> bytes | None:
        """The first block that a further hit would have to cover; None when a hit cannot go further."""
        if num_hit_blocks >= self.max_hit_blocks(request) or not (self.enable_prefix_caching and request.may_hit):
            return None
        return request.block_hashes[num_hit_blocks]

    def max_hit_blocks(self, request: Request) -> int:
        """Full blocks that a hit may cover."""
        return (len(request.token_ids) - 1) // self.block_size

    def extend_hashes(self, request: Request) -> None:
        """Name all full blocks of the request's tokens."""
        extend_block_hashes(request.block_hashes, request.token_ids, self.block_size, request.root_hash)

    def try_allocate_table(self, request: Request, hit_block_ids: Sequence[int], num_tokens: int) -> bool:
        """Give a request without blocks a table for num_tokens tokens that starts with the hit blocks. All or nothing."""
        assert not request.block_ids, f"{request.request_id} already has blocks"
        pool = self.pool
        pool.add_references(hit_block_ids)  # first, so that allocating cannot evict them
        new_block_ids = pool.try_allocate(self.num_blocks_for(num_tokens) - len(hit_block_ids))
        if new_block_ids is None:
            pool.release_references(reversed(hit_block_ids))
            return False
        request.block_ids = [*hit_block_ids, *new_block_ids]
        request.num_committed_blocks = len(hit_block_ids)
        return True

    def try_allocate_for_load(self, request: Request, hit_block_ids: Sequence[int], num_blocks: int) -> list[int] | None:
        """Blocks for the load of num_blocks behind the hit, or None unless the whole of the request would fit now."""
        pool = self.pool
        pool.add_references(hit_block_ids)  # while they are counted and allocated around
        num_needed = self.num_blocks_for(request.num_tokens_with_spec) - len(hit_block_ids)
        block_ids = pool.try_allocate(num_blocks) if num_needed <= pool.num_free else None
        pool.release_references(reversed(hit_block_ids))
        return block_ids

    def try_grow(self, request: Request, num_tokens: int) -> list[int] | None:
        """Extend a table to hold num_tokens tokens. The new blocks, or None when there are not enough (nothing changed)."""
        new_block_ids = self.pool.try_allocate(self.num_blocks_for(num_tokens) - len(request.block_ids))
        if new_block_ids is not None:
            request.block_ids += new_block_ids
        return new_block_ids

    def commit(self, request: Request) -> None:
        """Make the request's full blocks findable whose KV is written."""
        num_full = request.num_written_tokens // self.block_size
        if num_full <= request.num_committed_blocks:
            return
        self.extend_hashes(request)
        if self.enable_prefix_caching:
            for index in range(request.num_committed_blocks, num_full):
                self.pool.set_hash(request.block_ids[index], request.block_hashes[index])
        request.num_committed_blocks = num_full

    def release(self, request: Request) -> None:
        """Give all blocks back, tail first, once no step in flight can write to them. Safe to repeat."""
        if self._steps_in_flight:
            self._fenced.append((self._steps_in_flight[-1], request.block_ids))
        else:
            self.pool.release_references(reversed(request.block_ids))
        request.block_ids = []
        request.num_committed_blocks = 0

    def num_freed_by_release(self, request: Request) -> int:
        """Blocks that would become free: those that nobody else, request or transfer, refers to."""
        return sum(1 for block_id in request.block_ids if self.pool.ref_count(block_id) == 1)

    @staticmethod
    def num_common_prefix_blocks(requests: Sequence[Request]) -> int:
        """Leading blocks that all the requests share; 0 for a single request, which shares with nobody."""
        if len(requests) < 2:
            return 0
        first = requests[0].block_ids
        num_common = len(first)
        for request in requests:
            block_ids = request.block_ids
            if block_ids[:num_common] != first[:num_common]:
                num_common = _num_equal_leading(first, block_ids)
                if num_common == 0:
                    break
        return num_common


def _num_equal_leading(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
