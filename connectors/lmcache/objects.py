"""Objects in LMCache: its StorageManager in this process, with its native file tier under it."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from connectors.lmcache.library import FSNativeL2AdapterConfig, L2AdaptersConfig, api, config, internal_api, storage_manager
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT, ObjectDirectory, StoredObject
from connectors.lmcache.object_files import MODEL_NAME, file_name, open_scratch, parse_file_name
from connectors.lmcache.object_store import Bytes, ObjectStore, Reading
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConfigError
from core.kv.layout import PAGE_BYTES, KVLayout

logger = logging.getLogger(__name__)

_WAIT_S = 0.02  # between looks at whether to stop
_UNLOCK_TIMEOUT_S = 0.5  # for LMCache to let go of what it has just written to a file
_OBJECTS_PER_WRITE_STEP = 4  # filled at a time
_BYTES_PER_READ_STEP = (
    32 * 1024 * 1024
)  # each request costs LMCache a millisecond of CPU, and each size of objects is one of its own


class LMCacheObjects(ObjectStore):
    """The objects of one KV layout, in <path>/<layout>.

    LMCache's memory is ours to fill and to empty: its own eviction looks only now and then, and writing would fail meanwhile.
    """

    def __init__(
        self,
        path: str,
        layout: KVLayout,
        capacity_bytes: int,
        memory_bytes: int,
        caches_in_memory: bool,
        op_timeout_s: float,
        num_threads: int,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.unit_bytes = BLOCK_HEADER_BYTES + layout.block_bytes
        self._object_bytes = -(-self.unit_bytes * MAX_BLOCKS_PER_OBJECT // PAGE_BYTES) * PAGE_BYTES
        num_shares = 2 * num_threads + 2  # each thread's batch, with as much left over as the cache keeps
        self._max_batch = memory_bytes // num_shares // self._object_bytes
        self._read_step_bytes = min(_BYTES_PER_READ_STEP, memory_bytes // num_shares // 2)
        if not self._max_batch:
            allowed = f"{num_shares * self._object_bytes} or more, for blocks of {layout.block_bytes} bytes"
            raise ConfigError("connector.options.memory_bytes", memory_bytes, allowed)
        self._max_cached_bytes = memory_bytes // 2 if caches_in_memory else 0
        self._op_timeout_s = op_timeout_s
        self._folder = Path(path).absolute() / layout.fingerprint.hex()
        self._scratch, self._lease = open_scratch(self._folder)
        self.directory = ObjectDirectory(self._folder, file_name, parse_file_name)
        self._layouts = [
            api.MemoryLayoutDesc([api.torch.Size([number * self.unit_bytes])], [api.torch.uint8])
            for number in range(MAX_BLOCKS_PER_OBJECT + 1)
        ]
        self._mutex = threading.Lock()
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # bytes by name of what is in LMCache's memory and in nobody's use
        self._undropped: set[bytes] = set()  # which LMCache still held when they were to go
        self._late_reads: list[tuple[Any, list[Any]]] = []
        self._stored = _StoredListener()
        memory = config.L1MemoryManagerConfig(size_in_bytes=memory_bytes, use_lazy=False, shm_name="")
        files = FSNativeL2AdapterConfig(str(self._folder), relative_tmp_dir=self._scratch.name)
        files.eviction_config = None
        self._manager = storage_manager.StorageManager(
            config.StorageManagerConfig(
                l1_manager_config=config.L1ManagerConfig(memory_config=memory),
                eviction_config=config.EvictionConfig(eviction_policy="noop"),
                l2_adapter_config=L2AdaptersConfig([files]),
            )
        )
        self._manager.register_l2_listener(self._stored)

    def refresh(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """As the interface says."""
        was_present = self.directory.is_present
        changes = self.directory.refresh()
        if was_present and not self.directory.is_present:
            self.num_faults += 1
            logger.warning("the folder %s is gone; it is made anew", self._folder)
        return changes

    def batches(self, objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
        """Parts that LMCache's memory has room for."""
        for start in range(0, len(objects), self._max_batch):
            yield objects[start : start + self._max_batch]

    def read_steps(self, objects: Sequence[StoredObject]) -> Generator[Reading, None, None]:
        """Begin to read all of these in small parts, one part ahead of what is taken; see reading(), which ends each."""
        ahead: Reading | None = None
        try:
            for step in self._read_batches(objects):
                current, ahead = ahead, self._start_reading(step)
                if current is not None:
                    yield current
            current, ahead = ahead, None
            if current is not None:
                yield current
        finally:
            if ahead is not None:
                with self._mutex:
                    self._late_reads += ahead.handles

    def _read_batches(self, objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
        batch: list[StoredObject] = []
        for stored in objects:
            if batch and sum(map(self._memory_of, batch)) + self._memory_of(stored) > self._read_step_bytes:
                yield batch
                batch = []
            batch.append(stored)
        if batch:
            yield batch

    def _start_reading(self, batch: Sequence[StoredObject]) -> Reading:
        with self._mutex:
            for stored in batch:
                self._cached.pop(stored.name, None)
        self._make_memory(sum(map(self._memory_of, batch)))
        handles = []
        for number in sorted({stored.num_blocks for stored in batch}):
            keys = [_key(stored.name) for stored in batch if stored.num_blocks == number]
            rows = [api.GroupedObjectKeys(keys, 0, self._layouts[number])]
            handles.append((self._manager.submit_prefetch_task(api.PrefetchTaskSpec(rows, fetching_policy="full")), keys))
        return Reading(batch, handles)

    def write(
        self,
        batch: Sequence[StoredObject],
        fill: Callable[[Sequence[tuple[StoredObject, Bytes]]], None],
        should_stop: Callable[[], bool],
    ) -> list[StoredObject]:
        """Write objects, which fill([(object, its bytes), ...]) provides; those that have arrived in the folder."""
        self._scratch.mkdir(parents=True, exist_ok=True)
        keys = {_key(stored.name): stored for stored in batch}
        self._drop_from_memory(
            [stored.name for stored in batch], _UNLOCK_TIMEOUT_S
        )  # LMCache stores nothing that it has in memory already
        self._make_memory(sum(map(self._memory_of, batch)))
        reserved: dict[Any, Any] = {}
        for number in sorted({stored.num_blocks for stored in batch}):
            wanted = [key for key, stored in keys.items() if stored.num_blocks == number]
            reserved.update(self._manager.reserve_write(wanted, self._layouts[number]))
        names = {key.chunk_hash for key in reserved}
        self._stored.expect(names)
        waiting = list(reserved)
        for start in range(0, len(waiting), _OBJECTS_PER_WRITE_STEP):  # LMCache writes these while the next are filled
            step = waiting[start : start + _OBJECTS_PER_WRITE_STEP]
            fill([(keys[key], _bytes_of(reserved[key])) for key in step])
            self._manager.finish_write(step)
        deadline_s = time.monotonic() + self._op_timeout_s
        while not (arrived := self._stored.wait(names, deadline_s, should_stop)) >= names:
            # LMCache says nothing of a failed write, nor of the good ones of the same call; or another process was faster.
            arrived |= {name for name in names - arrived if self.is_whole(StoredObject(name))}
            if arrived >= names or should_stop() or time.monotonic() >= deadline_s:
                break
        self._stored.forget(names)
        self._keep([keys[key] for key in reserved], _UNLOCK_TIMEOUT_S)
        return [stored for stored in batch if stored.name in arrived]

    @contextlib.contextmanager
    def reading(self, started: Reading, should_stop: Callable[[], bool]) -> Iterator[dict[StoredObject, Bytes] | None]:
        """The bytes of the objects that could be read, valid within the context. None: not in time."""
        handles = started.handles
        deadline_s = time.monotonic() + self._op_timeout_s
        locked: list[Any] = []
        for position, (handle, keys) in enumerate(handles):
            while not self._manager.wait_prefetch_status(handle, _WAIT_S):
                if should_stop() or time.monotonic() >= deadline_s:
                    with self._mutex:
                        self._late_reads += handles[position:]
                    self._manager.finish_read_prefetched(locked)
                    yield None
                    return
            locked += self._take_hits(handle, keys)
        objects = {stored.name: stored for stored in started.batch}
        try:
            good_keys, memories = self._manager.unsafe_read(locked)
            views = {objects[key.chunk_hash]: _bytes_of(memory) for key, memory in zip(good_keys, memories, strict=True)}
            yield views
            views.clear()
        finally:
            self._manager.finish_read_prefetched(locked)
            self._keep([objects[key.chunk_hash] for key in locked])

    def is_whole(self, stored: StoredObject) -> bool:
        """Whether its file is there, and as long as it should be."""
        try:
            return (self._folder / file_name(stored.name)).stat().st_size == stored.num_blocks * self.unit_bytes
        except OSError:
            return False

    def tidy(self) -> None:
        """Reads that were given up hold memory until they have ended."""
        with self._mutex:
            late, self._late_reads = self._late_reads, []
        for handle, keys in late:
            if self._manager.wait_prefetch_status(handle, 0.0):
                self._manager.finish_read_prefetched(self._take_hits(handle, keys))
            else:
                with self._mutex:
                    self._late_reads.append((handle, keys))

    def _take_hits(self, handle: Any, keys: Sequence[Any]) -> list[Any]:
        result = self._manager.query_prefetch_status(handle)
        return [] if result is None else [key for index, key in enumerate(keys) if result.hit_cells[0].test(index)]

    def delete(self, names: Sequence[bytes]) -> None:
        """Remove objects from memory and folder."""
        self._drop_from_memory(names)
        for name in names:  # not by LMCache, which waits for half a minute if it has to
            with contextlib.suppress(FileNotFoundError):
                (self._folder / file_name(name)).unlink()

    def close(self) -> None:
        """May hang, if LMCache does."""
        self._manager.close()
        self._lease.release()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def _memory_of(self, stored: StoredObject) -> int:
        return -(-stored.num_blocks * self.unit_bytes // PAGE_BYTES) * PAGE_BYTES

    def _keep(self, objects: Sequence[StoredObject], unlock_timeout_s: float = 0.0) -> None:
        """These are in LMCache's memory, and used last."""
        with self._mutex:
            for stored in objects:
                self._cached[stored.name] = self._memory_of(stored)
                self._cached.move_to_end(stored.name)
        self._make_memory(0, unlock_timeout_s)

    def _make_memory(self, num_bytes: int, unlock_timeout_s: float = 0.0) -> None:
        """Drop what was used longest ago, until that much more fits beside it."""
        dropped = []
        with self._mutex:
            cached_bytes = sum(self._cached.values())
            while self._cached and cached_bytes > max(0, self._max_cached_bytes - num_bytes):
                name, size = self._cached.popitem(last=False)
                cached_bytes -= size
                dropped.append(name)
        self._drop_from_memory(dropped, unlock_timeout_s)

    def _drop_from_memory(self, names: Sequence[bytes], unlock_timeout_s: float = 0.0) -> None:
        """What LMCache or another thread still reads goes later: after that long, or with a later call."""
        with self._mutex:
            for name in names:
                self._cached.pop(name, None)
            self._undropped.update(names)
            names = list(self._undropped)
            self._undropped.clear()
        deadline_s = time.monotonic() + unlock_timeout_s
        while names:
            _num_deleted, num_locked = self._manager.delete_l1_keys([_key(name) for name in names])
            if not num_locked:
                return
            if time.monotonic() >= deadline_s:
                with self._mutex:
                    self._undropped.update(names)
                return
            time.sleep(0.0005)


class _StoredListener(internal_api.L2AdapterListener):  # type: ignore[misc]
    """Which of the objects that somebody waits for have arrived in the file tier."""

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._expected: set[bytes] = set()
        self._arrived: set[bytes] = set()

    def expect(self, names: set[bytes]) -> None:
        """Before they are written."""
        with self._news:
            self._expected |= names

    def wait(self, names: set[bytes], deadline_s: float, should_stop: Callable[[], bool]) -> set[bytes]:
        """Those that have arrived; all, or as many as after a short wait."""
        with self._news:
            if not names <= self._arrived and time.monotonic() < deadline_s and not should_stop():
                self._news.wait_for(lambda: names <= self._arrived, _WAIT_S)
            return names & self._arrived

    def forget(self, names: set[bytes]) -> None:
        """Nobody waits for these any longer."""
        with self._news:
            self._expected -= names
            self._arrived -= names

    def on_l2_keys_stored(self, keys: list[Any], sizes: list[int]) -> None:
        """LMCache's call."""
        with self._news:
            self._arrived |= self._expected & {key.chunk_hash for key in keys}
            self._news.notify_all()

    def on_l2_keys_accessed(self, keys: list[Any]) -> None:
        """LMCache's call."""

    def on_l2_keys_deleted(self, keys: list[Any]) -> None:
        """LMCache's call."""


def _key(name: bytes) -> Any:
    return api.ObjectKey(name, MODEL_NAME, 0)


def _bytes_of(memory: Any) -> Bytes:
    return np.frombuffer(memory.byte_array.cast("B"), dtype=np.uint8)
