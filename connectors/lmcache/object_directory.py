"""An index of objects that hold several blocks each, without an index file: an object's name is the hashes of its blocks.

The listing of one folder, which several processes may share, is all there is to know; so it survives whatever the folder does.
Reads names and times only; who writes and removes the files is the caller's business.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.kv.hashing import HASH_BYTES

MAX_BLOCKS_PER_OBJECT = 6  # whose hashes, in hexadecimal, fit into the name of a file with what its owner adds
_SETTLED_S = 0.05  # several ticks of the clock that stamps a folder: later changes have another time


@dataclass(frozen=True, slots=True)
class StoredObject:
    """name: the concatenated hashes of its blocks, in order."""

    name: bytes

    @property
    def block_hashes(self) -> tuple[bytes, ...]:
        """Of its blocks."""
        return tuple(self.name[start : start + HASH_BYTES] for start in range(0, len(self.name), HASH_BYTES))

    @property
    def num_blocks(self) -> int:
        """1 to MAX_BLOCKS_PER_OBJECT."""
        return len(self.name) // HASH_BYTES


class ObjectDirectory:
    """What a folder holds, as far as this process has looked. Safe from any thread.

    file_name(object name) and its inverse parse(file name), None for anything else, are the owner's.
    """

    def __init__(self, folder: Path, file_name: Callable[[bytes], str], parse: Callable[[str], bytes | None]) -> None:
        self._folder, self._file_name, self._parse = folder, file_name, parse
        self._mutex = threading.RLock()
        self._recency_by_name: dict[bytes, int] = {}  # modification times in ns, as last seen or set
        self._object_by_hash: dict[bytes, StoredObject] = {}
        self._others_by_hash: dict[bytes, list[StoredObject]] = {}  # where two writers met: a block's further objects
        self._parsed: dict[str, bytes | None] = {}  # names of files, each parsed once
        self._num_blocks = 0
        self._folder_time = -1
        self._seen_since_s = 0.0
        self._is_settled = False
        self.is_present = True

    @property
    def num_blocks(self) -> int:
        """In all objects."""
        return self._num_blocks

    def block_hashes(self) -> list[bytes]:
        """Of all blocks."""
        with self._mutex:
            return list(self._object_by_hash)

    def find(self, block_hash: bytes) -> StoredObject | None:
        """The object that holds a block."""
        return self._object_by_hash.get(block_hash)

    def refresh(self) -> tuple[list[bytes], list[bytes]]:
        """Look at the folder, and list it if it may have changed; hashes of blocks that came and went. None: an empty one."""
        with self._mutex:
            started_s = time.monotonic()
            folder_time = self._read_folder_time()
            if folder_time != self._folder_time:
                self._folder_time, self._seen_since_s, self._is_settled = folder_time, started_s, False
            if self._is_settled:
                return [], []
            self._is_settled = started_s - self._seen_since_s >= _SETTLED_S
            texts: list[str] = []
            with contextlib.suppress(FileNotFoundError):
                texts = os.listdir(self._folder)  # noqa: PTH208 (many names, and no use for paths)
            parsed = self._parsed
            self._parsed = {text: parsed[text] if text in parsed else self._parse(text) for text in texts}
            listed = {name for name in self._parsed.values() if name is not None}
            gone, new = self._recency_by_name.keys() - listed, listed - self._recency_by_name.keys()
            came = [block_hash for name in new for block_hash in self._add(name, self._read_time(name))]
            went = [block_hash for name in gone for block_hash in self.remove(name)]
            return came, went

    def add(self, names: Iterable[bytes]) -> None:
        """The caller has written these."""
        with self._mutex:
            for name in names:
                self._add(name, self._read_time(name))

    def remove(self, name: bytes) -> tuple[bytes, ...]:
        """The caller has removed this one, or found it damaged; the blocks that are in no object now. Safe to repeat."""
        with self._mutex:
            if self._recency_by_name.pop(name, None) is None:
                return ()
            stored = StoredObject(name)
            self._num_blocks -= stored.num_blocks
            return tuple(block_hash for block_hash in stored.block_hashes if not self._remove_block(block_hash, stored))

    def _remove_block(self, block_hash: bytes, stored: StoredObject) -> bool:
        """Whether another object holds the block as well."""
        others = self._others_by_hash.pop(block_hash, [])
        holders = [holder for holder in (self._object_by_hash.pop(block_hash), *others) if holder != stored]
        if holders:
            self._object_by_hash[block_hash] = holders[0]
        if holders[1:]:
            self._others_by_hash[block_hash] = holders[1:]
        return bool(holders)

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """The blocks of a prefix, first to last, are in use: its head is now the newest of all, and each further object older."""
        names = list(dict.fromkeys(stored.name for block_hash in block_hashes if (stored := self.find(block_hash)) is not None))
        if not names:
            return
        with contextlib.suppress(OSError):  # gone, or not ours to touch: no reason to drop what was read
            os.utime(self._path(names[0]))
            newest = self._read_time(names[0])
            for depth, name in enumerate(names):
                recency = newest - depth * 1000
                os.utime(self._path(name), ns=(recency, recency))
                with self._mutex:
                    if name in self._recency_by_name:
                        self._recency_by_name[name] = recency

    def pick_oldest(self, num_blocks: int, spared: Iterable[bytes]) -> list[bytes]:
        """Names of the objects used longest ago that hold num_blocks blocks or more together, without those that hold `spared`;
        fewer if there are no more. What other processes have used meanwhile is looked up."""
        kept = {stored.name for block_hash in spared if (stored := self.find(block_hash)) is not None}
        with self._mutex:
            candidates = sorted((recency, name) for name, recency in self._recency_by_name.items() if name not in kept)
        picked: list[bytes] = []
        for recency, name in candidates:
            if num_blocks <= 0:
                break
            seen = self._read_time(name)
            if seen > recency:  # another process has used it
                with self._mutex:
                    self._recency_by_name[name] = seen
                continue
            picked.append(name)
            num_blocks -= StoredObject(name).num_blocks
        return picked

    def _add(self, name: bytes, recency: int) -> tuple[bytes, ...]:
        if name in self._recency_by_name:
            return ()
        self._recency_by_name[name] = recency
        stored = StoredObject(name)
        self._num_blocks += stored.num_blocks
        for block_hash in stored.block_hashes:
            if self._object_by_hash.setdefault(block_hash, stored) is not stored:
                self._others_by_hash.setdefault(block_hash, []).append(stored)
        return stored.block_hashes

    def _path(self, name: bytes) -> Path:
        return self._folder / self._file_name(name)

    def _read_time(self, name: bytes) -> int:
        try:
            return self._path(name).stat().st_mtime_ns
        except OSError:
            return 0

    def _read_folder_time(self) -> int:
        try:
            found = self._folder.stat().st_mtime_ns
        except FileNotFoundError:
            self.is_present = False
            return 0
        self.is_present = True
        return found
