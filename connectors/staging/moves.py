"""What the stage decides: which slot of the staging pool holds what, what is copied or moved next, and when a transfer is over.

No thread and no lock: the connector beside this file calls it from one thread, and passes its calls on to the inner connector.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from connectors.transfer_workers import failed, refuse_bad_ids
from core.clock import Clock
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult
from core.kv.device_copies import DeviceCopies
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_MAX_BROKEN_CHAINS = 1024


@dataclass(slots=True)
class _Move:
    """A transfer of the engine's. Its first `end` blocks are what is to be moved; `why`: the reason where these are not all."""

    transfer: Transfer
    give_up_s: float  # when a save stops waiting for slots
    mark: object  # what the device must have computed before the transfer's blocks are touched
    end: int
    why: TransferResult | None = None
    pieces: list[Piece] = field(default_factory=list)
    num_copies: int = 0  # under way: they use the engine's blocks
    is_released: bool = False  # all of a save that will be stored has been copied
    is_ended: bool = False  # its result is told, and its blocks may be somebody else's

    @property
    def is_save(self) -> bool:
        return self.transfer.direction is TransferDirection.SAVE

    @property
    def num_in_pieces(self) -> int:
        """Leading blocks that have, or had, slots."""
        return self.pieces[-1].first + len(self.pieces[-1].slots) if self.pieces else 0

    def cut(self, position: int, why: TransferResult) -> None:
        """Blocks from this one on will not be moved."""
        if position < self.end:
            self.end, self.why = position, why


@dataclass(slots=True)
class Piece:
    """Consecutive blocks of a move, from its first-th on, and their slots, which are free when nobody uses them any more."""

    move: _Move
    first: int
    slots: tuple[int, ...]
    num_users: int = 0  # of the slots: the inner transfer, and a copy
    result: TransferResult | None = None  # the store's
    num_ok: int | None = None  # leading blocks that are where they shall be; None: not known yet

    @property
    def num_arrived(self) -> int:
        """Leading blocks that the store has moved."""
        return max(0, min(self.result.num_blocks_ok, len(self.slots))) if self.result is not None else 0


