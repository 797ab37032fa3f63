"""Whether a waiting request may start in this step: what it hits, what it waits for, and whether there is room.

Decisions for the scheduler, which alone moves requests between the queue and the batch. Step thread only.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator

from core.blocks_in_progress import BlocksInProgress
from core.clock import Clock
from core.config import EngineOptions
from core.kv.connector import TransferDirection
from core.kv.ledger import EndedTransfer, TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.long_prompts import LongPrompts
from core.prompt_delay import PromptDelay
from core.request import Request, RequestStage, RequestStatus, transition

_MAX_LOADS_PER_REQUEST = 2  # a load whose blocks were evicted before they were used is repeated once, then computed


class Admission(enum.Enum):
    """What became of the request at the head of the queue."""

    ADMITTED = "admitted"
    LOADING = "loading"  # stepped aside until a transfer ends
    UNDECIDED = "undecided"  # what it waits for may be there in the next step: steps aside until then
    NO_ROOM = "no_room"  # nobody jumps the queue


class AdmissionControl:
    """Asks caches and stores for waiting requests. State: who waits for which transfer, and what holds prompts back."""

    def __init__(
        self, options: EngineOptions, kv: KVCacheManager, ledger: TransferLedger, clock: Clock, in_progress: BlocksInProgress
    ) -> None:
        """in_progress: blocks that running requests are filling."""
        self._options = options
        self._kv = kv
        self._ledger = ledger
        self._clock = clock
        self._in_progress = in_progress
        self._loading: dict[int, list[Request]] = {}  # by transfer_id
        self._prompt_delay = PromptDelay(factor) if (factor := options.scheduler_delay_factor) else None
        max_long = options.max_long_partial_prefills
        self._long_prompts = LongPrompts(options.long_prefill_token_threshold, max_long) if max_long else None

    # -- once per step -------------------------------------------------------------------------------------------------
    def may_admit(self, head_arrival_s: float | None, *, is_anyone_running: bool) -> bool:
        """Whether waiting requests are looked at in this step. False while scheduler_delay_factor keeps prompts back."""
        if self._long_prompts is not None:
            self._long_prompts.begin_step()
        if self._prompt_delay is None:
            return True
        return self._prompt_delay.is_over(self._clock.now_s(), head_arrival_s, is_anyone_running=is_anyone_running)

    def note_started(self) -> None:
        """The step that is being scheduled starts prompts."""
        if self._prompt_delay is not None:
            self._prompt_delay.note_prompt_step(self._clock.now_s())

    # -- one request ---------------------------------------------------------------------------------------------------
    def ask_store_early(self, request: Request) -> None:
        """It will not be its turn in the next step: ask the store now, so that the answer is known then."""
        if request.may_hit and self._kv.enable_prefix_caching:
            self._kv.extend_hashes(request)
            self._ledger.num_external_blocks(request.request_id, request.block_hashes, 0, request.kv_sources)

    def try_admit(self, request: Request, budget: int, chunk_limit: int) -> tuple[Admission, int]:
        """Give a waiting request its blocks, for a step in which budget tokens are left: (what became of it, tokens to compute).

        ADMITTED: num_computed_tokens are its hits, and the scheduler starts it.
        """
        kv, long_prompts = self._kv, self._long_prompts
        if request.awaits_grammar or (long_prompts is not None and long_prompts.is_next_in_vain(request)):
            return Admission.UNDECIDED, 0
        hit_block_ids = kv.find_local_hit(request)
        next_hash = kv.next_hit_hash(request, len(hit_block_ids))
        if next_hash in self._in_progress:  # a later step finds it as a hit
            return Admission.UNDECIDED, 0
        admission = self._try_start_load(request, hit_block_ids, next_hash)
        if admission is not None:
            return admission, 0
        num_known = request.num_tokens_with_spec
        num_hit_tokens = len(hit_block_ids) * kv.block_size
        num_tokens = num_known - num_hit_tokens
        if long_prompts is not None and not long_prompts.try_admit(request, num_tokens):
            return Admission.UNDECIDED, 0
        limit = min(budget, chunk_limit) if self._options.enable_chunked_prefill else budget
        if num_tokens > limit:
            if not self._options.enable_chunked_prefill and limit < self._options.max_num_batched_tokens:
                return Admission.NO_ROOM, 0
            num_tokens = limit  # without chunking only what no single step could hold is cut
        if not kv.try_allocate_table(request, hit_block_ids, num_known):
            return Admission.NO_ROOM, 0
        request.num_computed_tokens = request.num_written_tokens = num_hit_tokens
        request.num_saved_blocks = len(hit_block_ids)
        if hit_block_ids and request.stage is RequestStage.PREFILL:
            # Hits were saved when they were computed, but the store may have evicted them since: a handoff needs all.
            self._ledger.start_save(request.request_id, hit_block_ids, request.block_hashes[: len(hit_block_ids)])
        return Admission.ADMITTED, num_tokens

    def _try_start_load(self, request: Request, hit_block_ids: list[int], next_hash: bytes | None) -> Admission | None:
        """Step aside for a load when the store has more of the prefix than we do; None: go on with what is here.

        The request holds no blocks while it waits: the transfer does, and leaves them as prefix hits. So a load can never block
        another one for ever; and it only starts when the whole prompt would fit now, so that it is not evicted before it is used.
        """
        kv, ledger = self._kv, self._ledger
        if next_hash is None or not request.may_load:
            return None
        num_local = len(hit_block_ids)
        transfer_id = ledger.loading_transfer_id(next_hash)
        if transfer_id is not None:  # single flight
            self._wait_for_transfer(request, transfer_id)
            return Admission.LOADING
        hashes = request.block_hashes[: kv.max_hit_blocks(request)]
        num_external = ledger.num_external_blocks(request.request_id, hashes, num_local, request.kv_sources)
        if num_external is None:
            now_s = self._clock.now_s()
            if request.lookup_started_s is None:
                request.lookup_started_s = now_s
            patience_s = ledger.patience_s(request.num_tokens_with_spec - num_local * kv.block_size, num_local * kv.block_size)
            if now_s - request.lookup_started_s < min(self._options.lookup_timeout_s, patience_s):
                return Admission.UNDECIDED
            num_external = 0
        if num_external == 0:
            return None
        for end in range(num_local + 1, num_local + num_external):
            if ledger.loading_transfer_id(hashes[end]) is not None:  # the rest is on its way for somebody else
                num_external = end - num_local
                break
        if request.num_loads >= _MAX_LOADS_PER_REQUEST or not ledger.should_load(num_external, num_local):
            request.may_load = False
            return None
        if not ledger.has_room(TransferDirection.LOAD, num_local + num_external):
            if not ledger.num_overdue:
                return Admission.NO_ROOM  # until one of the loads has ended
            request.may_load = False  # which they may never do
            return None
        block_ids = kv.try_allocate_for_load(request, hit_block_ids, num_external)
        if block_ids is None:
            return Admission.NO_ROOM
        load_hashes = hashes[num_local : num_local + num_external]
        transfer_id = ledger.start_load(request.request_id, block_ids, load_hashes, hit_block_ids)
        if transfer_id is None:
            return None
        request.num_loads += 1
        self._wait_for_transfer(request, transfer_id)
        return Admission.LOADING

    def _wait_for_transfer(self, request: Request, transfer_id: int) -> None:
        transition(request, RequestStatus.LOADING)
        self._loading.setdefault(transfer_id, []).append(request)

    # -- loads ---------------------------------------------------------------------------------------------------------
    @property
    def num_loading(self) -> int:
        """Requests that wait for a transfer."""
        return sum(request.status is RequestStatus.LOADING for waiters in self._loading.values() for request in waiters)

    def end_loads(self, ended: Iterable[EndedTransfer]) -> Iterator[Request]:
        """Requests that waited for these loads, and still do; what arrived is now a local hit."""
        for end in ended:
            transfer = end.transfer
            for request in self._loading.pop(transfer.transfer_id, ()):
                if request.status is not RequestStatus.LOADING:
                    continue
                request.num_loaded_tokens += end.num_blocks_ok * self._kv.block_size
                if end.num_blocks_ok < len(transfer.block_ids):
                    request.may_load = False  # the failed tail is computed; asking again could go on for ever
                yield request
