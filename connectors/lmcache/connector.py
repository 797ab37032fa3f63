"""The `lmcache` connector: LMCache's StorageManager inside this process, over its native file tier.

Objects hold several of our blocks, each with our header, since LMCache verifies nothing; the folder's listing is the index. Every
wait is bounded: what LMCache has not done in time is a miss. Nothing of LMCache is imported before this connector is chosen.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from connectors.byte_sizes import with_parsed_sizes
from connectors.known_blocks import KnownBlocks
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT, StoredObject
from connectors.lmcache.objects import Bytes, LMCacheObjects
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header
from connectors.transfer_workers import TransferWorkers, failed, refuse_bad_ids
from core.clock import Clock
from core.config import options_from_mapping
from core.errors import ConfigError, ConnectorError
from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_KNOWN_BLOCKS = 1_000_000
_REFRESH_PAUSE_S = 0.05  # how old what a lookup believes may get
_CLOSE_TIMEOUT_S = 10.0
_REOPEN_PAUSE_S = 1.0
_PASSING_FAULTS = (errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT)  # of a disk; others are of the configuration


@dataclass(frozen=True, slots=True)
class LMCacheOptions:
    """path: a directory for LMCache's files, a folder per KV layout. capacity_bytes bounds the files of one layout.

    memory_bytes: LMCache's memory, which all data passes. cache_in_memory: what was used last stays there, so that a load of it
    reads no file. op_timeout_s: how long one step of LMCache's may take.
    """

    path: str
    mode: str = "in_process"
    capacity_bytes: int = 8 * 1024**3
    memory_bytes: int = 1024**3
    cache_in_memory: bool = True
    num_threads: int = 2
    op_timeout_s: float = 5.0

    def __post_init__(self) -> None:
        if self.mode != "in_process":
            raise ConfigError("connector.options.mode", self.mode, "in_process")
        if not 1 <= self.num_threads <= 64:
            raise ConfigError("connector.options.num_threads", self.num_threads, "1 to 64")
        if not 0.01 <= self.op_timeout_s <= 60:
            raise ConfigError("connector.options.op_timeout_s", self.op_timeout_s, "0.01 to 60")


class LMCacheConnector(QueuedConnector):
    """Blocks in LMCache. The step thread reads what is known and queues; worker threads do all that can wait."""

    name = "lmcache"

    def __init__(self, options: LMCacheOptions, clock: Clock) -> None:
        self._options, self._clock = options, clock
        self._workers = TransferWorkers(self._execute, self._look_around, self._notify, clock)
        self._known = KnownBlocks(_MAX_KNOWN_BLOCKS)
        self._chains = PrefixChains()
        self._questions: deque[tuple[str, Sequence[bytes], int]] = deque()
        self._looked_at_s = float("-inf")
        self._objects: LMCacheObjects | None = None
        self._open_mutex = threading.Lock()  # of the one above until it is there, and the one below
        self._open_at_s = clock.now_s()
        self._close_mutex = threading.Lock()
        self._save_mutex = threading.Lock()  # one at a time, so that no object is written twice at once
        self._mutex = threading.Lock()  # of the two below
        self._num_errors = self._num_evictions = 0
        self._is_closed = False

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says, from what is known of the folder."""
        if self._is_closed or lookup.block_size != self._layout.block_size:
            return 0
        if self._objects is None:
            self._workers.request_background()
            return 0
        request_id, block_hashes = lookup.request_id, lookup.block_hashes
        self._chains.note_lookup(request_id, block_hashes)
        first = num_computed_tokens // lookup.block_size
        num_blocks = self._known.count_prefix(request_id, block_hashes, first)
        if num_blocks is None or self._known.should_check_again(request_id):
            self._questions.append((request_id, block_hashes, first))
            self._workers.request_background()
        elif self._clock.now_s() - self._looked_at_s > _REFRESH_PAUSE_S:
            self._workers.request_background()
        return None if num_blocks is None else num_blocks * lookup.block_size

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Start LMCache and the threads. Raises ConnectorError where it cannot be started; a disk that fails is tried later."""
        self._pool, self._layout = pool, pool.layout
        self._pool_bytes = np.frombuffer(pool.buffer, dtype=np.uint8)
        self._fingerprint = pool.layout.fingerprint
        try:
            self._objects = self._open_objects(pool.layout)
        except ConfigError:
            raise
        except Exception as error:  # whatever LMCache raises: it promises nothing
            if not isinstance(error, TimeoutError) and getattr(error, "errno", None) not in _PASSING_FAULTS:
                raise ConnectorError(f"LMCache cannot be started on {self._options.path}: {error!r}") from error
            logger.error("LMCache cannot be started on %s and is tried again later: %s", self._options.path, str(error))
            self._num_errors += 1
        self._workers.start_threads(self._options.num_threads, "kv-lmcache")
        self._workers.request_background()

    def _open_objects(self, layout: KVLayout) -> LMCacheObjects:
        options = self._options
        return LMCacheObjects(
            options.path, layout, options.memory_bytes, options.cache_in_memory, options.op_timeout_s, options.num_threads
        )

    def _opened(self) -> LMCacheObjects | None:
        """The objects; opened now, if they could not be at the start. Worker threads."""
        if self._objects is not None or self._is_closed:
            return self._objects
        with self._open_mutex:
            if self._objects is None and self._clock.now_s() >= self._open_at_s:
                try:
                    self._objects = self._open_objects(self._layout)
                except Exception as error:  # whatever LMCache raises: it promises nothing
                    self._open_at_s = self._clock.now_s() + _REOPEN_PAUSE_S
                    logger.warning("LMCache still cannot be started: %s", str(error))
            return self._objects

    def close(self) -> None:
        """As the interface says. LMCache ends on a thread of its own, which is left behind if it hangs."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            self._is_closed = True
            has_stopped = self._workers.close()
            objects, self._objects = self._objects, None
            if objects is not None and has_stopped:
                thread = threading.Thread(target=objects.close, name="kv-lmcache-close", daemon=True)
                thread.start()
                thread.join(_CLOSE_TIMEOUT_S)

    def stats(self) -> ConnectorStats:
        """Of the folder, as last seen; headers are counted."""
        num_open, objects = self._workers.num_in_flight, self._objects
        if objects is None:
            return ConnectorStats(num_errors=self._num_errors, num_open_references=num_open, num_evictions=self._num_evictions)
        return ConnectorStats(
            store_bytes=objects.directory.num_blocks * objects.unit_bytes,
            store_blocks=objects.directory.num_blocks,
            capacity_bytes=self._options.capacity_bytes,
            num_evictions=self._num_evictions,
            num_errors=self._num_errors,
            num_open_references=num_open,
        )

    # -- worker threads ------------------------------------------------------------------------------------------------
    def _look_around(self) -> bool:
        """Bring what is known up to date, then answer questions that were asked before."""
        objects = self._opened()
        if objects is None:
            return False
        questions = [self._questions.popleft() for _ in range(len(self._questions))]
        self._learn(objects)
        self._looked_at_s = self._clock.now_s()
        for request_id, block_hashes, first in questions:
            chain = itertools.islice(block_hashes, first, None)
            present = list(itertools.takewhile(objects.directory.find, chain))
            end = first + len(present)
            absent = block_hashes[end] if end < len(block_hashes) else None
            self._known.add(present, self._known.epoch)
            self._known.note_check(request_id, absent, self._known.epoch)
        if questions:
            self._notify()
        objects.let_go_of_late_reads()
        return bool(self._questions)

    def _learn(self, objects: LMCacheObjects) -> None:
        was_present = objects.directory.is_present
        came, went = objects.directory.refresh()
        if went:
            self._known.begin_epoch()
            self._known.remove(went)
        self._known.add(came, self._known.epoch)
        if was_present and not objects.directory.is_present:
            with self._mutex:
                self._num_errors += 1
            logger.warning("the folder of the lmcache store is gone; it is made anew")

    def _execute(self, transfer: Transfer) -> TransferResult:
        objects = self._opened()
        refused = refuse_bad_ids(transfer, self._pool.num_blocks)
        if refused is not None:
            result = refused
        elif objects is None:
            outcome = TransferOutcome.CANCELLED if self._is_closed else TransferOutcome.ERROR
            result = failed(transfer, outcome, "the connector is closed, or could not be opened yet")
        else:
            try:
                self._learn(objects)
                if transfer.direction is TransferDirection.LOAD:
                    result = self._load(objects, transfer)
                else:
                    with self._save_mutex:
                        result = self._save(objects, transfer)
            except Exception as error:  # whatever LMCache raises: it promises nothing
                result = failed(transfer, TransferOutcome.ERROR, repr(error))
        if result.outcome not in (TransferOutcome.OK, TransferOutcome.MISS, TransferOutcome.CANCELLED):
            with self._mutex:
                self._num_errors += 1
            logger.warning("%s of %s: %s", transfer.direction.value, transfer.request_id, result.detail)
        return result

    def _load(self, objects: LMCacheObjects, transfer: Transfer) -> TransferResult:
        names = transfer.block_hashes
        found: list[StoredObject] = []
        for name in names:
            if (holder := objects.directory.find(name)) is None:
                break
            found.append(holder)
        positions_by_object: dict[StoredObject, list[int]] = {}
        for position, stored in enumerate(found):
            positions_by_object.setdefault(stored, []).append(position)
        checks: dict[int, BlockCheck] = {}
        read: set[StoredObject] = set()
        tried: set[StoredObject] = set()
        stopped: TransferOutcome | None = None

        def take(stored: StoredObject, view: Bytes | None) -> None:
            self._take_blocks(stored, view, positions_by_object[stored], transfer, checks)

        with contextlib.closing(objects.read_steps(list(positions_by_object))) as steps:
            for started in steps:
                if stopped := self._workers.should_stop(transfer):
                    with objects.reading(started, lambda: True):
                        break
                with objects.reading(started, lambda: self._workers.should_stop(transfer) is not None) as views:
                    if views is None:
                        stopped = TransferOutcome.TIMEOUT
                        break
                    tried.update(started.batch)
                    read.update(views)
                    self._workers.run_jobs([functools.partial(take, stored, views.get(stored)) for stored in started.batch])
        num_ok = next((index for index in range(len(names)) if checks.get(index) is not BlockCheck.OK), len(names))
        unread = {stored for stored in positions_by_object if stored not in read}
        damaged = {found[position] for position, check in checks.items() if check is not BlockCheck.OK} - unread
        # LMCache does not say why it has not read an object: it may be gone, or cut, or there was no memory for the moment.
        damaged |= {stored for stored in unread if stored in tried and not objects.is_whole(stored)}
        is_corrupt = any(stored in damaged - unread for stored in found[num_ok : num_ok + 1])
        if damaged:  # would block their keys for good
            self._forget(objects, [stored.name for stored in damaged])
        objects.directory.touch([*self._chains.note_transfer(transfer.request_id, names[:num_ok]), *names[:num_ok]])
        moved_bytes = num_ok * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        if stopped is not None and not is_corrupt:
            stopped = TransferOutcome.CANCELLED if self._is_closed else stopped
            return TransferResult(transfer.transfer_id, num_ok, stopped, moved_bytes, "given up before the end")
        outcome = TransferOutcome.CORRUPT if is_corrupt else TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, f"block {names[num_ok].hex()} is not there")

    def _take_blocks(
        self,
        stored: StoredObject,
        view: Bytes | None,
        positions: Sequence[int],
        transfer: Transfer,
        checks: dict[int, BlockCheck],
    ) -> None:
        """Copy out of an object, then verify the copy."""
        hashes = stored.block_hashes
        for position in positions:
            name = transfer.block_hashes[position]
            if view is None:
                checks[position] = BlockCheck.MISS
                continue
            start = hashes.index(name) * (BLOCK_HEADER_BYTES + self._layout.block_bytes)
            payload = self._block(transfer.block_ids[position])
            header = view[start : start + BLOCK_HEADER_BYTES].tobytes()
            np.copyto(payload, view[start + BLOCK_HEADER_BYTES : start + BLOCK_HEADER_BYTES + len(payload)])
            checks[position] = check_block(header, payload.data, self._fingerprint, name)

    def _save(self, objects: LMCacheObjects, transfer: Transfer) -> TransferResult:
        names, directory = transfer.block_hashes, objects.directory
        ancestors = self._chains.note_transfer(transfer.request_id, names)
        directory.touch([*ancestors, *names])
        new = [position for position, name in enumerate(names) if directory.find(name) is None and name not in names[:position]]
        room = self._make_room(objects, len(new), [*ancestors, *names])
        num_moved, stopped = 0, None
        for batch in objects.batches(_group(names, new[:room])):
            if stopped := self._workers.should_stop(transfer):
                break

            def fill_one(stored: StoredObject, view: Bytes) -> None:
                for number, name in enumerate(stored.block_hashes):
                    payload = self._block(transfer.block_ids[names.index(name)])
                    start = number * (BLOCK_HEADER_BYTES + len(payload))
                    header = pack_block_header(self._fingerprint, name, payload.data)
                    view[start : start + BLOCK_HEADER_BYTES] = np.frombuffer(header, dtype=np.uint8)
                    np.copyto(view[start + BLOCK_HEADER_BYTES : start + BLOCK_HEADER_BYTES + len(payload)], payload)

            def fill(several: Sequence[tuple[StoredObject, Bytes]]) -> None:
                self._workers.run_jobs([functools.partial(fill_one, *each) for each in several])

            written = objects.write(batch, fill, lambda: self._workers.should_stop(transfer) is not None)
            directory.add(stored.name for stored in written)
            num_moved += sum(stored.num_blocks for stored in written)
            if len(written) < len(batch):
                stopped = self._workers.should_stop(transfer) or TransferOutcome.ERROR
                break
        directory.touch([*ancestors, *names])
        present = [directory.find(name) is not None for name in names]
        self._known.add([name for name, is_there in zip(names, present, strict=True) if is_there], self._known.epoch)
        num_ok = (*present, False).index(False)
        moved_bytes = num_moved * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        outcome = TransferOutcome.CANCELLED if stopped and self._is_closed else stopped or TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, "LMCache has not stored it")

    def _make_room(self, objects: LMCacheObjects, num_blocks: int, spared: Sequence[bytes]) -> int:
        """Evict what was used longest ago; for how many of the blocks there is room now."""
        capacity = self._options.capacity_bytes // objects.unit_bytes
        excess = objects.directory.num_blocks + num_blocks - capacity
        if excess > 0:
            names = objects.directory.pick_oldest(excess, spared)
            self._forget(objects, names)
            with self._mutex:
                self._num_evictions += sum(StoredObject(name).num_blocks for name in names)
        return max(0, min(num_blocks, capacity - objects.directory.num_blocks))

    def _forget(self, objects: LMCacheObjects, names: Sequence[bytes]) -> None:
        objects.delete(names)
        for name in names:
            self._known.remove(objects.directory.remove(name))

    def _block(self, block_id: int) -> Bytes:
        start = block_id * self._layout.block_stride_bytes
        return self._pool_bytes[start : start + self._layout.block_bytes]


def _group(names: Sequence[bytes], positions: Sequence[int]) -> list[StoredObject]:
    """Runs of adjacent positions as objects."""
    groups: list[list[int]] = []
    for position in positions:
        if groups and len(groups[-1]) < MAX_BLOCKS_PER_OBJECT and groups[-1][-1] + 1 == position:
            groups[-1].append(position)
        else:
            groups.append([position])
    return [StoredObject(b"".join(names[position] for position in group)) for group in groups]


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see LMCacheOptions. Raises ConfigError."""
    if not options.get("path"):
        raise ConfigError("connector.options.path", options.get("path"), "a directory for the blocks")
    sized = with_parsed_sizes(options, ("capacity_bytes", "memory_bytes"), "connector.options")
    return LMCacheConnector(options_from_mapping(LMCacheOptions, sized, "connector.options"), clock)
