"""What one process believes a remote store to hold, so that lookups are answered without asking it.

A belief is a fact with an epoch: whenever the store may have lost blocks behind our back, a new epoch begins, and what was
learned earlier no longer answers a request's first question. Reading takes no lock; the step thread reads, others write.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections import deque
from collections.abc import Iterable, Sequence

_MAX_CHECKED_REQUESTS = 8192
_ALL_STORED = b""


class KnownBlocks:
    """Stored blocks by hash, at most max_blocks of them, and where each recently checked request's chain ends."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._mutex = threading.Lock()  # of changes
        self._epoch_by_hash: dict[bytes, int] = {}
        self._oldest: deque[bytes] = deque()  # hashes in the order in which they became known
        self._end_by_request: dict[str, tuple[bytes, int]] = {}  # the first hash not stored, and the epoch of that finding
        self.epoch = 0

    def __len__(self) -> int:
        return len(self._epoch_by_hash)

    # -- step thread ---------------------------------------------------------------------------------------------------
    def count_prefix(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> int | None:
        """How many blocks from the first-th on are stored without a hole; None: the store must be asked.

        A request that has been checked is answered from what is known, however old: it may wait long for its turn, and a block
        that has gone since costs a load that misses. A new request is answered from the current epoch alone.
        """
        known = map(self._epoch_by_hash.get, itertools.islice(block_hashes, first, None))
        checked = self._end_by_request.get(request_id)
        if checked is None:
            is_good: Iterable[bool] = map(operator.eq, known, itertools.repeat(self.epoch))
        else:
            is_good = map(operator.is_not, known, itertools.repeat(None))
        count = sum(itertools.takewhile(operator.truth, is_good))
        end = first + count
        if end >= len(block_hashes) or (checked is not None and block_hashes[end] == checked[0]):
            return count
        return None

    def should_check_again(self, request_id: str) -> bool:
        """Whether a request's check is from an earlier epoch."""
        checked = self._end_by_request.get(request_id)
        return checked is not None and checked[1] != self.epoch

    # -- other threads -------------------------------------------------------------------------------------------------
    def holds_any(self, block_hashes: Iterable[bytes]) -> bool:
        """Whether some of these are believed to be stored, however old the finding."""
        return any(block_hash in self._epoch_by_hash for block_hash in block_hashes)

    def begin_epoch(self) -> None:
        """The store may have lost blocks, or all of them."""
        with self._mutex:
            self.epoch += 1

    def add(self, block_hashes: Iterable[bytes], epoch: int) -> None:
        """These were stored at some moment of `epoch`, which was read before the store was asked."""
        with self._mutex:
            known, oldest = self._epoch_by_hash, self._oldest
            for block_hash in block_hashes:
                if block_hash not in known:
                    oldest.append(block_hash)
                known[block_hash] = epoch
            while len(known) > self._max_blocks or len(oldest) > 2 * self._max_blocks:
                known.pop(oldest.popleft(), None)

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        """These are not stored."""
        with self._mutex:
            for block_hash in block_hashes:
                self._epoch_by_hash.pop(block_hash, None)

    def note_check(self, request_id: str, absent_hash: bytes | None, epoch: int) -> None:
        """A request's chain was checked: all is stored before absent_hash, or all of it (None)."""
        with self._mutex:
            checked = self._end_by_request
            checked.pop(request_id, None)
            checked[request_id] = (_ALL_STORED if absent_hash is None else absent_hash, epoch)
            if len(checked) > _MAX_CHECKED_REQUESTS:
                del checked[next(iter(checked))]
