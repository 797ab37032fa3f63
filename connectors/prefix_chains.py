"""Which blocks come before which: each request's chain of block hashes, as far as a connector has seen it.

A transfer names only its own blocks. Saved chunk by chunk, a prefix would get older from tail to head and lose its head
first, which makes all the rest useless; so a store touches a transfer's ancestors along with it, and never evicts them for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

MAX_CHAINS = 1024


class PrefixChains:
    """The latest chains by request id, at most max_chains.

    Only recency depends on them: a chain that is missing or wrong costs hits later, nothing else.
    note_lookup comes from the step thread, the others from worker threads.
    """

    def __init__(self, max_chains: int = MAX_CHAINS) -> None:
        self._max_chains = max_chains
        self._chain_by_request: dict[str, Sequence[bytes]] = {}
        self._mutex = threading.Lock()

    def note_lookup(self, request_id: str, block_hashes: Sequence[bytes]) -> None:
        """Remember a request's hashes, without a copy: the engine extends the same list while the request grows."""
        with self._mutex:
            self._chain_by_request.pop(request_id, None)
            self._chain_by_request[request_id] = block_hashes
            if len(self._chain_by_request) > 2 * self._max_chains:  # nobody transfers, so nobody trims
                self._drop_oldest()

    def note_transfer(self, request_id: str, block_hashes: Sequence[bytes]) -> list[bytes]:
        """The known ancestors of block_hashes[0], first to last. Hashes new to the chain are taken for its continuation."""
        dropped = []
        with self._mutex:
            chain = self._chain_by_request.get(request_id, ())
            while len(self._chain_by_request) > self._max_chains:
                dropped.append(self._drop_oldest())
        dropped.clear()  # here, because letting go of a long chain takes longer than a lookup may
        if not block_hashes:
            return []
        try:
            return list(chain[: chain.index(block_hashes[0])])
        except ValueError:
            self.note_lookup(request_id, [*chain, *block_hashes])
            return list(chain)

    def _drop_oldest(self) -> Sequence[bytes]:
        return self._chain_by_request.pop(next(iter(self._chain_by_request)))
