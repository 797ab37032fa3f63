"""A scheduler, KV manager and ledger (real ones) with a fake model and store, beside a plain model of what their blocks hold.

The plain model knows tokens, not hashes: which block holds which tokens is followed from plans and results alone, and whatever
the real parts do is compared with it at once. Driven by tests/unit/core/test_scheduler_properties.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from core.config import EngineOptions
from core.kv.connector import Transfer, TransferDirection, TransferResult
from core.kv.hashing import extend_block_hashes
from core.kv.ledger import TransferLedger
from core.kv.pool_memory import KVPoolMemory
from core.request import FinishReason, Request, RequestStage, RequestStatus
from core.sampling_params import SamplingParams
from core.scheduler import Scheduler
from core.stats import EngineStats
from core.step import StepPlan
from core.step_output import StepOutput
from core.steps_in_flight import StepsInFlight
from tests.support.fake_runner import ENTRY_BYTES, FakeRunner, fake_layout, fake_model
from tests.support.memory_connector import MemoryConnector, MemoryStore
from tests.support.virtual_clock import VirtualClock
from tests.unit.core.scheduler_parts import Content, Expected, GuessingDrafter, WatchedKV, WatchedPool, entry_of, right_text

MAX_HEALTHY_ROUNDS_WITHOUT_PROGRESS = 60


class SchedulerRig:
    """contents: what the plain model says that each findable block holds."""

    def __init__(self, options: EngineOptions, num_blocks: int, max_model_len: int, *, has_store: bool, num_drafts: int) -> None:
        self.options = options
        self.block_size = options.block_size
        self.max_model_len = max_model_len
        self.clock, self.stats = VirtualClock(), EngineStats()
        self.contents: dict[int, Content] = {}
        self.expected: dict[str, Expected] = {}
        self.memory = KVPoolMemory(fake_layout(self.block_size), num_blocks)
        self.runner = FakeRunner(self.memory)
        self.connector = MemoryConnector(MemoryStore(), is_immediate=False)
        self.connector.register_kv_cache(self.memory)
        self.pool = WatchedPool(num_blocks, self.contents)
        self.kv = WatchedKV(self.pool, self.block_size, options.enable_prefix_caching)
        self.kv.contents, self.kv.longest_prefix = self.contents, self.longest_prefix
        self.ledger = TransferLedger(
            self.connector if has_store else None,
            self.pool,
            self.clock,
            self.stats,
            block_size=self.block_size,
            block_bytes=self.memory.layout.block_bytes,
            load_timeout_s=options.kv_load_timeout_s,
            save_timeout_s=options.kv_save_timeout_s,
            always_load=options.kv_load_policy == "always",
        )
        self.drafter = GuessingDrafter(self.expected, num_drafts) if num_drafts else None
        self.scheduler = Scheduler(options, self.kv, self.ledger, self.clock, self.stats, self.drafter)
        self.namespace = fake_model(self.block_size, max_model_len).namespace
        self.steps = StepsInFlight(self.runner, self.clock, on_thread=False)
        self.num_added = 0
        self.num_stalled = 0
        self._tables: dict[str, list[int]] = {}
        self._written: dict[str, int] = {}  # tokens of running requests whose KV is surely there
        self._loads: dict[int, Transfer] = {}
        self._num_started_seen = 0
        self._hash_by_content: dict[Content, bytes] = {}
        self._content_by_hash: dict[bytes, Content] = {}

    # -- what a test does ----------------------------------------------------------------------------------------------
    def add(
        self,
        prompt: tuple[int, ...],
        num_known: int,
        num_tokens: int,
        salt: str,
        priority: int,
        stop_at: int,
        *,
        is_prefill: bool,
    ) -> None:
        """A request that has num_known tokens already and wants num_tokens more; stop_at: place of a stop token, -1 for none."""
        start = (*prompt, *right_text(prompt, num_known))
        limit = 1 if is_prefill else min(num_tokens, self.max_model_len - len(start))
        text = right_text(start, limit)
        stops = {text[stop_at]} if 0 <= stop_at < limit and not is_prefill else set()
        self.num_added += 1
        request_id = f"r{self.num_added}"
        sampling = SamplingParams(temperature=0.0, max_tokens=num_known + num_tokens, stop_token_ids=tuple(stops))
        ends = [place for place, token_id in enumerate(text) if token_id in stops]
        text = text[: ends[0] + 1] if ends else text
        reason = FinishReason.STOP if ends else FinishReason.LENGTH
        self.expected[request_id] = Expected(self._turn(priority), start, salt, text, reason, [])
        request = Request(
            request_id=request_id,
            token_ids=list(start),
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            stage=RequestStage.PREFILL if is_prefill else RequestStage.DECODE,
            priority=priority,
            arrival_s=self.clock.now_s(),
            root_hash=self.namespace.root_hash(salt),
            stop_token_ids=frozenset(stops),
            max_total_tokens=len(start) + limit,
        )
        self.scheduler.add_request(request)
        self._look_at_transfers()

    def store(self, token_ids: tuple[int, ...], salt: str) -> None:
        """Another engine has stored all full blocks of these tokens."""
        for end in range(self.block_size, len(token_ids) + 1, self.block_size):
            self.connector.store.blocks[self._hash_of((salt, token_ids[:end]))] = self._bytes_of(token_ids[:end])

    def _turn(self, priority: int) -> tuple[float, int]:
        aging_s = self.options.priority_aging_s
        if self.options.policy == "fcfs":
            return (0.0, self.num_added)
        return (self.clock.now_s() + aging_s * priority if aging_s else priority, self.num_added)

    def abort(self, request_id: str) -> None:
        """End a request that is here."""
        assert self.scheduler.finish_request(request_id)
        del self.expected[request_id]

    def settle(self) -> None:
        """Let the ledger and then the scheduler know what the store has reported."""
        early, results = list(self.connector._early_results), list(self.connector._results)
        if "poll" in self.connector.fail_calls:
            results = []
        ended = self.ledger.poll()
        for result, is_last in [*((result, False) for result in early), *((result, True) for result in results)]:
            self._note_result(result, is_last=is_last)
        self.scheduler.on_transfers_ended(ended)
        self._look_at_transfers()

    @property
    def may_schedule(self) -> bool:
        """Whether a step may be scheduled before the results of those in flight are in."""
        scheduler = self.scheduler
        return not self.steps or not (len(self.steps) > 2 or scheduler.needs_last_tokens or scheduler.must_settle)

    def schedule(self) -> None:
        """Schedule a step and compare it with what is allowed."""
        self.settle()
        is_alone = not self.steps
        output = StepOutput()
        plan = self.scheduler.schedule(output)
        self._look_at_transfers()
        self._check_plan(plan, output)
        for request_id in plan.removed_request_ids:
            self._tables.pop(request_id, None)
            self._written.pop(request_id, None)
        for new in plan.new_requests:
            self._tables[new.request_id] = list(new.block_ids)
            self._written[new.request_id] = new.num_computed_tokens
            assert new.num_computed_tokens % self.block_size == 0
        for request_id, block_ids in plan.new_block_ids.items():
            self._tables[request_id] += block_ids
        if plan.num_total_tokens or plan.removed_request_ids:
            self.steps.begin(plan, 0.0)
            self.pool.written_by_steps.append({b for name in plan.num_scheduled_tokens for b in self._tables[name]})
        if is_alone and self._is_healthy:
            assert plan.num_total_tokens or not self.expected, "there is work to do, and nothing in its way"
            self._check_progress(plan)

    def finish(self, *, fails: bool = False) -> None:
        """Run the oldest step in flight, and apply what came of it."""
        self.runner.fail_next = fails
        outcome = self.steps.finish()
        self.runner.fail_next = False
        plan, output = outcome.plan, StepOutput()
        self.pool.written_by_steps.popleft()
        if outcome.result is None:
            self._fail_steps(plan, output)
        elif plan.num_total_tokens:
            running = {name for name, request in self.scheduler.requests.items() if request.status is RequestStatus.RUNNING}
            self.scheduler.update_from_output(plan, outcome.result, output)
            for name, sampled in zip(plan.num_scheduled_tokens, outcome.result.sampled_token_ids, strict=True):
                if name in running:
                    self._note_computed(plan, name, sampled, output)
        self._look_at_transfers()
        for name, finished in output.finished.items():
            expected = self.expected.pop(name)
            if finished.reason is not FinishReason.ERROR:
                assert (expected.received, finished.reason) == (expected.text, expected.reason), f"{name} ended otherwise"
        self.clock.advance(0.01)

    def _fail_steps(self, plan: StepPlan, output: StepOutput) -> None:
        """As core.engine does it."""
        if plan.num_total_tokens:
            self.scheduler.fail_step(plan, "told to fail", output)
        while self.steps:
            outcome = self.steps.finish()
            self.pool.written_by_steps.popleft()
            assert outcome.was_skipped
            self.scheduler.undo_step(outcome.plan)
        assert set(output.finished) <= set(plan.num_scheduled_tokens)

    def reset(self, *, force: bool) -> None:
        """Forget cached content; forced only between steps."""
        if not (force and self.steps) and self.scheduler.try_reset_prefix_cache(force=force):
            self.contents.clear()

    def drain(self) -> None:
        """No faults any more: all requests must end within a bounded number of steps, and nothing may be held afterwards."""
        self.connector.fail_calls = set()
        self.connector.is_lookup_known = True
        num_left = sum(len(e.start) + len(e.text) for e in self.expected.values())
        for _ in range(100 + 10 * num_left):
            for transfer_id in list(self.connector.pending):
                self.connector.complete(transfer_id)
            if self.may_schedule:
                self.schedule()
            if self.steps:
                self.finish()
            self.check_blocks()
            if not (self.expected or self.steps or self.connector.pending or self.connector._results):
                break
        assert not self.expected, f"never ended: {sorted(self.expected)}"
        self.schedule()
        while self.steps:
            self.finish()
        assert self.scheduler.requests == {} and self.scheduler.running == [] and self.scheduler.num_waiting == 0
        assert self.ledger.num_in_flight == self.ledger.num_pins == 0
        assert self.pool.num_free == self.pool.num_blocks
        assert self.runner.num_requests == 0, "the runner was not told of all ends"
        for block_hash, stored in self.connector.store.blocks.items():
            assert stored == self._bytes_of(self._content_by_hash[block_hash][1]), "something else was stored"

    # -- what must hold ------------------------------------------------------------------------------------------------
    def check_blocks(self) -> None:
        """References are exact, blocks that are being filled have one owner, and what is findable holds what it should."""
        owners: Counter[int] = Counter()
        for request in self.scheduler.requests.values():
            owners.update(request.block_ids)
            assert bool(request.block_ids) == (request.status is RequestStatus.RUNNING)
        for entry in self.ledger._entry_by_id.values():
            owners.update(entry.pinned_block_ids)
        for _step_id, block_ids in self.kv._fenced:
            owners.update(block_ids)
        pool = self.pool
        for block_id in range(pool.num_blocks):
            assert pool.ref_count(block_id) == owners[block_id], f"block {block_id}: references"
            content, block_hash = self.contents.get(block_id), pool.block_hash(block_id)
            assert (content is not None) == (block_hash is not None), f"block {block_id} is findable, or not: {content}"
            if content is None:
                assert owners[block_id] <= 1, f"block {block_id} is being filled for two"
            else:
                assert block_hash == self._hash_of(content), f"block {block_id} is called something else"
                assert self.memory.block(block_id) == self._bytes_of(content[1]), f"block {block_id} holds something else"
        assert pool.num_free == sum(owners[block_id] == 0 for block_id in range(pool.num_blocks))
        assert len(self.scheduler.running) <= self.options.max_num_seqs
        statuses = Counter(request.status for request in self.scheduler.requests.values())
        assert self.scheduler.num_waiting == statuses[RequestStatus.WAITING]
        assert self.scheduler._admissions.num_loading == statuses[RequestStatus.LOADING]
        assert len(self.scheduler.running) == statuses[RequestStatus.RUNNING]

    def longest_prefix(self, request: Request) -> list[Content]:
        """What a hit of the request should be."""
        found: list[Content] = []
        known = set(self.contents.values())
        salt, token_ids = self.expected[request.request_id].salt, tuple(request.token_ids)
        for end in range(self.block_size, len(token_ids), self.block_size):
            content = (salt, token_ids[:end])
            if content not in known:
                break
            found.append(content)
        return found

    @property
    def _is_healthy(self) -> bool:
        """Nothing stands in the way of work: no transfer, no question that the store has not answered."""
        return self.connector.is_lookup_known and not self.connector.fail_calls and not self.ledger.num_in_flight

    def _check_plan(self, plan: StepPlan, output: StepOutput) -> None:
        options, scheduled = self.options, plan.num_scheduled_tokens
        assert sum(scheduled.values()) == plan.num_total_tokens == output.num_tokens <= options.max_num_batched_tokens
        assert len(scheduled) <= options.max_num_seqs
        assert all(num_tokens >= 1 for num_tokens in scheduled.values())
        limit = options.long_prefill_token_threshold
        if limit and options.enable_chunked_prefill:
            assert all(num_tokens <= limit for num_tokens in scheduled.values())
        if options.max_long_partial_prefills:
            num_left = [request.num_tokens_with_spec - request.num_computed_tokens for request in self.scheduler.running]
            assert sum(left > limit for left in num_left) <= options.max_long_partial_prefills
        for name, drafts in plan.draft_token_ids.items():
            assert 0 < len(drafts) < scheduled[name] + 1
        for new in plan.new_requests:
            whole = len(new.token_ids) - new.num_computed_tokens
            if not options.enable_chunked_prefill:
                assert scheduled[new.request_id] == min(whole, options.max_num_batched_tokens)
            self._check_nobody_was_passed_over(self.scheduler.requests[new.request_id])
        assert set(scheduled).isdisjoint(plan.removed_request_ids) or not set(plan.preempted_request_ids) & set(scheduled)

    def _check_nobody_was_passed_over(self, request: Request) -> None:
        """Who stands before an admitted request and waits does so for an answer of the store, or for blocks in the making."""
        if not self.connector.is_lookup_known:
            return
        turn = self.expected[request.request_id].turn
        for other in self.scheduler.requests.values():
            lets_pass = (
                self.options.max_long_partial_prefills and len(other.token_ids) > self.options.long_prefill_token_threshold
            )
            if other.status is RequestStatus.WAITING and self.expected[other.request_id].turn < turn and not lets_pass:
                next_end = (len(self.longest_prefix(other)) + 1) * self.block_size
                salt, wanted = self.expected[other.request_id].salt, other.token_ids[:next_end]
                makers = [
                    maker
                    for maker in self.scheduler.running
                    if maker.token_ids[:next_end] == wanted and self.expected[maker.request_id].salt == salt
                ]
                assert makers and len(wanted) == next_end, f"{request.request_id} jumped before {other.request_id}"

    def _check_progress(self, plan: StepPlan) -> None:
        """Who is first in order gets its turn, whatever the others do."""
        if self.expected:
            first = min(self.expected, key=lambda name: self.expected[name].turn)
            self.num_stalled = 0 if first in plan.num_scheduled_tokens else self.num_stalled + 1
            assert self.num_stalled < MAX_HEALTHY_ROUNDS_WITHOUT_PROGRESS, f"{first} starves"

    # -- following what happens ----------------------------------------------------------------------------------------
    def _note_computed(self, plan: StepPlan, name: str, sampled: list[int], output: StepOutput) -> None:
        """A step computed tokens of a request that was running when its result came."""
        expected = self.expected[name]
        told = output.new_token_ids.get(name, [])
        if sampled:
            assert told == sampled[: len(told)] and (len(told) == len(sampled) or name in output.finished)
            request = self.scheduler.requests.get(name)
            expected.received += told
            assert expected.received == expected.text[: len(expected.received)], f"{name} says something else"
            assert request is None or request.token_ids[len(request.token_ids) - len(told) :] == told
        self._written[name] += plan.num_scheduled_tokens[name]
        token_ids = (*expected.start, *expected.received)
        if sampled:  # what drafts wrote behind the last token that was kept is void
            self._written[name] = min(self._written[name], len(token_ids) - 1)
        for number in range(self._written[name] // self.block_size if self.options.enable_prefix_caching else 0):
            content = (expected.salt, token_ids[: (number + 1) * self.block_size])
            self.contents.setdefault(self._tables[name][number], content)
            assert self.contents[self._tables[name][number]] == content

    def _look_at_transfers(self) -> None:
        """Loads continue the longest local prefix; saves are of blocks that hold what their names say."""
        for transfer in self.connector.started[self._num_started_seen :]:
            if transfer.direction is TransferDirection.LOAD:
                self._loads[transfer.transfer_id] = transfer
                request = self.scheduler.requests[transfer.request_id]
                first = request.block_hashes.index(transfer.block_hashes[0])
                assert tuple(request.block_hashes[first : first + len(transfer.block_hashes)]) == transfer.block_hashes
                assert (first + len(transfer.block_hashes)) * self.block_size < len(request.token_ids)
                for end in range(first + 1, first + len(transfer.block_hashes) + 1):
                    token_ids = tuple(request.token_ids[: end * self.block_size])
                    self._hash_of((self.expected[transfer.request_id].salt, token_ids))
            else:
                for block_id, block_hash in zip(transfer.block_ids, transfer.block_hashes, strict=True):
                    content = self.contents.get(block_id)
                    assert content is not None and self._hash_of(content) == block_hash, f"block {block_id} is saved unfinished"
        self._num_started_seen = len(self.connector.started)

    def _note_result(self, result: TransferResult, *, is_last: bool) -> None:
        load = self._loads.pop(result.transfer_id, None) if is_last else self._loads.get(result.transfer_id)
        if load is None:
            return
        for block_id, block_hash in list(zip(load.block_ids, load.block_hashes, strict=True))[: max(0, result.num_blocks_ok)]:
            self.contents[block_id] = self._content_by_hash[block_hash]

    def _hash_of(self, content: Content) -> bytes:
        if content not in self._hash_by_content:
            hashes: list[bytes] = []
            extend_block_hashes(hashes, content[1], self.block_size, self.namespace.root_hash(content[0]))
            self._hash_by_content[content] = hashes[-1]
            self._content_by_hash[hashes[-1]] = content
        return self._hash_by_content[content]

    def _bytes_of(self, token_ids: tuple[int, ...]) -> bytes:
        """What the block that ends with these tokens should hold."""
        ends = range(len(token_ids) - self.block_size + 1, len(token_ids) + 1)
        held = b"".join(entry_of(token_ids[:end]) for end in ends)
        assert len(held) == self.block_size * ENTRY_BYTES
        return held


def with_options(**values: object) -> EngineOptions:
    """EngineOptions with a small budget."""
    return dataclasses.replace(
        EngineOptions(max_num_seqs=1, max_num_batched_tokens=64, speculative_disable_by_batch_size=64), **values
    )  # type: ignore[arg-type]
