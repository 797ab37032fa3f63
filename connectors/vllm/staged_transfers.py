"""A worker's transfers between vLLM's memory and a store, in vLLM's terms: loads by request, saves that are over with the step.

What moves the bytes, through a bounded staging pool, is connectors/staging. Knows nothing of vLLM itself: see vllm_plugin.py.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.staging.connector import StagedConnector
from core.clock import Clock
from core.kv.connector import PrefixLookup, Transfer, TransferDirection, TransferOutcome

logger = logging.getLogger(__name__)

_FAULTS = (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class BlockMove:
    """The engine's blocks block_ids hold, or shall hold, the contents named block_hashes: consecutive blocks of a request.

    ancestors: the hashes of all blocks before them, or empty when the connector has been told of them by an earlier move.
    """

    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    ancestors: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadNews:
    """Since the last question: requests whose load has ended, one way or the other, and the blocks that did not arrive."""

    ended_request_ids: frozenset[str]
    failed_block_ids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the store did since the last question: transfers that ended well, and faults (errors, deadlines)."""

    num_successes: int = 0
    num_faults: int = 0


class StagedTransfers:
    """All transfers of one worker; step thread only. `connector` has its staging pool, and does not let saves wait for room."""

    def __init__(
        self, connector: StagedConnector, block_size: int, clock: Clock, *, load_timeout_s: float, save_timeout_s: float
    ) -> None:
        self._connector, self._block_size, self._clock = connector, block_size, clock
        self._timeout_s = {TransferDirection.LOAD: load_timeout_s, TransferDirection.SAVE: save_timeout_s}
        self._next_transfer_id = 1
        self._move_by_id: dict[int, BlockMove] = {}  # loads on their way
        self._saving: set[int] = set()
        self._uncopied: set[int] = set()  # saves that still read the engine's memory
        self._ended_request_ids: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._num_successes = self._num_faults = 0
        self._has_news = threading.Event()
        connector.on_result = self._has_news.set

    def start_load(self, move: BlockMove) -> None:
        """Begin to fill the engine's blocks, which belong to the move until poll_loads names the request."""
        transfer = self._prepare(TransferDirection.LOAD, move)
        self._move_by_id[transfer.transfer_id] = move
        self._connector.start_load(transfer)

    def save(self, moves: Sequence[BlockMove]) -> None:
        """Copy the engine's blocks, as far as there is room for them; returns when that is done. They are stored afterwards."""
        for move in moves:
            transfer = self._prepare(TransferDirection.SAVE, move)
            self._saving.add(transfer.transfer_id)
            self._uncopied.add(transfer.transfer_id)
            self._connector.start_save(transfer)
        while self._uncopied:
            self._wait()

    def poll_loads(self) -> LoadNews:
        """Never blocks. A failed block is named no later than its request."""
        self._collect()
        news = LoadNews(frozenset(self._ended_request_ids), frozenset(self._failed_block_ids))
        self._ended_request_ids.clear()
        self._failed_block_ids.clear()
        return news

    def take_verdict(self) -> Verdict:
        """Never blocks."""
        verdict = Verdict(self._num_successes, self._num_faults)
        self._num_successes = self._num_faults = 0
        return verdict

    def close(self, drain_s: float) -> None:
        """Give what is on its way to the store drain_s seconds, then close the connector. Bounded; loads end as failed."""
        deadline_s = self._clock.now_s() + drain_s
        self._collect()
        while self._saving and self._clock.now_s() < deadline_s:
            self._wait()
        self._connector.close()
        self._collect()

    def _prepare(self, direction: TransferDirection, move: BlockMove) -> Transfer:
        if move.ancestors:  # so that the store keeps parents longer than their children
            lookup = PrefixLookup(move.request_id, [*move.ancestors, *move.block_hashes], self._block_size)
            try:
                self._connector.get_num_new_matched_tokens(lookup, len(move.ancestors) * self._block_size)
            except Exception as error:  # the boundary around a connector's calls: its faults cost misses, never the engine
                logger.warning("the %s connector failed in a lookup: %r", self._connector.name, error)
        deadline_s = self._clock.now_s() + self._timeout_s[direction]
        transfer_id, self._next_transfer_id = self._next_transfer_id, self._next_transfer_id + 1
        return Transfer(transfer_id, direction, move.request_id, move.block_ids, move.block_hashes, deadline_s)

    def _wait(self) -> None:
        self._has_news.wait(_LOOK_S)
        self._has_news.clear()
        self._collect()

    def _collect(self) -> None:
        self._uncopied.difference_update(self._connector.poll_released())
        for result in self._connector.poll_transfers():
            self._uncopied.discard(result.transfer_id)
            self._saving.discard(result.transfer_id)
            is_fault = result.outcome in _FAULTS
            self._num_faults += is_fault
            self._num_successes += not is_fault
            move = self._move_by_id.pop(result.transfer_id, None)
            if move is None:
                continue
            self._ended_request_ids.add(move.request_id)
            failed = move.block_ids[result.num_blocks_ok :]
            self._failed_block_ids.update(failed)
            if failed:
                num_blocks = len(move.block_ids)
                logger.warning("%d of %d blocks of %s did not arrive and are computed", len(failed), num_blocks, move.request_id)
