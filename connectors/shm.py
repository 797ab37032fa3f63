"""The `shm` connector: a pool of blocks in the host's shared memory, used by all engines of one user, gone with the last of them.

Blocks are copied between the mapped segment and the engine's own pool, so that an engine's death cannot hurt another's KV.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.block_coding import SLOT_CODECS, CodingOptions
from connectors.bus_guard import GuardedMapping
from connectors.byte_sizes import readable_bytes, with_parsed_sizes
from connectors.file_lock import locked_directory
from connectors.slot_browser import SlotBrowser
from connectors.slot_connector import SlotConnector
from connectors.slot_store import HEADER_PAGE_BYTES, SlotLayout, SlotMedium, SlotStore, slot_bytes
from connectors.store_browser import StoreBrowser
from connectors.store_directory import Segment, StoreDirectory, StoreRoot, remove_dead_stores
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.clock import Clock
from core.config import options_from_mapping
from core.errors import ConfigError, ConnectorError
from core.kv.connector import KVConnector
from core.kv.layout import PAGE_BYTES

_GROW_BYTES = 16 * 1024 * 1024  # allocated at a time while the index is locked: some 10 ms
_TOUCH_BYTES = 4 * 1024 * 1024  # at a time, because the GIL is held
_MADV_POPULATE_WRITE = 23  # of Linux' mman.h; the mmap module has no name for it. Fails where touching would raise SIGBUS.


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """name: engines with the same name and KV layout share a pool of blocks. directory: a memory file system.

    capacity_bytes bounds one such pool (a size like 2GiB is fine); who joins a pool in use takes its capacity.
    num_threads copy at the same time. codec: none, or int8 or fp8, which are lossy: they nearly halve slots, and of 24
    greedy answers of 32 tokens they changed 7 and 12 (bench/RESULTS.md).
    """

    name: str = "default"
    capacity_bytes: int = 1024**3
    directory: str = "/dev/shm"  # noqa: S108 - the host's shared memory is the point
    num_threads: int = 2
    codec: str = "none"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", self.name):
            raise ConfigError("connector.options.name", self.name, "1 to 64 letters, digits, '_', '-', '.'")
        if not Path(self.directory).is_dir():
            raise ConfigError("connector.options.directory", self.directory, "an existing directory")
        if not 1 <= self.num_threads <= 16:
            raise ConfigError("connector.options.num_threads", self.num_threads, "1 to 16")


class ShmConnector(SlotConnector):
    """Opens the pool at <directory>/kvrelay-<uid>/<name>-<layout>, after deleting pools that nobody uses any more."""

    name = "shm"
    _starts_without_store = False

    def __init__(self, options: ShmOptions, clock: Clock) -> None:
        super().__init__(clock, options.num_threads, CodingOptions(options.codec).check(SLOT_CODECS))
        self._options = options

    def _open_store(self, layout: SlotLayout) -> SlotStore:
        root = Path(self._options.directory) / f"kvrelay-{os.getuid()}"
        place = StoreDirectory(root, f"{self._options.name}-{layout.fingerprint.hex()}", layout, is_removed_when_unused=True)
        with locked_directory(root):
            if root.stat().st_uid != os.getuid():
                raise ConnectorError(f"{root} belongs to another user: set connector.options.directory")
            remove_dead_stores(root)
            if not place.path.exists():
                self._check_free_memory(root)
            return place.open(self._options.capacity_bytes, _ShmSegment, _GROW_BYTES)

    def _check_free_memory(self, root: Path) -> None:
        found = os.statvfs(root)
        free_bytes = found.f_bavail * found.f_frsize
        if free_bytes < self._options.capacity_bytes:
            allowed = (
                f"at most the {readable_bytes(free_bytes)} that are free in {self._options.directory}: lower capacity_bytes, "
                "give the container more (docker run --shm-size), or set connector.options.directory to another memory disk"
            )
            raise ConfigError("connector.options.capacity_bytes", self._options.capacity_bytes, allowed)


class _ShmSegment(SlotMedium):
    """The mapped file. Pages beyond the allocated slots do not exist and must not be touched.

    Should somebody cut the file in the very moment of a copy, the copy ends in zeros: see bus_guard.
    """

    needs_neighbours = False

    def __init__(self, segment: Segment) -> None:
        self._slot_bytes = slot_bytes(segment.layout)
        self._block_bytes = segment.layout.block_bytes
        self._num_bytes = segment.index_file.num_slots * self._slot_bytes
        self._descriptor = os.open(segment.path, os.O_RDWR | os.O_CREAT, 0o600)
        if os.fstat(self._descriptor).st_size < self._num_bytes:
            if not segment.is_new:  # cut: its blocks are gone, and each will turn out to be a miss
                os.posix_fallocate(self._descriptor, 0, segment.index_file.num_ready_slots * self._slot_bytes)
            os.ftruncate(self._descriptor, self._num_bytes)
        self._mapping = GuardedMapping(self._descriptor, self._num_bytes)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._mapping.view, dtype=np.uint8)
        self._num_touched_slots = 0

    def read(self, slots: Sequence[int], blocks: Sequence[memoryview]) -> list[bytes]:
        headers = []
        for slot, block in zip(slots, blocks, strict=True):
            start = slot * self._slot_bytes
            headers.append(self._bytes[start : start + BLOCK_HEADER_BYTES].tobytes())
            payload = start + HEADER_PAGE_BYTES
            target = np.frombuffer(block, dtype=np.uint8)[: self._block_bytes]
            np.copyto(target, self._bytes[payload : payload + self._block_bytes])  # lets go of the GIL, unlike a slice of bytes
        return headers

    def write(self, slots: Sequence[int], headers: Sequence[bytes], blocks: Sequence[memoryview]) -> None:
        for slot, header, block in zip(slots, headers, blocks, strict=True):
            start = slot * self._slot_bytes
            self._bytes[start : start + BLOCK_HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
            payload = start + HEADER_PAGE_BYTES
            source = np.frombuffer(block, dtype=np.uint8)[: self._block_bytes]
            np.copyto(self._bytes[payload : payload + self._block_bytes], source)

    def grow(self, first_slot: int, end_slot: int) -> None:
        os.posix_fallocate(self._descriptor, first_slot * self._slot_bytes, (end_slot - first_slot) * self._slot_bytes)

    def is_intact(self) -> bool:
        try:
            found = os.fstat(self._descriptor)
        except OSError:
            return False
        return found.st_nlink > 0 and found.st_size >= self._num_bytes and not self._mapping.has_lost_pages

    def prepare(self, num_ready_slots: int) -> bool:
        """Touch allocated pages once: a page's first use by a process costs several times its copy."""
        first = self._num_touched_slots * self._slot_bytes // PAGE_BYTES * PAGE_BYTES
        self._num_touched_slots = min(num_ready_slots, self._num_touched_slots + max(1, _TOUCH_BYTES // self._slot_bytes))
        num_bytes = self._num_touched_slots * self._slot_bytes - first
        try:
            if num_bytes > 0:
                self._mapping.view.madvise(_MADV_POPULATE_WRITE, first, num_bytes)
        except OSError:  # a kernel before 5.14, or a segment that was cut: this is only to be faster later
            return False
        return self._num_touched_slots < num_ready_slots

    def close(self) -> None:
        del self._bytes, self._mapping
        os.close(self._descriptor)


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see ShmOptions. Raises ConfigError."""
    return ShmConnector(_parse(options), clock)


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """The pools of this name, of all layouts, that somebody uses. Raises ConfigError or ConnectorError."""
    parsed = _parse(options)
    root = Path(parsed.directory) / f"kvrelay-{os.getuid()}"
    return SlotBrowser(StoreRoot(root, f"{parsed.name}-", parsed.capacity_bytes, _ShmSegment, _GROW_BYTES, True))


def _parse(options: Mapping[str, Any]) -> ShmOptions:
    sized = with_parsed_sizes(options, ("capacity_bytes",), "connector.options")
    parsed: ShmOptions = options_from_mapping(ShmOptions, sized, "connector.options")
    return parsed
