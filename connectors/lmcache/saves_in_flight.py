"""Which blocks are being saved, and how much room they will take: saves of different blocks go on side by side."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence


class SavesInFlight:
    """Any thread. num_pending: blocks that have been given room and are not stored yet."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._claimed: set[bytes] = set()
        self.num_pending = 0
        self.making_room = threading.Lock()  # held while somebody looks how much there is, and takes it

    @contextlib.contextmanager
    def claim(self, block_hashes: Sequence[bytes]) -> Iterator[None]:
        """Wait until nobody else saves any of these, which ends when their saves do."""
        with self._changed:
            self._changed.wait_for(lambda: self._claimed.isdisjoint(block_hashes))
            self._claimed.update(block_hashes)
        try:
            yield
        finally:
            with self._changed:
                self._claimed.difference_update(block_hashes)
                self._changed.notify_all()

    def add_pending(self, num_blocks: int) -> None:
        """So many more, or fewer."""
        with self._changed:
            self.num_pending += num_blocks
