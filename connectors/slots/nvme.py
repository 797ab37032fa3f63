"""The `nvme` connector: cold KV in a directory, shared by any number of processes, kept over restarts.

Blocks live in the recycled slots of one preallocated segment file per KV layout: a file per block costs several times the CPU
and half the bandwidth (measured). A block that a power failure tears fails its checksum and is a miss, so that nothing needs to
be synced for the sake of correctness.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.byte_sizes import check_capacity, with_parsed_sizes
from connectors.coding.block_coding import SLOT_CODECS, CodingOptions
from connectors.file_lock import has_live_lease, locked_directory
from connectors.slots.browser import SlotBrowser
from connectors.slots.connector import SlotConnector
from connectors.slots.eviction_policy import check_eviction_policy
from connectors.slots.index_file import FORMAT_VERSION
from connectors.slots.store import HEADER_PAGE_BYTES, PIECE_BYTES, SlotLayout, SlotMedium, SlotStore, slot_bytes
from connectors.slots.store_directory import Segment, StoreDirectory, StoreRoot
from connectors.store_browser import StoreBrowser
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.clock import Clock
from core.config import options_from_mapping
from core.errors import ConfigError, ConnectorError
from core.kv.connector import KVConnector
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_GROW_BYTES = 256 * 1024 * 1024  # allocated at a time; instant where the file system has extents
_MAX_FREED_AHEAD = 256  # blocks; makes I/Os of a full store two to three times as large (simulated)
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@dataclass(frozen=True, slots=True)
class NvmeOptions:
    """path: a directory, created where missing. num_threads move bytes at the same time.

    capacity_bytes (a size like 100GiB is fine) bounds the files of one KV layout, index included. A process that finds the store
    unused resizes it to its own capacity, others take what they find. eviction: lru, arc (scans do not push out what is used
    again) or prefix (never a block that a stored one follows); processes should agree on it.

    zero_fill: write all of the store once while idle, because a file's first write to a place is slower than the next.
    sync_interval_s: so often the store is synced, which bounds what a power failure takes; 0 leaves it to the kernel.

    codec: none, or int8 or fp8, which are lossy: they nearly halve slots, and of 24 greedy answers of 32 tokens they changed 7
    and 12 (bench/RESULTS.md).
    encryption_key_file: made by `kvrelay keys store FILE`; blocks at rest are encrypted with AES-256-GCM.
    """

    path: str
    capacity_bytes: int = 8 * 1024**3
    num_threads: int = 4
    zero_fill: bool = True
    sync_interval_s: float = 0.0
    eviction: str = "lru"
    codec: str = "none"
    encryption_key_file: str = ""

    def __post_init__(self) -> None:
        if not self.path:
            raise ConfigError("connector.options.path", self.path, "a directory")
        if not 1 <= self.num_threads <= 64:
            raise ConfigError("connector.options.num_threads", self.num_threads, "1 to 64")
        if self.sync_interval_s != 0 and not 0.05 <= self.sync_interval_s <= 3600:
            raise ConfigError("connector.options.sync_interval_s", self.sync_interval_s, "0 (never), or 0.05 to 3600")
        check_eviction_policy(self.eviction)
        check_capacity(self.capacity_bytes)


class NvmeConnector(SlotConnector):
    """Opens the store at <path>/v<format>-<layout>, so that processes of two versions do not take each other's store away."""

    name = "nvme"
    _starts_without_store = True

    def __init__(self, options: NvmeOptions, clock: Clock) -> None:
        super().__init__(clock, options.num_threads, _coding_of(options))
        self._options = options
        self._is_stopping = threading.Event()
        self._syncer = threading.Thread(target=self._sync_for_ever, name=f"kv-{self.name}-sync", daemon=True)

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """As the base says."""
        super().register_kv_cache(pool)
        if self._options.sync_interval_s:
            self._syncer.start()

    def close(self) -> None:
        """As the base says; a sync under way gets a second to end."""
        self._is_stopping.set()
        if self._syncer.is_alive():
            self._syncer.join(1.0)
        super().close()

    def _open_store(self, layout: SlotLayout) -> SlotStore:
        name = _prefix() + layout.fingerprint.hex()
        place = StoreDirectory(Path(self._options.path), name, layout)
        try:
            with locked_directory(place.root):
                _remove_other_versions(place.path, layout.fingerprint)
                store = place.open(self._options.capacity_bytes, _NvmeSegment, _GROW_BYTES, self._options.eviction)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            try:
                store = place.open_read_only(_NvmeSegment)
            except (OSError, ConnectorError):
                raise error from None  # there is nothing to read
            logger.warning("the store in %s is on a read-only disk: nothing is saved until it can be written", place.path)
            return store
        if isinstance(store.medium, _NvmeSegment) and store.medium.max_run_slots > 1:
            store.index.room.num_freed_ahead = min(_MAX_FREED_AHEAD, store.index.file.num_slots // 32)
        return store

    def _work_ahead(self) -> bool:
        return super()._work_ahead() or (self._options.zero_fill and self._zero_unused())

    def _zero_unused(self) -> bool:
        """One I/O of zeros to slots that were never written; True while there may be more of them. Their reservation keeps savers
        of all processes away."""
        try:
            with self._held.using() as store:
                if store is None or not isinstance(store.medium, _NvmeSegment) or not store.medium.is_direct:
                    return False  # writing ahead would only fill the page cache
                slots = store.index.reserve_unused(store.medium.max_run_slots)
                if slots:
                    try:
                        store.medium.zero(slots)
                    finally:
                        store.index.release(slots)
                return bool(slots)
        except (OSError, ConnectorError) as error:  # this is only to be faster later
            logger.info("the %s store is not written ahead: %s", self.name, str(error))
            return False

    def _sync_for_ever(self) -> None:
        told = ""
        while not self._is_stopping.wait(self._options.sync_interval_s):
            try:
                with self._held.using() as store:
                    if store is not None and isinstance(store.medium, _NvmeSegment) and not store.is_read_only:
                        store.medium.sync()
                        store.index.file.sync()
                        told = ""
            except OSError as error:
                if str(error) != told:  # once, not at each attempt
                    told = str(error)
                    logger.warning("the %s store cannot be synced: %s", self.name, told)


class _NvmeSegment(SlotMedium):
    """The segment file, read and written by runs of adjacent slots; past the page cache where the file system allows it."""

    needs_neighbours = True

    def __init__(self, segment: Segment) -> None:
        self._path = segment.path
        self._slot_bytes = slot_bytes(segment.layout)
        self.max_run_slots = max(1, PIECE_BYTES // self._slot_bytes)  # of one I/O
        is_read_only = segment.index_file.is_read_only
        self._buffered = os.open(segment.path, os.O_RDONLY if is_read_only else os.O_RDWR | os.O_CREAT, 0o600)
        self._direct = _open_direct(segment.path, os.O_RDONLY if is_read_only else os.O_RDWR)
        self._thread_pages = threading.local()
        self._zeros = memoryview(mmap.mmap(-1, self._slot_bytes))
        if segment.is_alone:  # the only moment at which nobody counts on the segment's length
            max_bytes = segment.index_file.num_slots * self._slot_bytes
            num_bytes = min(os.fstat(self._buffered).st_size, max_bytes)
            os.ftruncate(self._buffered, num_bytes)
            segment.index_file.num_ready_slots = min(segment.index_file.num_ready_slots, num_bytes // self._slot_bytes)

    @property
    def is_direct(self) -> bool:
        """Whether I/O bypasses the page cache, as far as the file system has told."""
        return self._direct >= 0

    def zero(self, slots: Sequence[int]) -> None:
        """Write zeros to neighbouring slots. Raises OSError."""
        self._move(os.pwritev, [self._zeros] * len(slots), slots[0] * self._slot_bytes)

    def sync(self) -> None:
        """Wait until all that was written is on the disk. Raises OSError."""
        os.fdatasync(self._buffered)

    def read(self, slots: Sequence[int], blocks: Sequence[memoryview]) -> list[bytes]:
        pages = self._header_pages(len(slots))
        first, end = slots[0], slots[-1] + 1
        num_read = 0  # slots
        while first + num_read < end:
            buffers = [buffer for pair in zip(pages[num_read:], blocks[num_read:], strict=True) for buffer in pair]
            num_bytes = self._move(os.preadv, buffers, (first + num_read) * self._slot_bytes)
            if num_bytes < self._slot_bytes:  # the file ends here
                break
            num_read += num_bytes // self._slot_bytes
        return [bytes(page[:BLOCK_HEADER_BYTES]) for page in pages[:num_read]]

    def write(self, slots: Sequence[int], headers: Iterable[bytes], blocks: Sequence[memoryview]) -> None:
        pages = self._header_pages(len(slots))
        for page, header in zip(pages, headers, strict=True):
            page[:BLOCK_HEADER_BYTES] = header
        num_written = 0  # slots
        while num_written < len(slots):
            buffers = [buffer for pair in zip(pages[num_written:], blocks[num_written:], strict=True) for buffer in pair]
            num_bytes = self._move(os.pwritev, buffers, (slots[0] + num_written) * self._slot_bytes)
            if num_bytes < self._slot_bytes:
                raise OSError(errno.ENOSPC, f"only {num_bytes} bytes of a slot could be written", str(self._path))
            num_written += num_bytes // self._slot_bytes

    def grow(self, first_slot: int, end_slot: int) -> None:
        os.posix_fallocate(self._buffered, first_slot * self._slot_bytes, (end_slot - first_slot) * self._slot_bytes)

    def is_intact(self) -> bool:
        """Whether the file still is what its name says: neither removed, nor of a disk that was taken away and mounted anew. A
        shorter one is fine: what is missing is a miss, and grows again when written."""
        try:
            return os.path.samestat(os.fstat(self._buffered), self._path.stat())
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._buffered)
        if self._direct >= 0:
            os.close(self._direct)

    def _move(self, call: Callable[[int, list[memoryview], int], int], buffers: list[memoryview], offset: int) -> int:
        if self._direct >= 0:
            try:
                return call(self._direct, buffers, offset)
            except OSError as error:
                if error.errno != errno.EINVAL:  # EINVAL: a file system that lets one open directly, but not read or write
                    raise
        return call(self._buffered, buffers, offset)

    def _header_pages(self, num_pages: int) -> list[memoryview]:
        """This thread's page-aligned header pages; what follows the header in a page is zero or was read from a slot."""
        pages: list[memoryview] = getattr(self._thread_pages, "pages", [])
        if len(pages) < num_pages:
            memory = memoryview(mmap.mmap(-1, num_pages * HEADER_PAGE_BYTES))
            pages = [memory[start : start + HEADER_PAGE_BYTES] for start in range(0, len(memory), HEADER_PAGE_BYTES)]
            self._thread_pages.pages = pages
        return pages[:num_pages]


def _prefix() -> str:
    """What the names of this version's stores begin with; the layout's fingerprint follows."""
    return f"v{FORMAT_VERSION}-"


def _remove_other_versions(store: Path, fingerprint: bytes) -> None:
    """Delete stores of this layout that other versions of the program left and nobody uses. The caller holds the root's lock."""
    for other in store.parent.glob(f"*{fingerprint.hex()}"):
        if other != store and other.is_dir() and not has_live_lease(other):
            logger.info("removed %s: a store of another version, which nobody uses", other)
            shutil.rmtree(other, ignore_errors=True)


def _open_direct(path: Path, access: int) -> int:
    """A descriptor that bypasses the page cache, or -1 where the file system has no such thing."""
    try:
        return os.open(path, access | _O_DIRECT) if _O_DIRECT else -1
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        logger.info("%s has no O_DIRECT: its blocks go through the page cache", path)
        return -1


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see NvmeOptions. Raises ConfigError."""
    return NvmeConnector(_parse(options), clock)


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """All layouts in the directory. Raises ConfigError or ConnectorError."""
    parsed = _parse(options)
    cipher = CodingOptions(encryption_key_file=parsed.encryption_key_file).load_cipher()
    browser = SlotBrowser(StoreRoot(Path(parsed.path), _prefix(), parsed.capacity_bytes, _NvmeSegment, _GROW_BYTES))
    browser.cipher = cipher
    return browser


def _coding_of(options: NvmeOptions) -> CodingOptions:
    return CodingOptions(options.codec, encryption_key_file=options.encryption_key_file).check(SLOT_CODECS)


def _parse(options: Mapping[str, Any]) -> NvmeOptions:
    if not options.get("path"):
        raise ConfigError("connector.options.path", options.get("path", ""), "a directory for the blocks")
    sized = with_parsed_sizes(options, ("capacity_bytes",), "connector.options")
    parsed: NvmeOptions = options_from_mapping(NvmeOptions, sized, "connector.options")
    return parsed
