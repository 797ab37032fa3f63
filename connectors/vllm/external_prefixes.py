"""Decides for another engine's scheduler which blocks of a request come from the store, and which go there.

The scheduler's half of what staged_transfers.py is the worker's. It hashes tokens itself, once for each tensor-parallel rank: an
engine's own hashes may depend on the process, and name no weights. Knows nothing of the engine: see vllm_plugin.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from connectors.vllm.staged_transfers import BlockMove, Verdict
from core.clock import Clock
from core.kv.circuit_breaker import CircuitBreaker
from core.kv.connector import KVConnector, PrefixLookup
from core.kv.hashing import Namespace, extend_block_hashes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """A request in a step: after it, the KV of its first num_computed_tokens tokens is in its blocks.

    token_ids: those that are known. get_block_ids() -> its block table.
    """

    request_id: str
    token_ids: Sequence[int]
    num_computed_tokens: int
    get_block_ids: Callable[[], Sequence[int]]


@dataclass(frozen=True, slots=True)
class StepMoves:
    """What the workers shall do in a step; each list has one inner list per rank."""

    loads_by_rank: tuple[tuple[BlockMove, ...], ...]
    saves_by_rank: tuple[tuple[BlockMove, ...], ...]


@dataclass(slots=True)
class _Prefix:
    """A request's blocks by name, for each rank, and how many of them the store holds or was offered."""

    root_hashes: tuple[bytes, ...]
    chains: tuple[list[bytes], ...]
    num_stored: int = 0
    num_local: int = 0
    asked_since_s: float | None = None
    loading_block_ids: tuple[int, ...] = ()  # of the load that was started last
    first_loading: int = 0
    first_failed: int | None = None  # a block that the store could not bring after all: no load is tried again
    is_known_to_workers: bool = False


