"""Loads and saves: which objects hold a transfer's blocks, room for new ones, and each block's header and checksum."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence

import numpy as np
import xxhash

from connectors.known_blocks import KnownBlocks
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT, StoredObject
from connectors.lmcache.object_store import Bytes, ObjectStore
from connectors.prefix_chains import PrefixChains
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header
from connectors.transfer_workers import TransferWorkers
from core.kv.connector import Transfer, TransferOutcome, TransferResult
from core.kv.pool_memory import KVPoolMemory

_PIECE_BYTES = 512 * 1024
_SIZES = (MAX_BLOCKS_PER_OBJECT, MAX_BLOCKS_PER_OBJECT - 1, MAX_BLOCKS_PER_OBJECT - 2)  # of objects, best first


class BlockTransfers:
    """Moves blocks between the engine's pool and objects. Worker threads.

    chains and known are the connector's, and told of what is found out here.
    """

    def __init__(self, pool: KVPoolMemory, workers: TransferWorkers, chains: PrefixChains, known: KnownBlocks) -> None:
        self._workers, self._chains, self._known = workers, chains, known
        self._layout = pool.layout
        self._pool_bytes = np.frombuffer(pool.buffer, dtype=np.uint8)
        self._fingerprint = pool.layout.fingerprint
        self._save_mutex = threading.Lock()  # one at a time, so that no object is written twice at once
        self.num_evictions = 0

    def load(self, objects: ObjectStore, transfer: Transfer) -> TransferResult:
        """A load's result; whatever LMCache raises is not caught."""
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
            stopped = TransferOutcome.CANCELLED if self._workers.is_closing else stopped
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
            source, checksum = view[start + BLOCK_HEADER_BYTES : start + BLOCK_HEADER_BYTES + len(payload)], xxhash.xxh3_64()
            for first in range(0, len(payload), _PIECE_BYTES):  # read again while the core's cache has it
                piece = payload[first : first + _PIECE_BYTES]
                np.copyto(piece, source[first : first + _PIECE_BYTES])
                checksum.update(piece.data)
            checks[position] = check_block(header, payload.data, self._fingerprint, name, payload_checksum=checksum.intdigest())

    def save(self, objects: ObjectStore, transfer: Transfer) -> TransferResult:
        """A save's result; whatever LMCache raises is not caught."""
        with self._save_mutex:
            return self._save(objects, transfer)

    def _save(self, objects: ObjectStore, transfer: Transfer) -> TransferResult:
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
        outcome = TransferOutcome.CANCELLED if stopped and self._workers.is_closing else stopped or TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, "LMCache has not stored it")

    def _make_room(self, objects: ObjectStore, num_blocks: int, spared: Sequence[bytes]) -> int:
        """Evict what was used longest ago; for how many of the blocks there is room now."""
        capacity = objects.capacity_bytes // objects.unit_bytes
        excess = objects.directory.num_blocks + num_blocks - capacity
        if excess > 0:
            names = objects.directory.pick_oldest(excess, spared)
            self._forget(objects, names)
            self.num_evictions += sum(StoredObject(name).num_blocks for name in names)
        return max(0, min(num_blocks, capacity - objects.directory.num_blocks))

    def _forget(self, objects: ObjectStore, names: Sequence[bytes]) -> None:
        objects.delete(names)
        for name in names:
            self._known.remove(objects.directory.remove(name))

    def _block(self, block_id: int) -> Bytes:
        start = block_id * self._layout.block_stride_bytes
        return self._pool_bytes[start : start + self._layout.block_bytes]


def _group(names: Sequence[bytes], positions: Sequence[int]) -> list[StoredObject]:
    """Runs of adjacent positions as objects, of one size where that is possible without small ones."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] + 1 == position:
            runs[-1].append(position)
        else:
            runs.append([position])
    objects = []
    for run in runs:
        size = next((size for size in _SIZES if len(run) % size == 0), MAX_BLOCKS_PER_OBJECT)
        for start in range(0, len(run), size):
            objects.append(StoredObject(b"".join(names[position] for position in run[start : start + size])))
    return objects
