"""One pool that serves a trace's requests one after the other, in the file's order: how much of it can be reused at all.

Two orders of use. "head_first" is the plain LRU that such figures are usually of: each block of a prompt, the partial one at its
end included, is used in turn, and what was used longest ago is evicted. "tail_first" is what our engine does: a request's blocks
are given back from their tail, so that a prefix outlives its continuations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.router.trace import BLOCK_TOKENS, TraceRequest
from bench.router.virtual_store import VirtualStore


@dataclass(frozen=True, slots=True)
class Reuse:
    """Shares of all blocks, and of all prompt tokens, that were found; leading ones only."""

    by_blocks: float
    by_tokens: float


def replay_sequential(requests: Sequence[TraceRequest], num_blocks: int | None, order: str = "head_first") -> Reuse:
    """Reuse by one pool of num_blocks blocks (None: as many as the trace has). order: see above.

    A pool must hold the longest prompt. Raises ValueError where it does not, and for an unknown order.
    """
    if order not in ("head_first", "tail_first"):
        raise ValueError(f"order: got {order!r}; allowed: head_first or tail_first")
    num_longest = max((len(request.block_names) for request in requests), default=0)
    if num_blocks is None:
        num_blocks = len({name for request in requests for name in request.block_names})
    if num_blocks < num_longest:
        raise ValueError(f"blocks: got {num_blocks}; allowed: {num_longest} (the longest prompt) or more")
    pool = VirtualStore(num_blocks)
    num_hit_blocks = num_hit_tokens = 0
    for request in requests:
        names = request.block_names
        num_hits = pool.num_leading(names)
        num_hit_blocks += num_hits
        num_hit_tokens += min(num_hits * BLOCK_TOKENS, request.num_prompt_tokens)
        pool.use(names if order == "head_first" else reversed(names))
    num_all_blocks = sum(len(request.block_names) for request in requests)
    num_all_tokens = sum(request.num_prompt_tokens for request in requests)
    return Reuse(num_hit_blocks / max(num_all_blocks, 1), num_hit_tokens / max(num_all_tokens, 1))
