"""A node's KV events as wire messages: numbered, cut to size, and only when the router asked. Step thread only."""

from __future__ import annotations

from core.engine import EngineCore
from core.kv.kv_events import KVChange
from core.wire import messages


class KVEventStream:
    """Off at first. Sequence numbers go on for the node's life; a PoolCleared says that what follows is everything."""

    def __init__(self, engine: EngineCore, max_hashes_per_message: int = messages.MAX_EVENT_HASHES) -> None:
        self._engine = engine
        self._max_hashes = max_hashes_per_message
        self._next_sequence = 0

    def start(self) -> list[messages.NodeMessage]:
        """Tell everything now, and every change from now on."""
        self._engine.watch_kv(is_on=True)
        return self.collect()

    def stop(self) -> None:
        """Nobody listens any more: recording costs nothing then. Safe to repeat."""
        self._engine.watch_kv(is_on=False)

    def collect(self) -> list[messages.NodeMessage]:
        """What changed since the last call."""
        changes = self._engine.take_kv_changes()
        if changes is None:
            return []
        batches: list[list[messages.KVEvent]] = [[messages.PoolCleared()] if changes.starts_over else []]
        room = self._max_hashes
        for change in changes.changes:
            first = 0
            while first < len(change.block_hashes):
                if not room:
                    batches.append([])
                    room = self._max_hashes
                block_hashes = change.block_hashes[first : first + room]
                batches[-1].append(_event_of(change, block_hashes))
                first += len(block_hashes)
                room -= len(block_hashes)
        return [self._number(batch) for batch in batches]

    def _number(self, events: list[messages.KVEvent]) -> messages.KVEvents:
        first = self._next_sequence
        self._next_sequence += len(events)
        return messages.KVEvents(first, tuple(events))


def _event_of(change: KVChange, block_hashes: tuple[bytes, ...]) -> messages.KVEvent:
    kind = messages.BlockStored if change.is_stored else messages.BlockRemoved
    return kind(block_hashes, change.medium)
