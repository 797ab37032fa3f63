"""One engine: scheduler, KV manager, ledger and model runner, advanced by step().

Everything that touches the outside world (runner, connector, clock) is passed in. No sockets; whoever owns the engine calls it
from one thread. Where steps overlap, the model runs on another, while this one schedules the next step.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from core.adapter_gate import AdapterGate
from core.clock import Clock
from core.config import EngineOptions
from core.constrained import ConstrainedRequests
from core.drafter import Drafter, create_drafter
from core.engine_model import EngineModel
from core.errors import ConfigError, InvalidInputError, OverloadedError
from core.grammar import GrammarCompiler
from core.kv.block_pool import BlockPool
from core.kv.connector import KVConnector
from core.kv.kv_events import KVChanges, KVEventLog
from core.kv.ledger import TransferLedger
from core.kv.load_cost import MeasuredCosts
from core.kv_cache_manager import KVCacheManager
from core.request import FinishReason, Request, RequestStage, RequestStatus
from core.sampling_params import SamplingParams
from core.scheduler import Scheduler
from core.stats import EngineStats
from core.step import AdapterStore, ModelRunner, StepPlan
from core.step_output import FinishedRequest, StepOutput
from core.steps_in_flight import StepOutcome, StepsInFlight

_RETRY_AFTER_S = 1.0
_MAX_HANDOFF_WAIT_S = 0.05  # per handoff, once


@dataclass(slots=True)
class _Handoff:
    """A prefill-stage request whose blocks are not all visible in the store yet; ended_s: since when it has ended."""

    num_tokens: int
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Audit:
    """What an engine still holds. problems: sentences about counts that do not add up; empty when all is accounted for."""

    counts: dict[str, int]
    problems: tuple[str, ...]


class EngineCore:
    """Serves requests over a pool of num_blocks blocks that the runner and the connector were given."""

    def __init__(
        self,
        options: EngineOptions,
        model: EngineModel,
        num_blocks: int,
        runner: ModelRunner,
        connector: KVConnector | None,
        clock: Clock,
        *,
        drafter: Drafter | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None,
        has_model_thread: bool = False,
    ) -> None:
        """drafter: instead of the one that the options name. grammar_compiler: for structured output; None refuses it. It is
        closed with the engine. adapters: the runner's; None: it takes none. has_model_thread: the runner is called on a thread of
        its own, so that steps that overlap do so in time; else the runner is called when a result is asked for.
        """
        if num_blocks * options.block_size < model.max_model_len:
            raise ConfigError(
                "engine.num_blocks",
                num_blocks,
                f"at least {-(-model.max_model_len // options.block_size)} for model.max_model_len {model.max_model_len}; "
                "raise engine.kv_pool_mib or engine.num_blocks, or lower model.max_model_len",
            )
        self.options = options
        self.model = model
        self.stats = EngineStats()
        self._clock = clock
        self._connector = connector
        self._pool = BlockPool(num_blocks)
        self._kv = KVCacheManager(self._pool, options.block_size, options.enable_prefix_caching)
        self._ledger = TransferLedger(
            connector,
            self._pool,
            clock,
            self.stats,
            block_size=options.block_size,
            block_bytes=model.layout.block_bytes,
            load_timeout_s=options.kv_load_timeout_s,
            save_timeout_s=options.kv_save_timeout_s,
            always_load=options.kv_load_policy == "always",
        )
        self._grammar_compiler = grammar_compiler
        grammars = ConstrainedRequests(grammar_compiler, jumps=options.jump_decoding) if grammar_compiler else None
        self.adapters = AdapterGate(adapters, options.max_loras, options.max_cpu_loras, max_passes=options.max_num_seqs)
        drafter = drafter or create_drafter(options)
        self._scheduler = Scheduler(options, self._kv, self._ledger, clock, self.stats, drafter, grammars, self.adapters)
        self._steps = StepsInFlight(runner, clock, on_thread=has_model_thread)
        self._news: StepOutput | None = None  # of a step that was finished outside step()
        self._deadlines: list[tuple[float, str]] = []  # a heap; entries of ended requests are skipped
        self._handoffs: dict[str, _Handoff] = {}

    # -- intake --------------------------------------------------------------------------------------------------------
    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        stage: RequestStage = RequestStage.DECODE,
        priority: int = 0,
        cache_salt: str = "",
        time_left_s: float = float("inf"),
        kv_sources: tuple[str, ...] = (),
        adapter: str = "",
    ) -> None:
        """Queue a request. output_token_ids: tokens that were sampled elsewhere already.

        Raises InvalidInputError when it can never be served, OverloadedError when the queue is full. time_left_s: seconds until
        it ends with an error. adapter: see Request.adapter.
        """
        self._check_request(request_id, prompt_token_ids, output_token_ids, sampling)
        if adapter and not self.adapters.is_known(adapter):
            raise InvalidInputError("adapter", adapter, "one that was loaded here")
        if math.isnan(time_left_s):  # would spoil the order of all deadlines
            raise InvalidInputError("time_left_s", time_left_s, "a number of seconds")
        if self._scheduler.num_waiting >= self.options.max_num_waiting:
            raise OverloadedError(f"{self._scheduler.num_waiting} requests are waiting already", _RETRY_AFTER_S)
        now_s = self._clock.now_s()
        num_prompt = len(prompt_token_ids)
        num_known = num_prompt + len(output_token_ids)
        limit = num_known + 1 if stage is RequestStage.PREFILL else num_prompt + sampling.max_tokens
        eos_token_ids = () if sampling.ignore_eos else self.model.eos_token_ids
        request = Request(
            request_id=request_id,
            token_ids=[*prompt_token_ids, *output_token_ids],
            num_prompt_tokens=num_prompt,
            sampling=sampling,
            stage=stage,
            priority=priority,
            arrival_s=now_s,
            deadline_s=now_s + time_left_s,
            root_hash=self.model.namespace.root_hash(cache_salt, bytes.fromhex(adapter)),
            adapter=adapter,
            kv_sources=kv_sources,
            stop_token_ids=frozenset((*eos_token_ids, *sampling.stop_token_ids)),
            max_total_tokens=min(limit, self.model.max_model_len),
            needs_last_token=sampling.grammar is not None,
            awaits_grammar=sampling.grammar is not None,
        )
        if stage is RequestStage.PREFILL:
            self._handoffs[request_id] = _Handoff(num_known)
        if request.deadline_s != float("inf"):
            heapq.heappush(self._deadlines, (request.deadline_s, request_id))
        self._scheduler.add_request(request)

    def has_request(self, request_id: str) -> bool:
        """True from add_request until the request has ended."""
        return request_id in self._scheduler.requests

    def abort_request(self, request_id: str) -> bool:
        """End a request without further news of it; False when it is not here. Its transfers end by themselves."""
        self._handoffs.pop(request_id, None)
        return self._scheduler.finish_request(request_id)

    def abort_all(self) -> int:
        """End every request without further news; how many there were."""
        request_ids = list(self._scheduler.requests)
        for request_id in request_ids:
            self.abort_request(request_id)
        self._handoffs.clear()
        return len(request_ids)

    def _check_request(
        self, request_id: str, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], sampling: SamplingParams
    ) -> None:
        if request_id in self._scheduler.requests:
            raise InvalidInputError("request_id", request_id, "an id that is not in use")
        if not prompt_token_ids:
            raise InvalidInputError("prompt", [], "at least one token")
        num_known = len(prompt_token_ids) + len(output_token_ids)
        if num_known >= self.model.max_model_len:
            raise InvalidInputError("prompt", f"{num_known} tokens", f"fewer than {self.model.max_model_len} tokens")
        for token_ids in (prompt_token_ids, output_token_ids):
            if token_ids and (min(token_ids) < 0 or max(token_ids) >= self.model.vocab_size):
                raise InvalidInputError("prompt", "a token id out of range", f"token ids from 0 to {self.model.vocab_size - 1}")
        if len(output_token_ids) >= sampling.max_tokens:
            raise InvalidInputError("max_tokens", sampling.max_tokens, f"more than the {len(output_token_ids)} tokens there are")
        sampling.validate(self.model.vocab_size)
        if sampling.grammar is not None and self._grammar_compiler is None:
            raise InvalidInputError("grammar", sampling.grammar.text, "absent: this engine was started without grammars")

    # -- stepping ------------------------------------------------------------------------------------------------------
    def has_work(self) -> bool:
        """True while a step could bring news: a request is here, or a step, a transfer or an adapter is on its way."""
        is_busy = self._steps or self._ledger.num_in_flight or self._handoffs or self.adapters.has_news or self._news
        return bool(self._scheduler.requests or is_busy)

    def step(self) -> StepOutput:
        """Settle ended transfers, schedule a step if there is anything to compute, and apply the result of one.

        Where steps overlap, that is the result of the step before: the next one is scheduled while it runs.
        """
        if self._news is not None:
            output, self._news = self._news, None
            return output
        output = StepOutput()
        started_s = self._clock.now_s()
        self._expire(started_s, output)
        if self.adapters.has_news:
            self._settle_adapters(output)
        self._settle_transfers()
        self.stats.step_prompt_tokens = self.stats.step_generation_tokens = 0
        has_begun = False
        if self._may_schedule():
            plan = self._scheduler.schedule(output)
            has_begun = bool(plan.num_total_tokens or plan.removed_request_ids)
            if has_begun:
                self._steps.begin(plan, self._num_attended(plan) if _is_mostly_prompt(plan) else 0.0)
            self._add_step_seconds("schedule", self._clock.now_s() - started_s)
        if self._steps and not (has_begun and self._may_schedule()):
            self._finish_step(output)
        self._report_handoffs(output)
        self._record_step_gauges()
        return output

    def _may_schedule(self) -> bool:
        """Whether the next step need not wait for the results of those in flight."""
        scheduler = self._scheduler
        return not self._steps or not (len(self._steps) > 1 or scheduler.needs_last_tokens or scheduler.must_settle)

    def _finish_step(self, output: StepOutput) -> None:
        """Wait for the oldest step in flight and apply its result."""
        outcome = self._steps.finish()
        finished_s = self._clock.now_s()
        plan, num_tokens = outcome.plan, outcome.plan.num_total_tokens
        output.num_tokens = max(output.num_tokens, num_tokens)
        if outcome.result is None:
            self._fail_steps(outcome, output)
        elif num_tokens:
            self._scheduler.update_from_output(plan, outcome.result, output)
            self.stats.step_prompt_tokens = max(0, num_tokens - self.stats.step_generation_tokens)
            if _is_mostly_prompt(plan):
                self._ledger.cost.observe_prefill(num_tokens, outcome.num_attended, outcome.duration_s)
            elif num_tokens <= len(plan.num_scheduled_tokens) * (1 + self.options.num_speculative_tokens):
                self._ledger.cost.observe_decode(outcome.duration_s)
        self._add_step_seconds("execute", outcome.duration_s)
        self._add_step_seconds("update", self._clock.now_s() - finished_s)
        self.stats.num_steps += 1

    def _fail_steps(self, failed: StepOutcome, output: StepOutput) -> None:
        """Those in flight after a failed one build on it, and were skipped."""
        outcomes = [failed]
        while self._steps:
            outcomes.append(self._steps.finish())
        for outcome in outcomes:
            if outcome.was_skipped:
                self._scheduler.undo_step(outcome.plan)
            elif outcome.plan.num_total_tokens:
                self._scheduler.fail_step(outcome.plan, outcome.error, output)

    def settle(self) -> StepOutput:
        """Settle ended transfers without computing anything: what they brought, prompts handed over above all."""
        output = StepOutput()
        self._settle_transfers()
        self._report_handoffs(output)
        return output

    def handoff_wait_s(self) -> float:
        """How long the next step should wait for saves that complete a handoff: they take milliseconds, a step may take seconds.

        0 when there is none, or when each has had its time. Whoever owns the loop waits, and calls settle() meanwhile.
        """
        ended_s = [handoff.ended_s for handoff in self._handoffs.values() if handoff.ended_s is not None]
        if not ended_s:
            return 0.0
        return max(0.0, max(ended_s) + _MAX_HANDOFF_WAIT_S - self._clock.now_s())

    def _num_attended(self, plan: StepPlan) -> float:
        """The sum of the positions of all tokens of a step: what attention has to look at."""
        ends = ((self._scheduler.requests[name].num_computed_tokens, num) for name, num in plan.num_scheduled_tokens.items())
        return sum(num_tokens * (end - num_tokens / 2) for end, num_tokens in ends)

    def _expire(self, now_s: float, output: StepOutput) -> None:
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _deadline_s, request_id = heapq.heappop(self._deadlines)
            request = self._scheduler.requests.get(request_id)
            if request is not None and request.deadline_s <= now_s:
                self.abort_request(request_id)
                output.finished[request_id] = FinishedRequest(FinishReason.ERROR, error="deadline exceeded")

    def _settle_adapters(self, output: StepOutput) -> None:
        """Requests that wait for an adapter which cannot be had end with the reason."""
        output.adapter_loads = self.adapters.poll()
        for load in output.adapter_loads:
            for request in list(self._scheduler.requests.values()) if load.error else ():
                if request.adapter == load.adapter and request.status is not RequestStatus.RUNNING:
                    self.abort_request(request.request_id)
                    output.finished[request.request_id] = FinishedRequest(FinishReason.ERROR, error=load.error)

    def _settle_transfers(self) -> None:
        ended = self._ledger.poll()
        if ended:
            self._scheduler.on_transfers_ended(ended)

    def _report_handoffs(self, output: StepOutput) -> None:
        """A prefill-stage request is done when it has ended and the ledger has no save of it that still could become visible, or
        when waiting for that has taken as long as computing it again will."""
        now_s = self._clock.now_s()
        for request_id, handoff in list(self._handoffs.items()):
            if request_id in self._scheduler.requests:
                continue
            if handoff.ended_s is None:
                handoff.ended_s = now_s
            is_saved = not self._ledger.num_saves_of(request_id)
            if is_saved or now_s - handoff.ended_s >= self._ledger.patience_s(handoff.num_tokens, 0):
                del self._handoffs[request_id]
                output.prefill_done.append(request_id)

    def _add_step_seconds(self, phase: str, duration_s: float) -> None:
        self.stats.step_seconds[phase] = self.stats.step_seconds.get(phase, 0.0) + duration_s

    # -- KV events -----------------------------------------------------------------------------------------------------
    def watch_kv(self, *, is_on: bool) -> None:
        """Record which blocks come and go from now on (anew: the first changes are everything there is), or no longer."""
        log = None
        if is_on:
            medium = self._connector.name if self._connector is not None else ""
            log = KVEventLog(self._pool.cached_hashes, self._pool.num_blocks, medium)
        self._pool.event_log = self._ledger.event_log = log

    def take_kv_changes(self) -> KVChanges | None:
        """What changed since the last call; None when nothing did, or nobody watches."""
        return self._pool.event_log.take() if self._pool.event_log is not None else None

    def measured_costs(self) -> MeasuredCosts:
        """What prefilling, loading and decoding take here, learned online."""
        return self._ledger.cost.measured()

    # -- health --------------------------------------------------------------------------------------------------------
    def num_waiting_tokens(self) -> int:
        """Tokens of requests here that are not computed yet."""
        return sum(r.num_tokens_with_spec - r.num_computed_tokens for r in self._scheduler.requests.values())

    def record_gauges(self) -> None:
        """Bring the stats' gauges up to date, also for what happened between steps, and copy the connector's own counts."""
        self._record_step_gauges()
        if self._connector is not None:
            store = self._connector.stats()
            self.stats.store_bytes = store.store_bytes
            self.stats.store_is_reachable = store.is_reachable
            self.stats.circuit_is_open = self._ledger.is_circuit_open
            complaint = store.complaint or self._ledger.complaint
            self.stats.store_complaint = " ".join(complaint.encode(errors="replace").decode().split())[:512]
            self.stats.store_blocks = store.store_blocks
            self.stats.store_evictions = store.num_evictions
            self.stats.tier_is_reachable = {tier.name: int(tier.is_reachable) for tier in store.tiers}
            self.stats.tier_blocks = {tier.name: tier.store_blocks for tier in store.tiers}
            self.stats.tier_hit_blocks = {tier.name: tier.num_hit_blocks for tier in store.tiers}

    def _record_step_gauges(self) -> None:
        self._scheduler.record_gauges()
        self.stats.num_adapters, self.stats.num_adapter_loads = self.adapters.num_resident, self.adapters.num_loads
        self.stats.num_transfers_in_flight = self._ledger.num_in_flight

    def audit(self) -> Audit:
        """Account for every block reference: each belongs to a request's table, a transfer or a step, else it leaked."""
        requests = self._scheduler.requests.values()
        num_table_references = sum(len(request.block_ids) for request in requests)
        counts = {
            "requests": len(requests),
            "blocks_used": self._pool.num_blocks - self._pool.num_free,
            "block_references": self._pool.num_references(),
            "request_references": num_table_references,
            "fenced_references": self._kv.num_fenced_references,
            "steps_in_flight": len(self._steps),
            "transfer_pins": self._ledger.num_pins,
            "transfers_in_flight": self._ledger.num_in_flight,
            "transfers_overdue": self._ledger.num_overdue,
            "handoffs_pending": len(self._handoffs),
            "store_open_references": self._connector.stats().num_open_references if self._connector else 0,
        }
        problems = []
        accounted = num_table_references + self._ledger.num_pins + self._kv.num_fenced_references
        if counts["block_references"] != accounted:
            problems.append(f"{counts['block_references']} block references, but requests, transfers and steps hold {accounted}")
        if self._ledger.num_overdue:
            problems.append(f"{self._ledger.num_overdue} transfers are past their deadline and still hold blocks")
        return Audit(counts, tuple(problems))

    def num_cached_blocks(self, block_hashes: Sequence[bytes]) -> int:
        """How many of a prompt's leading blocks are in this engine's own cache. Changes nothing."""
        return len(self._pool.find_longest_prefix(block_hashes, len(block_hashes)))

    def cached_hashes(self) -> tuple[bytes, ...]:
        """Every block that is in this engine's own cache."""
        return tuple(self._pool.cached_hashes())

    def try_reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget cached KV; see Scheduler.try_reset_prefix_cache. News of the steps in flight come with the next step's."""
        if force and self._steps:
            assert self._news is None and len(self._steps) == 1, "no step has begun since the last news"
            self._news = StepOutput()
            self._finish_step(self._news)
        return self._scheduler.try_reset_prefix_cache(force=force)

    def close(self) -> None:
        """Close the connector and settle what was in flight."""
        self._steps.close()
        if self._grammar_compiler is not None:
            self._grammar_compiler.close()
        self._ledger.close()


def _is_mostly_prompt(plan: StepPlan) -> bool:
    """Such a step says what recomputing costs."""
    return plan.num_total_tokens > 2 * len(plan.num_scheduled_tokens)
