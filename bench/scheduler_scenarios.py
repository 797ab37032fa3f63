"""What the scheduler does besides steady decoding: admitting, hitting, evicting, queueing, drafting. No model involved.

Each scenario returns its figures; bench/scheduler.py prints them. Times are medians, of a machine that does nothing else.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable

from core.clock import MonotonicClock
from core.config import EngineOptions
from core.drafter import Drafter, NgramDrafter
from core.kv.block_pool import BlockPool
from core.kv.hashing import Namespace
from core.kv.ledger import TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.request import Request
from core.sampling_params import SamplingParams
from core.scheduler import Scheduler
from core.stats import EngineStats
from core.step import StepPlan, StepResult
from core.step_output import StepOutput

BLOCK_SIZE = 16
VOCAB_SIZE = 49152


def make_scheduler(num_blocks: int, max_num_seqs: int, budget: int, drafter: Drafter | None = None) -> Scheduler:
    """A scheduler without a store."""
    options = EngineOptions(
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(budget, max_num_seqs),
        max_num_waiting=10**6,
        speculative_disable_by_batch_size=max_num_seqs,
    )
    clock, stats, pool = MonotonicClock(), EngineStats(), BlockPool(num_blocks)
    ledger = TransferLedger(
        None, pool, clock, stats, block_size=BLOCK_SIZE, block_bytes=4096, load_timeout_s=1.0, save_timeout_s=1.0
    )
    return Scheduler(options, KVCacheManager(pool, BLOCK_SIZE), ledger, clock, stats, drafter)


def make_request(name: str, token_ids: list[int], max_tokens: int = 1000) -> Request:
    """The list becomes the request's own."""
    return Request(
        request_id=name,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(max_tokens=max_tokens),
        root_hash=Namespace(b"model", b"layout", BLOCK_SIZE).root_hash(),
        stop_token_ids=frozenset((2,)),
        max_total_tokens=len(token_ids) + max_tokens,
    )


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Shares nothing with others."""
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(num_tokens)]


def result_of(plan: StepPlan, scheduler: Scheduler, next_token: Callable[[Request, int], int]) -> StepResult:
    """What a runner would return that accepts all drafts: next_token(request, number of the sampled token in this step)."""
    sampled = []
    for request_id in plan.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        is_all = request.num_computed_tokens == request.num_tokens_with_spec
        num_sampled = 1 + len(plan.draft_token_ids.get(request_id, ())) if is_all else 0
        sampled.append([next_token(request, number) for number in range(num_sampled)])
    return StepResult(sampled)


def step(scheduler: Scheduler) -> StepPlan:
    """Schedule and update, with tokens that end nothing."""
    output = StepOutput()
    plan = scheduler.schedule(output)
    if plan.num_total_tokens:
        scheduler.update_from_output(plan, result_of(plan, scheduler, lambda _request, _number: 7), output)
    return plan


def admission(num_rounds: int = 64, batch: int = 16, prompt_tokens: int = 512) -> dict[str, float]:
    """Time per request from add_request to the step that starts it, hashing included, in steps of `batch` new prompts each."""
    rng = random.Random(1)
    scheduler = make_scheduler(batch * (prompt_tokens // BLOCK_SIZE + 2), batch, batch * prompt_tokens)
    per_request_us = []
    for number in range(num_rounds):
        requests = [make_request(f"{number}.{index}", random_prompt(rng, prompt_tokens), 1) for index in range(batch)]
        started = time.perf_counter_ns()
        for request in requests:
            scheduler.add_request(request)
        output = StepOutput()
        plan = scheduler.schedule(output)
        per_request_us.append((time.perf_counter_ns() - started) / 1e3 / batch)
        assert len(plan.new_requests) == batch
        scheduler.update_from_output(plan, result_of(plan, scheduler, lambda _request, _number: 7), output)
        assert not scheduler.requests
    return {"prompt_tokens": prompt_tokens, "admit_request_us_p50": round(statistics.median(per_request_us), 1)}


def cached_prompts(num_rounds: int = 12, batch: int = 16, prompt_tokens: int = 4096) -> dict[str, float]:
    """The step that admits `batch` requests whose whole prompts are in the prefix cache; their hashing is in it."""
    rng = random.Random(2)
    scheduler = make_scheduler(batch * (prompt_tokens // BLOCK_SIZE + 2), batch, 8192)
    prompts = [random_prompt(rng, prompt_tokens) for _ in range(batch)]
    step_ms, add_ms = [], []
    for number in range(num_rounds + 1):
        requests = [make_request(f"{number}.{index}", list(prompt), 1) for index, prompt in enumerate(prompts)]
        t0 = time.perf_counter_ns()
        for request in requests:
            scheduler.add_request(request)
        t1 = time.perf_counter_ns()
        output = StepOutput()
        plan = scheduler.schedule(output)
        t2 = time.perf_counter_ns()
        if number:  # the first round fills the cache
            assert len(plan.new_requests) == batch and plan.num_total_tokens == batch * BLOCK_SIZE
            add_ms.append((t1 - t0) / 1e6)
            step_ms.append((t2 - t0) / 1e6)
        scheduler.update_from_output(plan, result_of(plan, scheduler, lambda _request, _number: 7), output)
        while scheduler.requests:
            step(scheduler)
    return {
        "requests": batch,
        "prompt_tokens": prompt_tokens,
        "add_requests_ms_p50": round(statistics.median(add_ms), 2),
        "add_and_schedule_ms_p50": round(statistics.median(step_ms), 2),
    }


def churn(num_blocks: int = 100_000, table_blocks: int = 64) -> dict[str, float]:
    """Allocation, hashing and release of a block in a pool that is full of cached ones, next to the same in a small pool."""

    def per_block_us(pool_blocks: int) -> float:
        pool = BlockPool(pool_blocks)
        names = iter(range(10**9))
        times = []
        for number in range(2 * (num_blocks // table_blocks)):
            hashes = [next(names).to_bytes(16, "little") for _ in range(table_blocks)]
            started = time.perf_counter_ns()
            block_ids = pool.try_allocate(table_blocks)
            assert block_ids is not None
            for block_id, block_hash in zip(block_ids, hashes, strict=True):
                pool.set_hash(block_id, block_hash)
            pool.release_references(reversed(block_ids))
            if number * table_blocks >= num_blocks:  # it has been full from here on, the large one too
                times.append((time.perf_counter_ns() - started) / 1e3 / table_blocks)
        assert pool.num_evictions >= num_blocks - 2 * table_blocks
        return statistics.median(times)

    large, small = per_block_us(num_blocks), per_block_us(1000)
    return {"blocks": num_blocks, "per_block_us": round(large, 3), "per_block_us_of_1000": round(small, 3)}


def waiting_memory(num_requests: int = 5000, prompt_tokens: int = 512) -> dict[str, float]:
    """Bytes that a queued request takes, with its list of tokens and without."""
    prompt = random_prompt(random.Random(3), prompt_tokens)
    scheduler = make_scheduler(4096, 16, 8192)
    gc.collect()
    tracemalloc.start()
    lists = [[number, *prompt[1:]] for number in range(num_requests)]
    with_lists = tracemalloc.get_traced_memory()[0]
    for number, token_ids in enumerate(lists):
        scheduler.add_request(make_request(str(number), token_ids))
    in_all = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "prompt_tokens": prompt_tokens,
        "bytes_per_waiting_request": round(in_all / num_requests),
        "of_which_token_ids": round(with_lists / num_requests),
    }


def drafts(num_running: int = 256, prompt_tokens: int = 512, num_steps: int = 100, num_drafts: int = 4) -> dict[str, float]:
    """Steady decoding with prompt lookup, of texts that repeat themselves: all drafts are accepted."""
    rng = random.Random(4)
    scheduler = make_scheduler(
        num_running * ((prompt_tokens + (num_steps + 16) * (num_drafts + 1)) // BLOCK_SIZE + 2),
        num_running,
        8192,
        NgramDrafter(num_drafts, 4, 2),
    )
    period = 50

    def next_token(request: Request, number: int) -> int:
        return request.token_ids[len(request.token_ids) + number - period * (1 + number // period)]

    for index in range(num_running):
        prompt = (random_prompt(rng, period) * (prompt_tokens // period + 1))[:prompt_tokens]
        scheduler.add_request(make_request(str(index), prompt, 10**6))
    while not scheduler.requests or any(request.num_output_tokens < 8 for request in scheduler.requests.values()):
        output = StepOutput()
        plan = scheduler.schedule(output)
        scheduler.update_from_output(plan, result_of(plan, scheduler, next_token), output)
    gc.collect()
    gc.freeze()
    step_us = []
    for _ in range(num_steps):
        output = StepOutput()
        t0 = time.perf_counter_ns()
        plan = scheduler.schedule(output)
        t1 = time.perf_counter_ns()
        assert plan.num_total_tokens == num_running * (num_drafts + 1)
        result = result_of(plan, scheduler, next_token)
        t2 = time.perf_counter_ns()
        scheduler.update_from_output(plan, result, output)
        step_us.append((t1 - t0 + time.perf_counter_ns() - t2) / 1e3)
    gc.unfreeze()
    return {
        "running": num_running,
        "drafts": num_drafts,
        "step_us_p50": round(statistics.median(step_us), 1),
        "us_per_token": round(statistics.median(step_us) / num_running / (num_drafts + 1), 3),
    }


SCENARIOS: dict[str, Callable[[], dict[str, float]]] = {
    "admission": admission,
    "cached-prompts": cached_prompts,
    "churn": churn,
    "waiting-memory": waiting_memory,
    "drafts": drafts,
}
