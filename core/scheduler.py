"""Which tokens are computed in the next step, and what a step's result means for its requests.

There is no prefill phase and no decode phase: a request has num_computed_tokens and num_tokens_with_spec, and each step lets the
first catch up with the second under a token budget. A step may be scheduled while the one before it still runs; what that one
will sample is counted, not known. Loads, saves and the store are the ledger's business. Step thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.adapter_gate import AdapterGate
from core.admission import Admission, AdmissionControl
from core.blocks_in_progress import BlocksInProgress
from core.clock import Clock
from core.config import EngineOptions
from core.constrained import ConstrainedRequests
from core.drafter import DraftedRequests, Drafter
from core.kv.ledger import EndedTransfer, TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.request import FinishReason, Request, RequestStage, RequestStatus, transition
from core.stats import EngineStats
from core.step import NewRequest, StepPlan, StepResult
from core.step_output import FinishedRequest, StepOutput, find_end
from core.waiting_queue import WaitingQueue


class Scheduler:
    """Owns every request's state from add_request to its end."""

    def __init__(
        self,
        options: EngineOptions,
        kv: KVCacheManager,
        ledger: TransferLedger,
        clock: Clock,
        stats: EngineStats,
        drafter: Drafter | None = None,
        grammars: ConstrainedRequests | None = None,
        adapters: AdapterGate | None = None,
    ) -> None:
        """drafter: proposes tokens for requests that decode; then a step needs the tokens of the one before it. grammars,
        adapters: None where no request may have one.
        """
        self._options = options
        self._kv = kv
        self._ledger = ledger
        self._clock = clock
        self._stats = stats
        self._drafts = DraftedRequests(drafter, stats, options.speculative_disable_by_batch_size) if drafter else None
        self._adapters = adapters or AdapterGate(None, 0, 0, 0)
        self._looks_ahead = options.overlaps_steps and drafter is None
        self._grammars = grammars
        self._constrained: list[Request] = []  # those running with a grammar, after schedule()
        self.must_settle = False  # what stands in the next step's way goes when the steps in flight are done
        self.needs_last_tokens = not self._looks_ahead  # of a running request: then no step is scheduled ahead
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []  # in order of admission
        self._waiting = WaitingQueue()
        self._num_undecided = 0
        self._next_arrival_index = 0
        self._next_step_id = 0
        self._in_progress = BlocksInProgress()
        self._admissions = AdmissionControl(options, kv, ledger, clock, self._in_progress)
        self._finished_request_ids: list[str] = []  # since the last plan, for the runner
        self._num_common_prefix_blocks = 0
        self._is_batch_changed = True

    # -- intake --------------------------------------------------------------------------------------------------------
    def add_request(self, request: Request) -> None:
        """Queue a new request. Its id must be unused."""
        assert request.request_id not in self.requests, f"{request.request_id} is already here"
        request.arrival_index = self._next_arrival_index
        self._next_arrival_index += 1
        request.rank = self._rank(request)
        self.requests[request.request_id] = request
        if len(self._waiting):
            self._admissions.ask_store_early(request)
        self._waiting.push(request)
        if request.awaits_grammar:
            assert self._grammars is not None
            self._grammars.start(request)

    def _rank(self, request: Request) -> float:
        """What its place in the queue is by: its priority where that counts, or with aging the moment at which that will be 0.

        Waiting for priority_aging_s raises a priority by one level, for all who wait alike: their order never changes, and this
        is computed once.
        """
        if self._options.policy == "fcfs":
            return 0.0
        if self._options.priority_aging_s == 0:
            return request.priority
        return request.priority * self._options.priority_aging_s + request.arrival_s

    def finish_request(self, request_id: str) -> bool:
        """End a request from outside (abort, deadline). False when it is not here. Its transfers end by themselves."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        self._drop_ended_from_running()
        return True

    # -- one step ------------------------------------------------------------------------------------------------------
    def schedule(self, output: StepOutput) -> StepPlan:
        """Choose the next step's tokens. News that needs no result (hits counted at admission) goes to `output`.

        Running requests come first, in order of admission; then waiting ones by (priority, arrival), none of which jumps the
        queue when the head does not fit. Hits cost no budget. num_computed_tokens is advanced here, so that the next step can
        be scheduled before this one's result is in. Every plan with tokens ends in update_from_output, fail_step or undo_step, in
        order.
        """
        budget = self._options.max_num_batched_tokens
        chunk_limit = self._options.long_prefill_token_threshold or budget
        num_scheduled: dict[str, int] = {}
        new_block_ids: dict[str, list[int]] = {}
        new_requests: list[NewRequest] = []
        drafts: dict[str, list[int]] = {}
        preempted: list[Request] = []
        block_size = self._kv.block_size
        looks_ahead = self._looks_ahead
        self.must_settle = False
        if self._grammars is not None and self._grammars.num_pending:
            self._take_grammars(output)

        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            num_tokens = request.num_tokens_with_spec - request.num_computed_tokens
            if num_tokens > 1:
                num_tokens = min(num_tokens, chunk_limit, budget)
            elif num_tokens == 0:  # its last token is not known yet
                index += 1
                continue
            num_needed = request.num_computed_tokens + num_tokens
            if num_needed > len(request.block_ids) * block_size:
                while (grown := self._kv.try_grow(request, num_needed)) is None:
                    if request.draft_token_ids:  # nobody loses a block to a guess
                        DraftedRequests.drop(request)
                        num_tokens, num_needed = 1, request.num_computed_tokens + 1
                        continue
                    victim = self._choose_victim(request)
                    if victim is None:
                        break
                    budget += num_scheduled.pop(victim.request_id, 0)
                    new_block_ids.pop(victim.request_id, None)
                    drafts.pop(victim.request_id, None)
                    index -= self.running.index(victim) < index
                    self._preempt(victim)
                    preempted.append(victim)
                    if victim is request:
                        break
                if grown is None:  # preempted itself, or all blocks are held by transfers and steps that will end: not now
                    index += request.status is RequestStatus.RUNNING
                    continue
                new_block_ids[request.request_id] = grown
            if num_tokens > 1 and request.draft_token_ids:
                del request.draft_token_ids[num_tokens - 1 :]
                drafts[request.request_id] = request.draft_token_ids
            num_scheduled[request.request_id] = num_tokens
            request.num_computed_tokens = num_needed
            if looks_ahead and num_needed == request.num_tokens_with_spec:
                self._count_next_token(request)
            budget -= num_tokens
            index += 1

        if self._adapters.has_released:
            self._unpark()
        stepped_aside: list[Request] = []
        max_num_seqs = self._options.max_num_seqs  # also bounds how many may step aside: a step must not look at a long queue
        may_admit = not preempted and self._admissions.may_admit(
            self._waiting.head_arrival_s(), is_anyone_running=bool(self.running)
        )
        while may_admit and budget > 0 and len(self.running) < max_num_seqs and len(stepped_aside) < max_num_seqs:
            waiting = self._waiting.pop()
            if waiting is None:
                break
            if waiting.adapter and not self._adapters.may_start(waiting):
                transition(waiting, RequestStatus.PARKED)
                self._adapters.park(waiting)
                continue
            admission, num_tokens = self._admissions.try_admit(waiting, budget, chunk_limit)
            if admission is Admission.ADMITTED:
                new_requests.append(self._start(waiting, output))
                num_scheduled[waiting.request_id] = num_tokens
                waiting.num_computed_tokens += num_tokens
                if looks_ahead and waiting.num_computed_tokens == waiting.num_tokens_with_spec:
                    self._count_next_token(waiting)
                budget -= num_tokens
            elif admission is Admission.UNDECIDED:
                stepped_aside.append(waiting)
            elif admission is Admission.NO_ROOM:
                self._waiting.push(waiting)
                break
        for waiting in stepped_aside:
            self._waiting.push(waiting)
        self._num_undecided = len(stepped_aside)

        if self._is_batch_changed:
            self._num_common_prefix_blocks = self._kv.num_common_prefix_blocks(self.running)
            self.needs_last_tokens = not looks_ahead or any(request.needs_last_token for request in self.running)
            self._constrained = [request for request in self.running if request.grammar is not None]
            self._is_batch_changed = False
        output.num_tokens = self._options.max_num_batched_tokens - budget
        plan = StepPlan(
            step_id=self._next_step_id,
            num_scheduled_tokens=num_scheduled,
            num_total_tokens=output.num_tokens,
            new_requests=new_requests,
            new_block_ids=new_block_ids,
            finished_request_ids=self._finished_request_ids,
            preempted_request_ids=[request.request_id for request in preempted],
            num_common_prefix_blocks=self._num_common_prefix_blocks,
            draft_token_ids=drafts,
        )
        if new_requests:
            self._admissions.note_started()
        if self._constrained:
            ConstrainedRequests.constrain(plan, self._constrained)
        if num_scheduled:
            self._kv.begin_step(plan.step_id)
        self._finished_request_ids = []
        self._next_step_id += 1
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult, output: StepOutput) -> None:
        """Apply a step's result: the only place where results move state. Requests that ended meanwhile are skipped."""
        self._kv.end_step(plan.step_id)
        requests = self.requests
        block_size = self._kv.block_size
        looks_ahead, drafts = self._looks_ahead, plan.draft_token_ids
        new_token_ids, first_index = output.new_token_ids, output.first_index
        num_generated = 0
        if result.prompt_logprobs:
            self._collect_prompt_logprobs(result, output)
        if result.logprobs:
            output.logprobs.update(result.logprobs)
        scheduled = plan.num_scheduled_tokens
        for request_id, num_tokens, sampled in zip(scheduled, scheduled.values(), result.sampled_token_ids, strict=True):
            request = requests.get(request_id)
            if request is None:
                continue
            request.num_written_tokens += num_tokens
            finished = None
            if sampled:
                token_ids = request.token_ids
                first_index[request_id] = len(token_ids) - request.num_prompt_tokens
                token_ids += sampled
                if len(token_ids) >= request.max_total_tokens or not request.stop_token_ids.isdisjoint(sampled):
                    finished, num_kept = find_end(request, len(sampled))
                    sampled = sampled[:num_kept]
                new_token_ids[request_id] = sampled
                num_generated += len(sampled)
                if self._drafts is not None and request_id in drafts:
                    self._drafts.roll_back(request, drafts[request_id], len(sampled))
                if not looks_ahead or request.needs_last_token:
                    request.num_tokens_with_spec = len(token_ids)
            if request.num_written_tokens - request.num_committed_blocks * block_size >= block_size:
                self._kv.commit(request)
                self._save_committed(request)
                self._in_progress.announce_next(request)
            if finished is not None:
                output.finished[request_id] = finished
                if request_id in output.logprobs:  # of drafts behind the end
                    output.logprobs[request_id] = output.logprobs[request_id][: len(sampled)]
                self._finish(request, finished.reason)
            elif sampled and self._drafts is not None and request.grammar is None:  # a grammar comes first
                self._drafts.propose(request, len(self.running))
        if self._constrained:
            num_generated += self._follow_grammars(plan, output)
        self._drop_ended_from_running()
        self._stats.num_generation_tokens += num_generated
        self._stats.step_generation_tokens = num_generated

    def _collect_prompt_logprobs(self, result: StepResult, output: StepOutput) -> None:
        """Gather them over the prompt's chunks; they go out once, complete. A preempted request starts over with them."""
        for request_id, logprobs in result.prompt_logprobs.items():
            request = self.requests.get(request_id)
            if request is None or request.num_output_tokens > 0:  # ended, or told before it was preempted
                continue
            request.prompt_logprobs += logprobs
            if len(request.prompt_logprobs) >= request.num_prompt_tokens - 1:
                output.prompt_logprobs[request_id] = request.prompt_logprobs

    def fail_step(self, plan: StepPlan, error: str, output: StepOutput) -> None:
        """The runner could not compute the plan: its requests end with an error, nothing they computed in it is kept."""
        self._kv.end_step(plan.step_id)
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None:
                output.finished[request_id] = FinishedRequest(FinishReason.ERROR, error=error)
                self._finish(request, FinishReason.ERROR)
        self._drop_ended_from_running()

    def undo_step(self, plan: StepPlan) -> None:
        """The runner has not seen the plan, since a step before it failed: those of its requests that are left start over."""
        if plan.num_total_tokens:
            self._kv.end_step(plan.step_id)
        self._finished_request_ids += plan.removed_request_ids
        for request_id in plan.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is not None and request.status is RequestStatus.RUNNING:  # not undone already, by another plan
                self._preempt(request)
                self._finished_request_ids.append(request_id)  # the runner may know it or not

    def on_transfers_ended(self, ended: Iterable[EndedTransfer]) -> None:
        """Requests that waited for these loads go back to their place in the queue."""
        for request in self._admissions.end_loads(ended):
            transition(request, RequestStatus.WAITING)
            self._waiting.push(request)

    # -- start ---------------------------------------------------------------------------------------------------------
    def _start(self, request: Request, output: StepOutput) -> NewRequest:
        """An admitted request joins the batch; what the runner must know of it."""
        transition(request, RequestStatus.RUNNING)
        self.running.append(request)
        if request.adapter:
            self._adapters.start(request)
        self._is_batch_changed = True
        self._in_progress.announce_next(request)
        num_hit_tokens = request.num_computed_tokens
        if request.num_cached_tokens is None:
            self._count_first_admission(request, num_hit_tokens)
            # Tokens that a grammar has forced meanwhile may be hits, too, but nobody outside knows them yet.
            output.num_cached_tokens[request.request_id] = min(num_hit_tokens, request.num_reported_tokens)
        return NewRequest(
            request.request_id,
            request.token_ids,
            request.num_prompt_tokens,
            num_hit_tokens,
            list(request.block_ids),  # which may grow before the runner reads it
            request.sampling,
            self._adapters.find(request.adapter),
        )

    def _unpark(self) -> None:
        """Requests whose adapters may have a place now go back to theirs in the queue."""
        for request in self._adapters.take_released():
            transition(request, RequestStatus.WAITING)
            self._waiting.push(request)

    def _count_first_admission(self, request: Request, num_hit_tokens: int) -> None:
        """Hits are counted once per request, here, whatever retries and preemptions follow."""
        stats = self._stats
        request.num_cached_tokens = num_hit_tokens
        num_external = min(request.num_loaded_tokens, num_hit_tokens)
        stats.num_prompt_tokens += request.num_tokens_with_spec
        if self._kv.enable_prefix_caching:
            stats.prefix_cache_query_tokens += request.num_tokens_with_spec
            stats.prefix_cache_hit_tokens += num_hit_tokens - num_external
            stats.external_query_tokens += request.num_tokens_with_spec - (num_hit_tokens - num_external)
            stats.external_hit_tokens += num_external
        stats.recomputed_prompt_tokens += request.num_tokens_with_spec - num_hit_tokens

    # -- tokens that are not known yet ---------------------------------------------------------------------------------
    @staticmethod
    def _count_next_token(request: Request) -> None:
        """A step will sample a token of the request: let the next step compute it, unless it is the last, or must be known."""
        if request.num_tokens_with_spec + 1 < request.max_total_tokens and not request.needs_last_token:
            request.num_tokens_with_spec += 1

    # -- grammars ------------------------------------------------------------------------------------------------------
    def _take_grammars(self, output: StepOutput) -> None:
        """Let requests go on whose grammar is there by now, or end them."""
        assert self._grammars is not None
        for request, finished in self._grammars.poll():
            request.awaits_grammar = False
            if finished is not None:
                self._stats.num_forced_tokens += self._grammars.report(request, output, 0)
                output.finished[request.request_id] = finished
                self._finish(request, finished.reason)

    def _follow_grammars(self, plan: StepPlan, output: StepOutput) -> int:
        """After a step's tokens were appended: what the grammars make of them. Returns how many tokens nobody sampled."""
        assert self._grammars is not None
        num_forced = 0
        for request in self._constrained:
            request_id = request.request_id
            sampled = output.new_token_ids.get(request_id) if request_id in plan.num_scheduled_tokens else None
            if sampled is None:
                continue
            finished = None
            if request.status is RequestStatus.RUNNING:
                finished = self._grammars.advance(request, sampled)
                if finished is None and self._drafts is not None and not request.num_untold_tokens:
                    self._drafts.propose(request, len(self.running))
                    finished = self._grammars.keep_valid_drafts(request)
            num_forced += self._grammars.report(request, output, len(sampled))
            if finished is not None:
                output.finished[request_id] = finished
                self._finish(request, finished.reason)
        self._stats.num_forced_tokens += num_forced
        return num_forced

    # -- preemption and end --------------------------------------------------------------------------------------------
    def _choose_victim(self, request: Request) -> Request | None:
        """The lowest-priority, then youngest running request whose blocks would come back now, `request` itself at the last.

        None: nobody who stands behind it holds blocks that would come back; transfers and those before it end, so it waits. So it
        does while steps are in flight, since no block comes back before they are done.
        """
        if self._kv.num_steps_in_flight:
            self.must_settle = True
            return None
        if self.running == [request]:
            return None
        for candidate in sorted(self.running, key=lambda candidate: candidate.schedule_key, reverse=True):
            if self._kv.num_freed_by_release(candidate) > 0:
                return candidate
            if candidate is request:
                break
        return None

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it starts over from what the prefix cache then still has."""
        self.running.remove(request)
        self._kv.release(request)
        if request.adapter:
            self._adapters.end(request)
        self._in_progress.withdraw(request)
        request.num_computed_tokens = request.num_written_tokens = 0
        request.draft_token_ids = []
        request.num_untold_tokens = 0
        request.num_tokens_with_spec = len(request.token_ids)
        request.prompt_logprobs = []
        request.may_load = True
        request.num_loads = 0
        transition(request, RequestStatus.WAITING)
        self._waiting.push(request)
        self._stats.num_preemptions += 1
        self._is_batch_changed = True

    def try_reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget cached KV. Declines while blocks are in use, unless forced: then running requests are preempted first.

        No step may be in flight when it is forced.
        """
        if force:
            for request in list(self.running):
                self._preempt(request)
                self._finished_request_ids.append(request.request_id)  # the runner forgets it too
        return self._kv.pool.try_reset_hashes()

    def _finish(self, request: Request, reason: FinishReason) -> None:
        was = request.status
        transition(request, RequestStatus.FINISHED)
        if was is RequestStatus.WAITING:
            self._waiting.drop_one()
        elif was is RequestStatus.PARKED:
            self._adapters.discard(request)
        elif was is RequestStatus.RUNNING:
            if request.adapter:
                self._adapters.end(request)
            self._is_batch_changed = True
            self._finished_request_ids.append(request.request_id)
        self._kv.release(request)
        self._in_progress.withdraw(request)
        if self._drafts is not None:
            self._drafts.forget(request)
        del self.requests[request.request_id]
        counts = self._stats.requests_finished
        counts[reason.value] = counts.get(reason.value, 0) + 1

    def _drop_ended_from_running(self) -> None:
        if self._is_batch_changed:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _save_committed(self, request: Request) -> None:
        """Hand newly full blocks to the store, while later chunks are still being computed."""
        last = request.num_committed_blocks
        if request.stage is RequestStage.DECODE and not self._options.save_decode_blocks:
            last = min(last, request.num_prompt_tokens // self._kv.block_size)
        first = request.num_saved_blocks
        if last > first and self._kv.enable_prefix_caching:
            request.num_saved_blocks = last
            self._ledger.start_save(request.request_id, request.block_ids[first:last], request.block_hashes[first:last])

    # -- what is going on ----------------------------------------------------------------------------------------------
    @property
    def num_waiting(self) -> int:
        """Requests that are queued or parked, and not loading."""
        return len(self._waiting) + self._adapters.num_parked

    def record_gauges(self) -> None:
        """Write the queue's and the pool's present state to the stats."""
        stats, pool = self._stats, self._kv.pool
        num_loading = self._admissions.num_loading
        stats.num_running = len(self.running)
        num_parked, first_parked = self._adapters.num_parked, self._adapters.first_parked
        stats.num_waiting = len(self._waiting) + num_parked + num_loading
        stats.waiting_by_reason = {
            "capacity": len(self._waiting) - self._num_undecided,
            "loading": num_loading,
            "constraint": self._num_undecided,
            "lora": num_parked,
        }
        head_s = self._waiting.head_arrival_s()
        if first_parked is not None and (head_s is None or first_parked.arrival_s < head_s):
            head_s = first_parked.arrival_s
        stats.oldest_waiting_age_s = 0.0 if head_s is None else self._clock.now_s() - head_s
        stats.num_blocks_total = pool.num_blocks
        stats.num_blocks_free = pool.num_free
        stats.num_blocks_cached = pool.num_cached_free
        stats.kv_usage_ratio = 1.0 - pool.num_free / pool.num_blocks
