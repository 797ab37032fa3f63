"""A simulated node: real block pool and cache manager, steps and transfers that only take virtual time.

As the engine does it: waiting requests hold no blocks; prompts are computed in chunks, first come first served, in steps that
all decoding requests share; blocks are named once they are computed; who needs a block that another request is computing waits
for it. Simpler than the engine: a request gets all blocks that it will need at admission, and steps in which nothing is computed
are simulated at once up to the next request's end or arrival. Driven by VirtualCluster; knows no router and no policy.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from dataclasses import dataclass, field

from bench.router.cost_model import CostModel
from bench.router.trace import BLOCK_TOKENS
from bench.router.virtual_store import VirtualStore
from core.blocks_in_progress import BlocksInProgress
from core.kv.block_pool import BlockPool
from core.kv.kv_events import KVChanges, KVEventLog
from core.kv_cache_manager import KVCacheManager
from core.request import Request, RequestStage
from core.wire.messages import NodeCosts, NodeLoad

STORE_MEDIUM = "store"  # what the shared store is called in events


@dataclass(slots=True, eq=False)
class Job:
    """One dispatch of one request.

    num_sent_blocks: leading blocks that can be had over the link, from the node that computed them.
    num_hit_tokens is what was in the pool, or came from the store, when its computing began.
    """

    order: int
    wire_id: str
    request: Request
    num_output_tokens: int
    num_sent_blocks: int = 0
    num_loaded_blocks: int = 0
    may_load: bool = True
    num_hit_tokens: int = 0
    num_stored_tokens: int = 0  # of these, what came from the store

    @property
    def num_known_tokens(self) -> int:
        """Prompt, and the first output token where another node has sampled it."""
        return len(self.request.token_ids)


@dataclass(frozen=True, slots=True)
class NodeNews:
    """What a node tells the router at one moment: requests with a first token, requests that ended, changes of its cache."""

    first_tokens: list[Job]
    finished: list[Job]
    changes: KVChanges | None


@dataclass(slots=True)
class _Step:
    """num_steps equal steps from started_s on; chunks: how many tokens of which jobs the first one computes."""

    started_s: float
    step_s: float
    num_steps: int = 1
    chunks: list[tuple[Job, int]] = field(default_factory=list)

    @property
    def end_s(self) -> float:
        return self.started_s + self.step_s * self.num_steps


class VirtualNode:
    """One node. next_event_s: when on_time has something to do; None while nothing is there to be done."""

    def __init__(
        self, node_id: str, role: str, num_blocks: int, max_num_seqs: int, costs: CostModel, store: VirtualStore | None = None
    ) -> None:
        self.node_id = node_id
        self.role = role
        self.max_num_seqs = max_num_seqs
        self.pool = BlockPool(num_blocks)
        self._event_log = KVEventLog(self.pool.cached_hashes, num_blocks, STORE_MEDIUM)
        self.pool.event_log = self._event_log
        self.manager = KVCacheManager(self.pool, BLOCK_TOKENS)
        self._costs = costs
        self._store = store
        self._in_progress = BlocksInProgress()
        self._waiting: list[tuple[int, Job]] = []  # by order
        self._computing: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  # heap: by the step that ends it
        self._loading: list[tuple[float, int, Job, list[int]]] = []  # heap: by the load's end
        self._link_free_s = 0.0
        self._step: _Step | None = None
        self._num_steps = 0
        self._num_read_tokens = 0  # of all decoding requests
        self.last_decode_step_ms = 0.0

    # -- inputs --------------------------------------------------------------------------------------------------------
    def add(self, job: Job, now_s: float) -> None:
        """A request arrived."""
        bisect.insort(self._waiting, (job.order, job))
        if self._step is None:
            self._begin_step(now_s)
        elif not self._step.chunks:
            self._cut_step(now_s)

    def on_time(self, now_s: float) -> NodeNews:
        """Do what is due at now_s (which is next_event_s)."""
        while self._loading and self._loading[0][0] <= now_s:
            self._end_load(now_s)
        first_tokens: list[Job] = []
        finished: list[Job] = []
        if self._step is not None and self._step.end_s <= now_s:
            self._end_step(self._step, first_tokens, finished)
        if self._step is None:
            self._begin_step(now_s)
        return NodeNews(first_tokens, finished, self._event_log.take())

    # -- queries -------------------------------------------------------------------------------------------------------
    def measured_costs(self) -> NodeCosts:
        """As a heartbeat tells them: a real node's measurements come to the same."""
        costs = self._costs
        return NodeCosts(
            prefill_overhead_ms=costs.step_overhead_ms,
            prefill_ms_per_token=costs.ms_per_token,
            prefill_ms_per_attended=costs.ms_per_attended,
            load_latency_ms=costs.transfer_latency_ms,
            load_ms_per_block=costs.link_ms_per_block if self._store is None else costs.store_ms_per_block,
            decode_step_ms=self.last_decode_step_ms,
        )

    @property
    def next_event_s(self) -> float | None:
        """When on_time is due."""
        times = [self._loading[0][0]] if self._loading else []
        if self._step is not None:
            times.append(self._step.end_s)
        return min(times, default=None)

    def load(self) -> NodeLoad:
        """As a heartbeat tells it."""
        waiting = [job for _order, job in self._waiting] + [entry[2] for entry in self._loading]
        num_left = sum(job.num_known_tokens - job.request.num_written_tokens for job in self._computing)
        return NodeLoad(
            num_running=len(self._computing) + len(self._decoding),
            num_waiting=len(waiting),
            num_waiting_tokens=num_left + sum(job.num_known_tokens for job in waiting),
            kv_usage=1.0 - self.pool.num_free / self.pool.num_blocks,
        )

    @property
    def is_idle(self) -> bool:
        """True when nothing is waiting, loading, computing or decoding."""
        return not (self._waiting or self._loading or self._computing or self._decoding)

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _begin_step(self, now_s: float) -> None:
        self._admit(now_s)
        budget, chunks, step_ms = self._costs.step_tokens, [], self._costs.decode_step_ms(self._num_read_tokens)
        for job in self._computing:
            written = job.request.num_written_tokens
            num_tokens = min(budget, job.num_known_tokens - written)
            chunks.append((job, num_tokens))
            step_ms += self._costs.compute_ms(num_tokens, written)
            budget -= num_tokens
            if budget == 0:
                break
        if chunks:
            self._step = _Step(now_s, step_ms / 1000, 1, chunks)
        elif self._decoding:
            self.last_decode_step_ms = step_ms
            self._step = _Step(now_s, step_ms / 1000, self._decoding[0][0] - self._num_steps)

    def _cut_step(self, now_s: float) -> None:
        """Somebody arrived: the steps end with the one that runs now."""
        assert self._step is not None
        num_begun = int((now_s - self._step.started_s) / self._step.step_s) + 1
        self._step.num_steps = min(self._step.num_steps, num_begun)

    def _end_step(self, step: _Step, first_tokens: list[Job], finished: list[Job]) -> None:
        self._step = None
        self._num_steps += step.num_steps
        for job, num_tokens in step.chunks:
            request = job.request
            request.num_written_tokens += num_tokens
            self.manager.commit(request)
            self._in_progress.announce_next(request)
            if request.num_written_tokens == job.num_known_tokens:
                self._computing.remove(job)
                first_tokens.append(job)
                self._in_progress.withdraw(request)
                self._save(job)
                if request.stage is RequestStage.PREFILL or job.num_output_tokens <= request.num_output_tokens + 1:
                    self._finish(job, finished)
                    continue
                num_steps_left = job.num_output_tokens - request.num_output_tokens - 1
                self._num_read_tokens += job.num_known_tokens
                heapq.heappush(self._decoding, (self._num_steps + num_steps_left, job.order, job))
        while self._decoding and self._decoding[0][0] <= self._num_steps:
            _step, _order, job = heapq.heappop(self._decoding)
            self._num_read_tokens -= job.num_known_tokens
            job.request.num_written_tokens = job.request.num_prompt_tokens + job.num_output_tokens - 1
            self.manager.commit(job.request)
            self._save(job)
            self._finish(job, finished)

    def _finish(self, job: Job, finished: list[Job]) -> None:
        self.manager.release(job.request)
        finished.append(job)

    def _save(self, job: Job) -> None:
        if self._store is not None:
            block_hashes = job.request.block_hashes[: job.request.num_committed_blocks]
            evicted = self._store.use(reversed(block_hashes))  # a prefix outlives its tail
            self._event_log.note_store(evicted, is_stored=False)
            self._event_log.note_store(block_hashes, is_stored=True)

    # -- admission and loads -------------------------------------------------------------------------------------------
    def _admit(self, now_s: float) -> None:
        """Start waiting requests in their order while the step has room; the first that does not fit holds up those behind it."""
        num_waiting_tokens = sum(job.num_known_tokens - job.request.num_written_tokens for job in self._computing)
        place = 0
        while place < len(self._waiting) and num_waiting_tokens < self._costs.step_tokens:
            if len(self._computing) + len(self._decoding) >= self.max_num_seqs:
                return
            job = self._waiting[place][1]
            request = job.request
            hit_block_ids = self.manager.find_local_hit(request)
            if self.manager.next_hit_hash(request, len(hit_block_ids)) in self._in_progress:
                place += 1
                continue
            if (num_blocks := self._num_to_load(job, len(hit_block_ids))) > 0:
                block_ids = self.manager.try_allocate_for_load(request, hit_block_ids, num_blocks)
                if block_ids is None:
                    return
                del self._waiting[place]
                self._start_load(job, len(hit_block_ids), block_ids, now_s)
                continue
            num_total = request.num_prompt_tokens + job.num_output_tokens * (request.stage is RequestStage.DECODE)
            if not self.manager.try_allocate_table(request, hit_block_ids, num_total):
                return
            del self._waiting[place]
            request.num_written_tokens = job.num_hit_tokens = len(hit_block_ids) * BLOCK_TOKENS
            num_waiting_tokens += job.num_known_tokens - request.num_written_tokens
            self._in_progress.announce_next(request)
            self._computing.append(job)

    def _num_to_load(self, job: Job, num_hit_blocks: int) -> int:
        """Blocks behind the hit to load rather than compute: over the link whatever is there, from a store when it is faster."""
        if not job.may_load:
            return 0
        max_hit_blocks = self.manager.max_hit_blocks(job.request)
        if job.num_sent_blocks:
            return min(job.num_sent_blocks, max_hit_blocks) - num_hit_blocks
        if self._store is None:
            return 0
        num_blocks = self._store.num_leading(job.request.block_hashes[:max_hit_blocks]) - num_hit_blocks
        if num_blocks <= 0:
            return 0
        load_ms = self._costs.transfer_latency_ms + num_blocks * self._costs.store_ms_per_block
        compute_ms = self._costs.compute_ms(num_blocks * BLOCK_TOKENS, num_hit_blocks * BLOCK_TOKENS)
        return num_blocks if load_ms <= compute_ms else 0

    def _start_load(self, job: Job, num_hit_blocks: int, block_ids: list[int], now_s: float) -> None:
        per_block_ms = self._costs.link_ms_per_block if job.num_sent_blocks else self._costs.store_ms_per_block
        job.num_loaded_blocks = num_hit_blocks + len(block_ids)
        if not job.num_sent_blocks:
            job.num_stored_tokens = len(block_ids) * BLOCK_TOKENS
        begins_s = max(now_s, self._link_free_s)
        self._link_free_s = begins_s + (self._costs.transfer_latency_ms + len(block_ids) * per_block_ms) / 1000
        heapq.heappush(self._loading, (self._link_free_s, job.order, job, block_ids))

    def _end_load(self, now_s: float) -> None:
        _end_s, _order, job, block_ids = heapq.heappop(self._loading)
        first = job.num_loaded_blocks - len(block_ids)
        for block_id, name in zip(block_ids, job.request.block_hashes[first : job.num_loaded_blocks], strict=True):
            self.pool.set_hash(block_id, name)
        self.pool.release_references(reversed(block_ids))
        job.may_load = False
        self.add(job, now_s)
