"""What the connector needs of LMCache, in whichever mode: objects that it reads, writes and removes, and an index of them.

Any thread may call; no two may write the same object at once. Nothing here verifies what it reads, and every wait has an end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from connectors.lmcache.object_directory import ObjectDirectory, StoredObject

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Objects that LMCache has been asked for, with its handles."""

    batch: Sequence[StoredObject]
    handles: Sequence[Any]


class ObjectStore(ABC):
    """The objects of one KV layout. unit_bytes: a block with its header."""

    unit_bytes: int
    capacity_bytes: int
    directory: ObjectDirectory
    why_away: str | None = None  # the reason why nothing can be moved for now
    num_faults: int = 0  # of the store itself, found by refresh()

    @abstractmethod
    def refresh(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Look at the store, and what it holds; hashes of the blocks that came and went since the last call."""

    @abstractmethod
    def batches(self, objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
        """Parts that may be written at once."""

    @abstractmethod
    def write(
        self,
        batch: Sequence[StoredObject],
        fill: Callable[[Sequence[tuple[StoredObject, Bytes]]], None],
        should_stop: Callable[[], bool],
    ) -> list[StoredObject]:
        """Write objects, which fill([(object, its bytes), ...]) provides; those that are stored now."""

    @abstractmethod
    def read_steps(self, objects: Sequence[StoredObject]) -> Generator[Reading, None, None]:
        """Begin to read all of these in small parts, one part ahead of what is taken; see reading(), which ends each."""

    @abstractmethod
    def reading(
        self, started: Reading, should_stop: Callable[[], bool]
    ) -> AbstractContextManager[dict[StoredObject, Bytes] | None]:
        """The bytes of the objects that could be read, valid within the context. None: not in time."""

    @abstractmethod
    def is_whole(self, stored: StoredObject) -> bool:
        """Whether an object that could not be read may be read another time."""

    @abstractmethod
    def delete(self, names: Sequence[bytes]) -> None:
        """Remove objects, in the store and on its index' medium."""

    @abstractmethod
    def tidy(self) -> None:
        """Called now and then on an idle thread."""

    @abstractmethod
    def close(self) -> None:
        """May hang, if LMCache does."""
