"""A connector over an index and a medium of equal slots: how blocks are found, loaded, verified, saved and touched.

shm and nvme differ in how their store is opened and in the medium; everything else is here.
"""

from __future__ import annotations

import errno
import functools
import itertools
import logging
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from connectors.coding.block_coding import CodingOptions
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.slots.coding import SlotCoding
from connectors.slots.index_mirror import sequences_of
from connectors.slots.store import SlotLayout, SlotStore, slot_bytes
from connectors.slots.store_holder import REOPEN_PAUSE_S, StoreHolder
from connectors.stored_block import BlockCheck
from connectors.transfer_log import TransferLog
from connectors.transfer_workers import TransferWorkers, failed, refuse_bad_ids
from core.clock import Clock
from core.errors import ConnectorError
from core.kv.connector import (
    ConnectorStats,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_PIECE_BLOCKS = 256  # two buffers each, below the kernel's limit of 1024 per call
_TELL_USES_AFTER_S = 0.05  # unless a change of the index tells them before
_MAX_PINS = 1024
_MAX_INLINE_CHANGES = 256  # applied within a lookup; more would take longer than a lookup may


@dataclass(slots=True)
class _Progress:
    """What the threads of one transfer found out: a check per position read, faults of the medium, positions written."""

    checks: dict[int, BlockCheck] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    faults: list[OSError] = field(default_factory=list)


class SlotConnector(QueuedConnector):
    """Base of the connectors that keep blocks in slots.

    The step thread reads the mirror and queues transfers; all else happens on worker threads. While there is no store (see
    StoreHolder) every lookup is a miss.
    """

    touches_loaded = True  # a load is a use

    def __init__(self, clock: Clock, num_threads: int, coding: CodingOptions | None = None) -> None:
        """coding: of a codec whose blocks are all of one length. None: blocks are at rest as they are in the pool."""
        self._coding_options = coding or CodingOptions()
        self._num_threads = num_threads
        self._workers = TransferWorkers(self._execute, self._work_ahead, self._notify, clock)
        self._chains = PrefixChains()
        self._close_mutex = threading.Lock()
        self._held = StoreHolder(self.name, clock, self._open_layout, self._workers.request_background)
        self._log = TransferLog(logger, self.name)
        self._pins: deque[tuple[tuple[bytes, ...], bool]] = deque(maxlen=_MAX_PINS)  # asked for, not done

    @abstractmethod
    def _open_store(self, layout: SlotLayout) -> SlotStore:
        """Join or create the store for this layout at rest. Raises OSError, ConnectorError or ConfigError."""

    def _open_layout(self) -> SlotStore:
        return self._open_store(self._coding.layout_at_rest)

    @property
    @abstractmethod
    def _starts_without_store(self) -> bool:
        """Whether a medium that is broken at start is worth waiting for, or ends the start."""

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says. None while more changes of other processes are outstanding than a lookup may apply."""
        store = self._held.store
        if store is None or lookup.block_size != self._layout.block_size:
            self._workers.request_background()
            return 0
        if not store.index.file.is_intact() or not store.index.mirror.refresh(_MAX_INLINE_CHANGES):
            self._workers.request_background()
            return None if store.index.file.is_intact() else 0
        self._chains.note_lookup(lookup.request_id, lookup.block_hashes)
        first = num_computed_tokens // lookup.block_size
        return store.index.mirror.count_prefix(itertools.islice(lookup.block_hashes, first, None)) * lookup.block_size

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Open the store and start the threads. Raises ConfigError or ConnectorError where the store cannot be used at all."""
        self._pool_bytes = np.frombuffer(pool.buffer, dtype=np.uint8).data
        self._num_pool_blocks = pool.num_blocks
        self._layout = pool.layout
        self._coding = SlotCoding(pool.layout, self._coding_options.coding_for(pool.layout))
        self._block_bytes, self._stride_bytes = pool.layout.block_bytes, pool.layout.block_stride_bytes
        self._held.open_first(may_wait=self._starts_without_store)
        self._workers.start_threads(self._num_threads, f"kv-{self.name}")
        self._workers.request_background()

    def close(self) -> None:
        """As the interface says.

        A thread that hangs in the kernel is given up after a few seconds: its transfer is CANCELLED, and what its I/O still does
        to the pool's memory hits a reference of its own.
        """
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            self._held.begin_closing()
            self._held.close(is_unused=self._workers.close())

    def stats(self) -> ConnectorStats:
        """Sizes include each block's header page."""
        held, store = self._held, self._held.store
        num_open = self._workers.num_in_flight
        if store is None:
            return ConnectorStats(
                num_errors=held.num_errors,
                num_open_references=num_open,
                num_evictions=held.num_past_evictions,
                is_reachable=False,
                complaint=held.why_closed,
            )
        num_stored, num_bytes = len(store.index.mirror), slot_bytes(self._coding.layout_at_rest)
        return ConnectorStats(
            store_bytes=num_stored * num_bytes,
            store_blocks=num_stored,
            capacity_bytes=store.index.file.num_slots * num_bytes,
            num_evictions=held.num_past_evictions + store.index.num_evictions,
            num_errors=held.num_errors + store.index.room.num_failed_growths,
            num_open_references=num_open + store.index.num_writing,
        )

    # -- for tiers and operators; any thread but the step thread for the first ----------------------------------------------
    def coldest_runs(self, share: int) -> list[list[bytes]]:
        """Once the store is nearly full: one in `share` of its blocks, those that would be evicted next. See SlotRecency."""
        store = self._held.store
        if store is None:
            return []
        num_slots = store.index.file.num_slots
        num_blocks = max(1, num_slots // share)
        if len(store.index.mirror) + num_blocks < num_slots:
            return []
        with self._held.using() as opened:
            return [] if opened is None else opened.index.coldest_runs(num_blocks)

    def hottest_runs(self) -> list[list[bytes]]:
        """All blocks, those that would be evicted last first; in each run, parents before their followers."""
        with self._held.using() as opened:
            if opened is None:
                return []
            return opened.index.coldest_runs(opened.index.file.num_slots, with_pinned=True)[::-1]

    def stop_sharing(self) -> bool:
        """Let nobody join this store through us any more. True where nobody else has it open, so that it ends with us."""
        with self._held.using() as opened:
            return opened is not None and opened.stop_sharing()

    def pin_prefix(self, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> bool:
        """As the interface says: at most a quarter of the slots; pins are marks in the index, so they outlive processes."""
        self._pins.append((tuple(block_hashes), is_pinned))
        self._workers.request_background()
        return True

    # -- worker threads ------------------------------------------------------------------------------------------------
    def _execute(self, transfer: Transfer) -> TransferResult:
        refused = refuse_bad_ids(transfer, self._num_pool_blocks)
        if refused is not None:
            return refused
        try:
            with self._held.using() as store:
                if store is None:
                    return failed(transfer, TransferOutcome.ERROR, "the store cannot be opened")
                result = (
                    self._load(store, transfer) if transfer.direction is TransferDirection.LOAD else self._save(store, transfer)
                )
        except (OSError, ConnectorError) as error:
            result = failed(transfer, TransferOutcome.ERROR, str(error))
        if result.outcome in (TransferOutcome.ERROR, TransferOutcome.CORRUPT):
            self._held.count_error()
            self._log.note(transfer, result)
        return result

    def _load(self, store: SlotStore, transfer: Transfer) -> TransferResult:
        index = store.index
        index.mirror.refresh()
        names = transfer.block_hashes
        slots = index.mirror.prefix_slots(names)
        sequences = sequences_of(index.file, slots, names[: len(slots)])
        progress = _Progress()

        def read(positions: Sequence[int]) -> None:
            blocks = [self._block(transfer.block_ids[position]) for position in positions]
            where, wanted = [slots[position] for position in positions], [names[position] for position in positions]
            progress.checks.update(zip(positions, self._coding.read(store.medium, where, wanted, blocks), strict=True))

        self._run_pieces(store, transfer, slots, list(range(len(slots))), read, progress)
        num_ok = _count_leading(lambda position: progress.checks.get(position) is BlockCheck.OK, len(names))
        bad = [position for position, check in progress.checks.items() if check is not BlockCheck.OK]
        now = sequences_of(index.file, [slots[position] for position in bad], [names[position] for position in bad])
        damaged = {position for position, sequence in zip(bad, now, strict=True) if sequence == sequences[position] != -1}
        if damaged and not store.is_read_only:  # would block their keys for good
            index.forget({slots[position]: sequences[position] for position in damaged})
        index.mirror.drop_stale(slots[position] for position in bad if position not in damaged)
        if self.touches_loaded:
            chain = self._chains.note_transfer(transfer.request_id, names[:num_ok])
            index.touch_later([*chain, *names[:num_ok]], names[:num_ok])
            self._workers.request_background(_TELL_USES_AFTER_S)
        outcome, detail = TransferOutcome.OK, ""
        if num_ok < len(names):
            outcome, detail = self._reason(transfer, progress, num_ok)
            if progress.checks.get(num_ok) is BlockCheck.UNREADABLE:
                outcome, detail = TransferOutcome.MISS, f"block {names[num_ok].hex()}: {self._coding.complaint}"
            elif num_ok in damaged:
                outcome, detail = TransferOutcome.CORRUPT, f"block {names[num_ok].hex()} did not match its header"
        return TransferResult(transfer.transfer_id, num_ok, outcome, num_ok * self._block_bytes, detail)

    def _save(self, store: SlotStore, transfer: Transfer) -> TransferResult:
        names = transfer.block_hashes
        if store.is_read_only:
            return failed(transfer, TransferOutcome.MISS, "the store is on a read-only disk")
        ancestors = self._chains.note_transfer(transfer.request_id, names)
        reservation = store.index.reserve(names, ancestors)
        slots = reservation.new_slots
        progress = _Progress()

        def write(positions: Sequence[int]) -> None:
            blocks = [self._block(transfer.block_ids[position]) for position in positions]
            where, written = [slots[position] for position in positions], [names[position] for position in positions]
            is_written = self._coding.write(store.medium, where, written, blocks)
            if store.medium.is_intact():
                progress.written.update(itertools.compress(positions, is_written))

        try:
            self._run_pieces(store, transfer, slots, list(slots), write, progress)
            written = {names[position]: slots[position] for position in progress.written}
            hits = [name for position, name in enumerate(names) if position not in slots]
            store.index.publish(written, [*ancestors, *names], hits)
        finally:
            unfinished = store.index.unpublished(slots.values())
            if unfinished:
                store.index.release(unfinished)
        num_ok = store.index.mirror.count_prefix(names)  # what all can see, whoever wrote it
        outcome, detail = (TransferOutcome.OK, "") if num_ok == len(names) else self._reason(transfer, progress, num_ok)
        moved_bytes = len(progress.written) * self._block_bytes
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, detail)

    def _run_pieces(
        self,
        store: SlotStore,
        transfer: Transfer,
        slots: Sequence[int] | dict[int, int],
        positions: Sequence[int],
        move: Callable[[Sequence[int]], None],
        progress: _Progress,
    ) -> None:
        """Cut positions into pieces, and move those on all idle threads until one fails or the transfer is out of time."""
        piece_blocks = store.medium.piece_bytes // slot_bytes(self._coding.layout_at_rest)
        max_blocks = max(1, min(_MAX_PIECE_BLOCKS, piece_blocks))
        pieces: list[list[int]] = []
        for position in positions:
            is_neighbour = pieces and slots[pieces[-1][-1]] + 1 == slots[position]
            if pieces and len(pieces[-1]) < max_blocks and (is_neighbour or not store.medium.needs_neighbours):
                pieces[-1].append(position)
            else:
                pieces.append([position])

        def job(piece: Sequence[int]) -> None:
            if progress.faults or self._workers.should_stop(transfer):
                return
            try:
                if not store.medium.is_intact():
                    raise OSError(errno.EIO, "the store was removed or cut")
                move(piece)
                if not store.medium.is_intact():  # cut meanwhile: what was written is nowhere
                    raise OSError(errno.EIO, "the store was removed or cut")
            except OSError as error:
                progress.faults.append(error)

        self._workers.run_jobs([functools.partial(job, piece) for piece in pieces])

    def _reason(self, transfer: Transfer, progress: _Progress, position: int) -> tuple[TransferOutcome, str]:
        """Why the block at this position was not moved."""
        if progress.faults:
            return TransferOutcome.ERROR, str(progress.faults[0])
        if position not in progress.checks and (stopped := self._workers.should_stop(transfer)):
            return stopped, "given up before the end"
        return TransferOutcome.MISS, "not stored, or no room for it"

    def _block(self, block_id: int) -> memoryview:
        start = block_id * self._stride_bytes
        return self._pool_bytes[start : start + self._stride_bytes]

    # -- idle work -----------------------------------------------------------------------------------------------------
    def _work_ahead(self) -> bool:
        """Idle work: reopen a lost store, catch up with changes, allocate and touch what comes next."""
        try:
            with self._held.using() as store:
                if store is None:  # also while nobody asks for anything: whoever watches wants to see that it is back
                    self._workers.request_background(REOPEN_PAUSE_S)
                    return False
                while self._pins and not store.is_read_only:
                    names, is_pinned = self._pins[0]
                    (store.index.pin if is_pinned else store.index.unpin)(names)
                    self._pins.popleft()
                if store.index.has_untold_uses or not store.index.mirror.refresh():
                    store.index.catch_up()
                has_more = store.index.file.num_ready_slots < store.index.file.num_slots and store.index.grow_ahead()
                return store.medium.prepare(store.index.file.num_ready_slots) or has_more
        except (OSError, ConnectorError) as error:  # the next transfer or lookup meets it too, and acts on it
            logger.info("no work ahead for the %s store: %s", self.name, str(error))
            return False


def _count_leading(is_ok: Callable[[int], bool], num_positions: int) -> int:
    return next((position for position in range(num_positions) if not is_ok(position)), num_positions)
