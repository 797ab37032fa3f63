"""A medium of slots that fails or hangs on demand, which real ones do too seldom."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from connectors.slots.store import SlotMedium


class FaultyMedium(SlotMedium):
    """A real medium that raises `fault`, and that keeps its callers while may_go_on is not set."""

    def __init__(self, medium: SlotMedium) -> None:
        self._medium = medium
        self.needs_neighbours = medium.needs_neighbours
        self.fault: OSError | None = None
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.waiting: list[int] = []  # one item per thread inside

    def _obey(self) -> None:
        self.waiting.append(1)
        self.may_go_on.wait(60)
        self.waiting.pop()
        if self.fault is not None:
            raise self.fault

    def read(self, slots: Sequence[int], blocks: Sequence[memoryview]) -> Iterable[bytes]:
        self._obey()
        return self._medium.read(slots, blocks)

    def write(self, slots: Sequence[int], headers: Iterable[bytes], blocks: Sequence[memoryview]) -> None:
        self._obey()
        self._medium.write(slots, headers, blocks)

    def grow(self, first_slot: int, end_slot: int) -> None:
        self._medium.grow(first_slot, end_slot)

    def is_intact(self) -> bool:
        return self._medium.is_intact()

    def close(self) -> None:
        self._medium.close()
