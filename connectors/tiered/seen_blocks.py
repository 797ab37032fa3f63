"""How many requests have had each block: what a tier with a store_threshold asks before it takes one."""

from __future__ import annotations

from collections.abc import Sequence

_NUM_REMEMBERED_REQUESTS = 4


class SeenBlocks:
    """Counts by block hash, of at most max_blocks blocks; those not seen for longest are forgotten first. Not safe for threads.

    A request counts once, however often it looks a block up or saves it (unless four others did in between). Every request that
    has a block has its parents too, so a block has no higher count than its parent.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._seen: dict[bytes, tuple[int, tuple[str, ...]]] = {}  # count, and the requests that were counted last

    def __len__(self) -> int:
        return len(self._seen)

    def note(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """A request has these blocks, given first to last."""
        seen = self._seen
        for block_hash in reversed(block_hashes):  # a parent must not be forgotten before its children
            count, request_ids = seen.pop(block_hash, (0, ()))
            if request_id not in request_ids:
                count, request_ids = count + 1, (*request_ids, request_id)[-_NUM_REMEMBERED_REQUESTS:]
            seen[block_hash] = (count, request_ids)
        while len(seen) > self._max_blocks:
            del seen[next(iter(seen))]

    def count(self, block_hash: bytes) -> int:
        """Requests that had this block, as far as remembered."""
        return self._seen.get(block_hash, (0, ()))[0]
