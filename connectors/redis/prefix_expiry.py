"""When the blocks of a prefix expire: those used last, last; and of one prefix the tail first.

A store that evicts by time to live (Redis: volatile-ttl) then evicts whole old prefixes from their ends, and leaves no holes.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

# Only the order counts. Deeper steps would make the tail of the newest prefix older than prefixes used a moment ago; blocks of
# one step are evicted in any order, and fewer than a step are lost to a hole.
BLOCKS_PER_MILLISECOND = 8
_MAX_REQUESTS = 1024


@dataclass(frozen=True, slots=True)
class ExpiryPlan:
    """For one transfer. base_ms: when a block of depth 0 expires. first_stale: ancestors from this depth on have an older moment
    and must be given theirs again."""

    base_ms: int
    first_stale: int

    def expiry_ms(self, depth: int) -> int:
        """When the block of this depth expires, on the store's clock, in Unix milliseconds."""
        return self.base_ms - depth // BLOCKS_PER_MILLISECOND


class PrefixExpiry:
    """Gives all transfers of one pass of a request over its prefix the same moment. Any thread.

    Were each chunk of a prompt given its own, later and so deeper blocks would outlive the first ones, without which they are
    of no use; and touching all ancestors at each chunk would cost more than the chunk.
    """

    def __init__(self, lifetime_ms: int) -> None:
        self._lifetime_ms = lifetime_ms
        self._mutex = threading.Lock()
        self._pass_by_request: dict[str, tuple[int, int]] = {}  # base_ms, and up to which depth blocks have it

    def plan(self, request_id: str, first_depth: int, num_blocks: int, now_ms: int) -> ExpiryPlan:
        """The expiry of blocks [first_depth, first_depth + num_blocks) of a request's prefix, and of their ancestors. now_ms: the
        store's clock."""
        with self._mutex:
            base_ms, end = self._pass_by_request.pop(request_id, (0, first_depth + 1))
            if first_depth < end or base_ms - now_ms < self._lifetime_ms // 2:  # a new pass, or one that lasts too long
                base_ms, end = now_ms + self._lifetime_ms, 0
            self._pass_by_request[request_id] = (base_ms, first_depth + num_blocks)
            if len(self._pass_by_request) > _MAX_REQUESTS:
                del self._pass_by_request[next(iter(self._pass_by_request))]
        return ExpiryPlan(base_ms, end)
