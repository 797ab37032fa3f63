"""What scheduler_rig.py is made of: real parts that tell what they do, and what the fake model says and writes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from core.kv.block_pool import BlockPool
from core.kv_cache_manager import KVCacheManager
from core.request import FinishReason, Request
from tests.support.fake_runner import fake_entry, oracle_tokens

Content = tuple[str, tuple[int, ...]]  # salt, and all tokens up to the block's end


@lru_cache(maxsize=100_000)
def entry_of(token_ids: tuple[int, ...]) -> bytes:
    """What the fake model writes for the last of these tokens."""
    previous = entry_of(token_ids[:-1]) if len(token_ids) > 1 else b""
    return fake_entry(previous, token_ids[-1], len(token_ids) - 1)


@lru_cache(maxsize=10_000)
def right_text(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    """Do not change it."""
    return oracle_tokens(prompt, num_tokens)


@dataclass(slots=True)
class Expected:
    """A request as whoever sent it knows it. start: the tokens that it came with. text: all that it may say; received: has said.

    turn: whose is smaller is served first.
    """

    turn: tuple[float, int]
    start: tuple[int, ...]
    salt: str
    text: list[int]
    reason: FinishReason
    received: list[int]


class WatchedPool(BlockPool):
    """Follows which blocks are handed out anew: what they held is gone, and no step in flight may write to them.

    written_by_steps: the blocks that each step in flight may write to, oldest first.
    """

    def __init__(self, num_blocks: int, contents: dict[int, Content]) -> None:
        super().__init__(num_blocks)
        self.written_by_steps: deque[set[int]] = deque()
        self._contents = contents

    def try_allocate(self, num_blocks: int) -> list[int] | None:
        block_ids = super().try_allocate(num_blocks)
        for block_id in block_ids or ():
            assert self._ref_counts[block_id] == 1, f"block {block_id} has two owners"
            assert not any(block_id in written for written in self.written_by_steps), f"a step in flight writes block {block_id}"
            self._contents.pop(block_id, None)
        return block_ids


class WatchedKV(KVCacheManager):
    """Compares every hit with the longest prefix that the plain model knows of."""

    contents: dict[int, Content]
    longest_prefix: Callable[[Request], list[Content]]

    def find_local_hit(self, request: Request) -> list[int]:
        hit = super().find_local_hit(request)
        wanted = self.longest_prefix(request)
        assert [self.contents.get(block_id) for block_id in hit] == wanted, f"{request.request_id}: a hit that is not the longest"
        return hit


class GuessingDrafter:
    """Says the right text up to a random place, and then something else."""

    def __init__(self, expected: dict[str, Expected], num_tokens: int) -> None:
        self._rng = random.Random(num_tokens)
        self._expected = expected
        self._num_tokens = num_tokens

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """See core.drafter.Drafter."""
        num_drafts = min(self._num_tokens, max_tokens)
        start = self._expected[request_id].start
        num_output = len(token_ids) - len(start)
        drafts = right_text(start, num_output + max(0, num_drafts))[num_output:]
        num_right = self._rng.randrange(self._num_tokens + 1)
        return [token if place < num_right else token % 999 + 1 for place, token in enumerate(drafts)]

    def forget(self, request_id: str) -> None:
        """See core.drafter.Drafter."""