class Moves:
    """Transfers on their way through `pool`. start_inner may call on_inner_result; note_copied comes from a copy's thread.

    Each moves in pieces of piece_bytes at most, as there is room. Half of the pool is kept for loads, so that saves into a store
    that hangs cannot hold them up. A load waits for room until its deadline; a save, which holds blocks of the engine meanwhile,
    save_wait_s: what is left then is not stored, nor is what follows it in its request's chain, since nobody would reach it.
    """

    def __init__(
        self,
        copies: DeviceCopies,
        pool: KVPoolMemory,
        clock: Clock,
        start_inner: Callable[[Transfer], None],
        note_copied: Callable[[Piece, BaseException | None], None],
        *,
        save_wait_s: float,
        piece_bytes: int,
    ) -> None:
        self._copies, self._clock = copies, clock
        self._start_transfer, self._note_copied = start_inner, note_copied
        self._num_slots = pool.num_blocks
        self._free_slots = list(range(pool.num_blocks - 1, -1, -1))
        self._num_reserved = pool.num_blocks // 2
        self._save_wait_s = save_wait_s
        self._max_piece = max(1, min(piece_bytes // pool.layout.block_bytes, self._num_reserved))
        self._moves: list[_Move] = []
        self._piece_by_inner_id: dict[int, Piece] = {}
        self._next_inner_id = 1
        self._broken_chains: dict[str, None] = {}  # requests of which a block was not saved, oldest first
        self._released: list[int] = []

    @property
    def is_empty(self) -> bool:
        """Nothing has a deadline."""
        return not self._moves

    @property
    def num_used_slots(self) -> int:
        """Any thread."""
        return self._num_slots - len(self._free_slots)

    # -- the beginning of a transfer -----------------------------------------------------------------------------------
    def begin(self, transfer: Transfer, started_s: float, mark: object) -> None:
        """mark: see DeviceCopies."""
        move = _Move(transfer, started_s + self._save_wait_s, mark, end=len(transfer.block_ids))
        self._moves.append(move)
        if (refusal := refuse_bad_ids(transfer, self._copies.num_blocks)) is not None:
            move.cut(0, refusal)
        elif self._is_late(move):
            move.cut(0, failed(transfer, TransferOutcome.TIMEOUT, "not begun in time"))

    def _is_late(self, move: _Move) -> bool:
        return self._clock.now_s() > move.transfer.deadline_s

    def _start_pieces(self, move: _Move) -> None:
        """As much as there is room for."""
        if move.is_save and move.transfer.request_id in self._broken_chains:
            self._refuse_rest(move)
        num_kept = self._num_reserved if move.is_save else 0
        while (num_left := move.end - move.num_in_pieces) > 0 and (num_free := len(self._free_slots) - num_kept) > 0:
            piece = self._add_piece(move, min(num_left, self._max_piece, num_free))
            if move.is_save:
                block_ids = move.transfer.block_ids[piece.first : move.num_in_pieces]
                self._follow(piece, self._copies.copy_in(block_ids, piece.slots, move.mark))
            else:
                self._start_inner(piece)
        if num_left > 0 and move.is_save and self._clock.now_s() >= move.give_up_s:
            self._refuse_rest(move)

    def _refuse_rest(self, save: _Move) -> None:
        # Where the store still holds slots of transfers past their deadline, a MISS would call it healthy.
        is_store_late = any(self._is_late(piece.move) for piece in self._piece_by_inner_id.values())
        outcome = TransferOutcome.TIMEOUT if is_store_late else TransferOutcome.MISS
        save.cut(save.num_in_pieces, failed(save.transfer, outcome, "no room in the staging pool"))
        self._broken_chains[save.transfer.request_id] = None
        if len(self._broken_chains) > _MAX_BROKEN_CHAINS:
            del self._broken_chains[next(iter(self._broken_chains))]

    def _add_piece(self, move: _Move, num_slots: int) -> Piece:
        piece = Piece(move, move.num_in_pieces, tuple(self._free_slots.pop() for _ in range(num_slots)))
        move.pieces.append(piece)
        return piece

    def _let_go(self, piece: Piece) -> None:
        piece.num_users -= 1
        if not piece.num_users:
            self._free_slots.extend(reversed(piece.slots))  # to be given out in their order: copies of few runs

    # -- copies --------------------------------------------------------------------------------------------------------
    def _follow(self, piece: Piece, copy: Future[None]) -> None:
        piece.num_users += 1
        piece.move.num_copies += 1
        copy.add_done_callback(functools.partial(self._on_copy_done, piece))

    def _on_copy_done(self, piece: Piece, copy: Future[None]) -> None:
        """A copy's thread."""
        self._note_copied(piece, None if copy.cancelled() else copy.exception())

    def on_copied(self, piece: Piece, error: BaseException | None) -> None:
        """A copy of note_copied's has ended."""
        move = piece.move
        move.num_copies -= 1
        if error is not None:
            logger.warning("copying KV between device and host failed: %r", error)
            piece.num_ok = 0
            move.cut(piece.first, failed(move.transfer, TransferOutcome.ERROR, repr(error)))
        elif not move.is_save:
            piece.num_ok = piece.num_arrived
        elif not self._is_late(move):
            self._start_inner(piece)
        self._let_go(piece)

    # -- the inner connector -------------------------------------------------------------------------------------------
    def _start_inner(self, piece: Piece) -> None:
        outer = piece.move.transfer
        names = outer.block_hashes[piece.first : piece.first + len(piece.slots)]
        transfer = dataclasses.replace(outer, transfer_id=self._next_inner_id, block_ids=piece.slots, block_hashes=names)
        self._next_inner_id += 1
        self._piece_by_inner_id[transfer.transfer_id] = piece
        piece.num_users += 1
        self._start_transfer(transfer)

    def on_inner_result(self, result: TransferResult, *, is_last: bool) -> None:
        """An outcome is certain; with the last word on a transfer, the connector also needs its slots no more."""
        piece = self._piece_by_inner_id.get(result.transfer_id)
        if piece is None:
            return
        if piece.result is None:
            piece.result = result
            self._take_over(piece, result)
        if is_last:
            del self._piece_by_inner_id[result.transfer_id]
            self._let_go(piece)

    def _take_over(self, piece: Piece, result: TransferResult) -> None:
        move, num_arrived = piece.move, piece.num_arrived
        if num_arrived < len(piece.slots):
            move.cut(piece.first + num_arrived, result)
        if move.is_save or move.is_ended or not num_arrived:
            piece.num_ok = num_arrived
            return
        block_ids = move.transfer.block_ids[piece.first : piece.first + num_arrived]
        self._follow(piece, self._copies.copy_out(piece.slots[:num_arrived], block_ids, move.mark))

    # -- the end of a transfer -----------------------------------------------------------------------------------------
    def take_released(self) -> list[int]:
        """Saves whose blocks have been copied since the last call."""
        released, self._released = self._released, []
        return released

    def advance(self) -> list[TransferResult]:
        """Start what there is room for; the results of transfers that are over."""
        results = []
        for move in self._moves:
            if not self._is_late(move):
                self._start_pieces(move)
            if move.is_save and not (move.is_released or move.num_copies or move.num_in_pieces < move.end):
                move.is_released = True
                self._released.append(move.transfer.transfer_id)
            if (result := self._conclude(move)) is not None:
                results.append(result)
        self._moves = [move for move in self._moves if not move.is_ended]
        return results

    def _conclude(self, move: _Move) -> TransferResult | None:
        """The move's result, when all is known of its pieces, or its time is over; not while a copy uses its blocks."""
        num_ok = moved_bytes = 0
        wants_save = False
        for piece in move.pieces:
            if piece.num_ok is None or num_ok < piece.first:
                break
            num_ok += piece.num_ok
            if piece.result is not None:
                moved_bytes += piece.result.moved_bytes
                wants_save = wants_save or piece.result.wants_save
        is_complete = num_ok >= move.end and all(piece.num_ok is not None for piece in move.pieces)
        if move.num_copies or not (is_complete or self._is_late(move)):
            return None
        move.is_ended = True
        outcome, detail = TransferOutcome.OK, ""
        if not is_complete:
            outcome, detail = TransferOutcome.TIMEOUT, "not through the staging pool in time"
        elif move.why is not None:  # a store that says OK of a part has not got the rest
            is_said = move.why.outcome is not TransferOutcome.OK
            outcome, detail = move.why.outcome if is_said else TransferOutcome.MISS, move.why.detail
        return TransferResult(
            move.transfer.transfer_id, min(num_ok, move.end), outcome, moved_bytes, detail, wants_save=wants_save
        )
