"""Looks into stores of equal slots, one per layout, as one more process that shares them: the same index, the same locks.

How stores are found and opened is handed in (SlotPlaces), so that files and memory differ in that alone.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np

from connectors.slots.eviction_policy import PINNED, TICK_MASK
from connectors.slots.index_file import (
    CHECKSUM,
    HASH_HIGH,
    HASH_LOW,
    LAST_USE,
    SEQUENCE,
    STATE_AND_OWNER,
    SlotState,
    record_checksums,
)
from connectors.slots.index_mirror import sequences_of
from connectors.slots.store import HEADER_PAGE_BYTES, SlotLayout, SlotStore, StoredLayout
from connectors.slots.use_times import UseTimes
from connectors.store_browser import (
    MAX_BATCH_BLOCKS,
    BlockEntry,
    RawBlock,
    StoreBrowser,
    WriteOutcome,
    cut_to_payload,
    in_batches,
)
from connectors.stored_block import read_block_header
from core.errors import ConnectorError

_RECORDS_AT_A_TIME = 16384


class SlotPlaces(Protocol):
    """Where the stores of one set of connector options are."""

    @property
    def capacity_bytes(self) -> int:
        """Of one store that is made anew."""

    def layouts(self) -> tuple[list[StoredLayout], list[str]]:
        """The stores that are there, and in words those that cannot be opened. Raises FileNotFoundError where none can be."""

    def open(self, layout: SlotLayout, *, create: bool) -> SlotStore:
        """Join a store that is there, or with `create` also make it. Raises OSError, ConnectorError or ConfigError."""


class SlotBrowser(StoreBrowser):
    """All stores of a SlotPlaces. Each is joined when it is first needed, and stays open until close()."""

    why_no_pins = ""

    def __init__(self, places: SlotPlaces, *, ends_with_its_users: bool = False) -> None:
        """Raises ConnectorError."""
        super().__init__()
        self._places = places
        self.ends_with_its_users = ends_with_its_users
        self._store_by_layout: dict[bytes, SlotStore] = {}
        self._layout_by_fingerprint: dict[bytes, StoredLayout] = {}
        with _translated():
            try:
                layouts, self.problems = places.layouts()
            except FileNotFoundError as error:
                layouts, self.missing = [], [str(error)]
        for layout in layouts:
            try:
                self._store_by_layout[layout.fingerprint] = places.open(layout, create=False)
                self._layout_by_fingerprint[layout.fingerprint] = layout
            except (OSError, ConnectorError) as error:
                self.problems.append(str(error))
        if any(store.is_read_only for store in self._store_by_layout.values()):
            self.why_read_only = self.why_no_pins = "its folder cannot be written"

    @property
    def capacity_bytes(self) -> int:
        """Of all layouts together."""
        stores = self._store_by_layout.items()
        return sum(store.index.file.num_slots * self._slot_bytes(fingerprint) for fingerprint, store in stores)

    def entries(self) -> Iterator[BlockEntry]:
        """Reads the records without a lock: one that is half written does not match its checksum, and is left out."""
        for fingerprint, store in self._store_by_layout.items():
            records, num_bytes = store.index.file.records, self._slot_bytes(fingerprint)
            times = UseTimes(store.index.file)
            for start in range(0, store.index.file.num_slots, _RECORDS_AT_A_TIME):
                part = records[start : start + _RECORDS_AT_A_TIME].copy()
                is_whole = record_checksums(part) == part[:, CHECKSUM]
                stored = np.flatnonzero(is_whole & (part[:, STATE_AND_OWNER] == SlotState.STORED))
                ticks = part[stored, LAST_USE] & np.uint64(TICK_MASK)
                are_pinned = ((part[stored, LAST_USE] & np.uint64(PINNED)) != 0).tolist()
                uses = zip(ticks.tolist(), times.times_of(ticks).tolist(), are_pinned, strict=True)
                for row, (tick, used_s, is_pinned) in zip(stored.tolist(), uses, strict=True):
                    record, slot = part[row], start + row
                    yield BlockEntry(
                        layout_fingerprint=fingerprint,
                        block_hash=record[HASH_LOW : HASH_HIGH + 1].tobytes(),
                        num_bytes=num_bytes,
                        eviction_order=tick,
                        place=f"slot {slot}",
                        last_used_s=None if math.isnan(used_s) else used_s,
                        handle=(slot, int(record[SEQUENCE])),
                        is_pinned=is_pinned,
                    )

    def find(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes]) -> list[bool]:
        """From the index."""
        store = self._store_by_layout.get(layout_fingerprint)
        if store is None:
            return [False] * len(block_hashes)
        store.index.mirror.refresh()
        return [name in store.index.mirror for name in block_hashes]

    def read(self, entries: Iterable[BlockEntry]) -> Iterator[tuple[BlockEntry, RawBlock | None]]:
        """A slot whose record still is the same after it was copied held that block meanwhile."""
        for batch in in_batches(entries):
            store = self._store_by_layout[batch[0].layout_fingerprint]
            blocks: list[RawBlock | None] = []
            with _translated():
                for run in _runs(batch, store.medium.needs_neighbours):
                    blocks += self._read_run(store, [entry.handle[0] for entry in run], run[0].num_bytes)
            slots = [entry.handle[0] for entry in batch]
            now = sequences_of(store.index.file, slots, [entry.block_hash for entry in batch])
            for entry, block, sequence in zip(batch, blocks, now, strict=True):
                yield entry, block if sequence == entry.handle[1] else None

    def write(self, blocks: Sequence[RawBlock]) -> list[WriteOutcome]:
        """Makes the store of a layout that is not there, with the capacity that the options say."""
        outcomes = dict.fromkeys(range(len(blocks)), WriteOutcome.OTHER_SIZE)
        by_layout: dict[bytes, list[int]] = {}
        for position, block in enumerate(blocks):
            header = read_block_header(block.header)
            assert header is not None, "only verified blocks are written"
            by_layout.setdefault(header.layout_fingerprint, []).append(position)
        for fingerprint, positions in by_layout.items():
            with _translated():
                store = self._store_for(StoredLayout(fingerprint, len(blocks[positions[0]].payload)))
            stride = self._layout_by_fingerprint[fingerprint].block_stride_bytes
            fitting = [position for position in positions if _stride(blocks[position]) == stride]
            for chunk in range(0, len(fitting), MAX_BATCH_BLOCKS):
                part = fitting[chunk : chunk + MAX_BATCH_BLOCKS]
                outcomes.update(zip(part, self._write(store, [blocks[position] for position in part], stride), strict=True))
        return list(outcomes.values())

    def remove(self, entries: Sequence[BlockEntry]) -> int:
        """In batches, so that the index is never locked for long."""
        num_removed = 0
        for batch in in_batches(entries):
            store = self._store_by_layout[batch[0].layout_fingerprint]
            with _translated():
                num_removed += store.index.forget(dict(entry.handle for entry in batch))
        return num_removed

    def pin(self, layout_fingerprint: bytes, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> list[bool]:
        """Marks in the shared index, which outlive all processes where the store does. At most a quarter of its slots."""
        store = self._store_by_layout.get(layout_fingerprint)
        if store is None:
            return [False] * len(block_hashes)
        with _translated():
            (store.index.pin if is_pinned else store.index.unpin)(block_hashes)
        return [store.index.is_pinned(name) for name in block_hashes]

    def close(self) -> None:
        """Leave all stores."""
        stores, self._store_by_layout = self._store_by_layout, {}
        for store in stores.values():
            with contextlib.suppress(OSError):
                store.close()

    def _slot_bytes(self, fingerprint: bytes) -> int:
        return HEADER_PAGE_BYTES + self._layout_by_fingerprint[fingerprint].block_stride_bytes

    def _store_for(self, layout: StoredLayout) -> SlotStore:
        store = self._store_by_layout.get(layout.fingerprint)
        if store is None:
            store = self._store_by_layout[layout.fingerprint] = self._places.open(layout, create=True)
            self._layout_by_fingerprint[layout.fingerprint] = layout
        return store

    def _read_run(self, store: SlotStore, slots: Sequence[int], slot_bytes: int) -> list[RawBlock | None]:
        buffers = _page_buffers(len(slots), slot_bytes - HEADER_PAGE_BYTES)
        headers = list(store.medium.read(slots, buffers))
        missing = [None] * (len(slots) - len(headers))  # the medium ends before them
        return [
            *(cut_to_payload(header, bytes(buffer)) for header, buffer in zip(headers, buffers, strict=False)),
            *(RawBlock(b"", b"") for _ in missing),
        ]

    def _write(self, store: SlotStore, blocks: Sequence[RawBlock], stride: int) -> list[WriteOutcome]:
        names = [header.block_hash for block in blocks if (header := read_block_header(block.header)) is not None]
        with _translated():
            reservation = store.index.reserve(names, ())
            slots = reservation.new_slots
            try:
                for run in _neighbours(sorted(slots, key=slots.__getitem__), slots):
                    buffers = _page_buffers(len(run), stride)
                    for buffer, position in zip(buffers, run, strict=True):
                        buffer[: len(blocks[position].payload)] = blocks[position].payload
                    store.medium.write(
                        [slots[position] for position in run], [blocks[position].header for position in run], buffers
                    )
                store.index.publish(
                    {names[position]: slot for position, slot in slots.items()}, ()
                )  # which follows which is unknown
                store.index.touch_later(names[::-1])
            finally:
                store.index.release(store.index.unpublished(slots.values()))
        return [
            WriteOutcome.WRITTEN
            if position in slots
            else (WriteOutcome.PRESENT if name in store.index.mirror else WriteOutcome.NO_ROOM)
            for position, name in enumerate(names)
        ]


def _runs(batch: Sequence[BlockEntry], needs_neighbours: bool) -> Iterator[Sequence[BlockEntry]]:
    """Entries that one read may take."""
    if not needs_neighbours:
        yield batch
        return
    slots = {position: entry.handle[0] for position, entry in enumerate(batch)}
    for run in _neighbours(range(len(batch)), slots):
        yield [batch[position] for position in run]


def _neighbours(positions: Iterable[int], slots: dict[int, int]) -> Iterator[list[int]]:
    """Runs of positions whose slots follow one another, in the order given."""
    for _, run in itertools.groupby(enumerate(positions), lambda pair: slots[pair[1]] - pair[0]):
        yield [position for _, position in run]


def _page_buffers(num_buffers: int, stride: int) -> list[memoryview]:
    """Page-aligned, as direct I/O needs them, and zero."""
    memory = memoryview(mmap.mmap(-1, num_buffers * stride))
    return [memory[start : start + stride] for start in range(0, num_buffers * stride, stride)]


def _stride(block: RawBlock) -> int:
    return StoredLayout(b"", len(block.payload)).block_stride_bytes


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConnectorError(f"the store cannot be used: {error}") from error
