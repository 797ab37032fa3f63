"""Known blocks that running requests fill next, so that others with the same prefix wait for them as they would for a load.

Requests that share a prompt (n > 1, a common system prompt) would otherwise all compute it when they come together.
Plain state of the scheduler's; step thread only.
"""

from __future__ import annotations

from core.request import Request


class BlocksInProgress:
    """At most one block per running request: the first of its known full blocks that is not in the prefix cache yet."""

    def __init__(self) -> None:
        self._request_id_by_hash: dict[bytes, str] = {}

    def __contains__(self, block_hash: bytes | None) -> bool:
        return block_hash in self._request_id_by_hash

    def announce_next(self, request: Request) -> None:
        """Replace what the request announced before; nothing once all its known blocks are filled, or somebody else is at it."""
        self.withdraw(request)
        index = request.num_committed_blocks
        if index < len(request.block_hashes):
            block_hash = request.block_hashes[index]
            if self._request_id_by_hash.setdefault(block_hash, request.request_id) == request.request_id:
                request.announced_hash = block_hash

    def withdraw(self, request: Request) -> None:
        """The request fills nothing any more. Safe to repeat."""
        if request.announced_hash is not None:
            del self._request_id_by_hash[request.announced_hash]
            request.announced_hash = None
