"""Leases of one node's blocks: who will come for which of them. Leased blocks are not evicted.

A lease ends when its holder says so, when its connection ends, or by itself: lease_s after the last heartbeat, max_lease_s
after its beginning in any case. Leases together never hold more than half of the memory, so that saves go on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connectors.tcp.block_memory import BlockMemory

_MAX_LEASES = 4096


@dataclass(slots=True)
class _Lease:
    slots: list[int]
    started_s: float
    renewed_s: float


class Leases:
    """By holder (a connection) and the holder's name for it. Any thread."""

    def __init__(self, memory: BlockMemory, lease_s: float, max_lease_s: float) -> None:
        self._memory = memory
        self._lease_s = lease_s
        self._max_lease_s = max_lease_s
        self._mutex = threading.Lock()
        self._lease_by_name: dict[tuple[object, bytes], _Lease] = {}
        self._num_slots = 0

    def __len__(self) -> int:
        return len(self._lease_by_name)

    def take(self, holder: object, name: bytes, block_hashes: Sequence[bytes], now_s: float) -> None:
        """Keep those of these blocks that are here, the first ones when they are too many; instead of an earlier one's."""
        with self._mutex:
            old = self._lease_by_name.get((holder, name))
            if old is None and len(self._lease_by_name) >= _MAX_LEASES:
                return
            room = self._memory.num_slots // 2 - self._num_slots + (len(old.slots) if old is not None else 0)
            slots = self._memory.pin_present(block_hashes, max(0, room))
            started_s = now_s
            if old is not None:
                started_s = old.started_s
                self._end((holder, name))
            if slots:
                self._lease_by_name[holder, name] = _Lease(slots, started_s, now_s)
                self._num_slots += len(slots)

    def renew(self, holder: object, names: Iterable[bytes], now_s: float) -> None:
        """Its holder is alive and still wants them."""
        with self._mutex:
            for name in names:
                lease = self._lease_by_name.get((holder, name))
                if lease is not None:
                    lease.renewed_s = now_s

    def release(self, holder: object, names: Iterable[bytes]) -> None:
        """Its holder has what it wanted. Safe to repeat."""
        with self._mutex:
            for name in names:
                self._end((holder, name))

    def release_all(self, holder: object) -> None:
        """The holder is gone."""
        with self._mutex:
            for key in [key for key in self._lease_by_name if key[0] is holder]:
                self._end(key)

    def expire(self, now_s: float) -> None:
        """End those whose time is over."""
        with self._mutex:
            for key, lease in list(self._lease_by_name.items()):
                if now_s > min(lease.renewed_s + self._lease_s, lease.started_s + self._max_lease_s):
                    self._end(key)

    def _end(self, key: tuple[object, bytes]) -> None:
        lease = self._lease_by_name.pop(key, None)
        if lease is not None:
            self._num_slots -= len(lease.slots)
            self._memory.unpin(lease.slots)
