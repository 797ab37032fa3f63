"""What changed in a pool and in the store behind it since somebody was last told: the source of KV events.

Only the last word on each block is kept, so that a step's changes are few and may be told in any order. BlockPool and
TransferLedger write here, EngineCore hands it out. Step thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_STORE_CHANGES = 1 << 16  # more than that at a time are not told: what a store holds is a hint, and is asked for by hash


@dataclass(frozen=True, slots=True)
class KVChange:
    """Blocks that appeared, or vanished. medium: "" for the engine's own pool, else the connector's name."""

    is_stored: bool
    block_hashes: tuple[bytes, ...]
    medium: str = ""


@dataclass(frozen=True, slots=True)
class KVChanges:
    """What happened since the last time, no block twice in one medium. starts_over: the pool is empty before these."""

    starts_over: bool
    changes: tuple[KVChange, ...]


class KVEventLog:
    """Collects changes between two takes.

    pool and store map a block's hash to whether it is there now; the pool and the ledger write to them directly, because a
    step may change thousands of blocks. list_pool: all hashes of the pool, for whoever is to be told everything.
    """

    def __init__(self, list_pool: Callable[[], Iterable[bytes]], max_changes: int, medium: str) -> None:
        """max_changes: with more of the pool's, everything is told instead."""
        self.pool: dict[bytes, bool] = {}
        self.store: dict[bytes, bool] = {}
        self._list_pool = list_pool
        self._max_changes = max_changes
        self._medium = medium
        self._starts_over = True

    def start_over(self) -> None:
        """The next changes are everything that the pool holds then, after it was empty."""
        self._starts_over = True
        self.pool.clear()

    def note_store(self, block_hashes: Iterable[bytes], *, is_stored: bool) -> None:
        """The store behind the connector has these blocks, or lacks them."""
        if len(self.store) < MAX_STORE_CHANGES:
            self.store.update(dict.fromkeys(block_hashes, is_stored))

    def take(self) -> KVChanges | None:
        """Everything since the last call; None when nothing changed."""
        if not (self.pool or self.store or self._starts_over):
            return None
        starts_over = self._starts_over or len(self.pool) > self._max_changes
        pool = dict.fromkeys(self._list_pool(), True) if starts_over else self.pool
        changes = (*_changes_of(pool, ""), *_changes_of(self.store, self._medium))
        self._starts_over = False
        self.pool.clear()
        self.store.clear()
        return KVChanges(starts_over, changes)


def _changes_of(is_stored_by_hash: dict[bytes, bool], medium: str) -> list[KVChange]:
    removed = tuple(block_hash for block_hash, is_stored in is_stored_by_hash.items() if not is_stored)
    stored = tuple(block_hash for block_hash, is_stored in is_stored_by_hash.items() if is_stored)
    return [KVChange(is_stored, hashes, medium) for is_stored, hashes in ((False, removed), (True, stored)) if hashes]