class ExternalPrefixes:
    """All requests of one scheduler, on its step thread. A store that fails costs hits: nothing here waits or raises for it."""

    def __init__(
        self,
        connector: KVConnector,
        namespaces: Sequence[Namespace],
        clock: Clock,
        *,
        lookup_timeout_s: float,
        saves: bool = True,
        loads: bool = True,
        save_output_blocks: bool = True,
    ) -> None:
        self._connector, self._namespaces, self._clock = connector, tuple(namespaces), clock
        self._block_size = namespaces[0].block_size
        self._lookup_timeout_s = lookup_timeout_s
        self._saves, self._loads, self._save_output_blocks = saves, loads, save_output_blocks
        self._breaker = CircuitBreaker()
        self._prefixes: dict[str, _Prefix] = {}
        self._new_loads: list[list[BlockMove]] = [[] for _ in namespaces]
        self._generation = b""

    def begin_generation(self, generation: bytes) -> None:
        """From now on nothing that was stored under another generation is found: the weights may have changed."""
        self._generation = generation
        self._prefixes.clear()

    # -- admission -----------------------------------------------------------------------------------------------------
    def num_external_tokens(
        self, request_id: str, token_ids: Sequence[int], num_computed_tokens: int, cache_salt: str, adapter_fingerprint: bytes
    ) -> int | None:
        """How many tokens after num_computed_tokens (a multiple of the block size) can be loaded. None: ask again.

        Leaves at least one token to compute, so that a step has something to sample from.
        """
        prefix = self._prefixes.get(request_id)
        if prefix is None:
            prefix = self._begin(request_id, cache_salt, adapter_fingerprint)
        for chain, root_hash in zip(prefix.chains, prefix.root_hashes, strict=True):
            extend_block_hashes(chain, token_ids, self._block_size, root_hash)
        prefix.num_local = num_computed_tokens // self._block_size
        prefix.loading_block_ids = ()
        num_stored = self._num_stored(request_id, prefix)
        if num_stored is None:
            return None
        prefix.num_stored = num_stored
        if prefix.first_failed is not None:  # whatever the store says: it gets these blocks again
            prefix.num_stored = min(num_stored, prefix.first_failed)
            return 0
        if not self._loads:
            return 0
        return max(0, min(num_stored, (len(token_ids) - 1) // self._block_size) - prefix.num_local) * self._block_size

    def _begin(self, request_id: str, cache_salt: str, adapter_fingerprint: bytes) -> _Prefix:
        adapter = adapter_fingerprint + self._generation
        roots = tuple(namespace.root_hash(cache_salt, adapter) for namespace in self._namespaces)
        prefix = self._prefixes[request_id] = _Prefix(roots, tuple([] for _ in roots))
        return prefix

    def _num_stored(self, request_id: str, prefix: _Prefix) -> int | None:
        """Leading blocks that the store has for every rank; None: not known yet, and not for too long."""
        now_s = self._clock.now_s()
        if not self._breaker.allows(now_s):
            return 0
        if prefix.asked_since_s is None:
            prefix.asked_since_s = now_s
        least = len(prefix.chains[0])
        for rank, chain in enumerate(prefix.chains):
            lookup = PrefixLookup(f"{request_id}@{rank}" if rank else request_id, chain, self._block_size)
            try:
                num_tokens = self._connector.get_num_new_matched_tokens(lookup, 0)
            except Exception as error:  # the boundary around a connector's calls, as in the ledger
                logger.warning("the %s connector failed in a lookup: %r", self._connector.name, error)
                self._breaker.record_failure(now_s)
                num_tokens = 0
            if num_tokens is None:
                if now_s - prefix.asked_since_s < self._lookup_timeout_s:
                    return None
                num_tokens = 0
            least = min(least, num_tokens // self._block_size)
        prefix.asked_since_s = None
        return least

    def note_allocation(self, request_id: str, block_ids: Sequence[int], num_external_tokens: int) -> None:
        """The request's block table, once it has blocks; num_external_tokens of them are to be loaded now (0: none)."""
        prefix, num_blocks = self._prefixes.get(request_id), num_external_tokens // self._block_size
        if prefix is None or not num_blocks:
            return
        first, end = prefix.num_local, prefix.num_local + num_blocks
        prefix.loading_block_ids, prefix.first_loading = tuple(block_ids[first:end]), first
        for moves, chain in zip(self._new_loads, prefix.chains, strict=True):
            moves.append(self._move(request_id, prefix, chain, first, prefix.loading_block_ids))
        prefix.is_known_to_workers = True

    # -- steps ---------------------------------------------------------------------------------------------------------
    def plan_step(self, scheduled: Iterable[ScheduledRequest]) -> StepMoves:
        """The loads that began since the last step, and the blocks that this step fills."""
        loads, self._new_loads = self._new_loads, [[] for _ in self._namespaces]
        saves: list[list[BlockMove]] = [[] for _ in self._namespaces]
        if self._saves and self._breaker.allows(self._clock.now_s()):
            for request in scheduled:
                self._plan_save(request, saves)
        return StepMoves(tuple(map(tuple, loads)), tuple(map(tuple, saves)))

    def _plan_save(self, request: ScheduledRequest, saves: list[list[BlockMove]]) -> None:
        prefix = self._prefixes.get(request.request_id)
        if prefix is None:
            return
        if self._save_output_blocks and request.num_computed_tokens // self._block_size > len(prefix.chains[0]):
            for chain, root_hash in zip(prefix.chains, prefix.root_hashes, strict=True):
                extend_block_hashes(chain, request.token_ids, self._block_size, root_hash)
        # Tokens in flight are computed but not known yet; their blocks follow in a later step.
        first, end = prefix.num_stored, min(request.num_computed_tokens // self._block_size, len(prefix.chains[0]))
        if first >= end:
            return
        block_ids = tuple(request.get_block_ids()[first:end])
        if len(block_ids) < end - first:
            return
        for moves, chain in zip(saves, prefix.chains, strict=True):
            moves.append(self._move(request.request_id, prefix, chain, first, block_ids))
        prefix.is_known_to_workers = True
        prefix.num_stored = end

    def _move(self, request_id: str, prefix: _Prefix, chain: list[bytes], first: int, block_ids: tuple[int, ...]) -> BlockMove:
        ancestors = () if prefix.is_known_to_workers else tuple(chain[:first])
        return BlockMove(request_id, block_ids, tuple(chain[first : first + len(block_ids)]), ancestors)

    # -- news ----------------------------------------------------------------------------------------------------------
    def note_failed_blocks(self, block_ids: set[int]) -> None:
        """These did not arrive: the request that waited for them computes from the first of them on, and saves them again."""
        for prefix in self._prefixes.values():
            failed = [position for position, block_id in enumerate(prefix.loading_block_ids) if block_id in block_ids]
            if failed:
                prefix.first_failed = prefix.first_loading + failed[0]
                prefix.num_stored = min(prefix.num_stored, prefix.first_failed)
                prefix.loading_block_ids = ()

    def note_ended_load(self, request_id: str) -> None:
        """Its load has ended; what failed of it was named before. Its blocks may belong to others from now on."""
        if (prefix := self._prefixes.get(request_id)) is not None:
            prefix.loading_block_ids = ()

    def note_verdict(self, verdict: Verdict) -> None:
        """How the workers' transfers ended."""
        if verdict.num_successes:
            self._breaker.record_success()
        for _ in range(verdict.num_faults):
            self._breaker.record_failure(self._clock.now_s())

    def forget(self, request_id: str) -> None:
        """The request has ended. Safe to repeat."""
        self._prefixes.pop(request_id, None)

    def close(self) -> None:
        """Close the connector; bounded."""
        self._connector.close()
