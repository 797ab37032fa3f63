"""Time of the scheduler alone: steady decode steps of many running requests, no model involved.

python -m bench.scheduler --running 256 --prompt-tokens 512 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

from core.clock import MonotonicClock
from core.config import EngineOptions
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


def build_scheduler(num_running: int, prompt_tokens: int, num_steps: int) -> tuple[Scheduler, list[Request]]:
    """A scheduler with room for everything, and its requests, not yet added. Prompts are random and share nothing."""
    options = EngineOptions(
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(8192, num_running),
        max_num_waiting=num_running,
    )
    num_blocks = num_running * ((prompt_tokens + num_steps) // BLOCK_SIZE + 2)
    clock, stats, pool = MonotonicClock(), EngineStats(), BlockPool(num_blocks)
    ledger = TransferLedger(
        None, pool, clock, stats, block_size=BLOCK_SIZE, block_bytes=4096, load_timeout_s=1.0, save_timeout_s=1.0
    )
    scheduler = Scheduler(options, KVCacheManager(pool, BLOCK_SIZE), ledger, clock, stats)
    root = Namespace(b"model", b"layout", BLOCK_SIZE).root_hash()
    rng = random.Random(0)
    requests = [
        Request(
            request_id=f"request-{index}",
            token_ids=[rng.randrange(49152) for _ in range(prompt_tokens)],
            num_prompt_tokens=prompt_tokens,
            sampling=SamplingParams(max_tokens=num_steps + 1000),
            root_hash=root,
            stop_token_ids=frozenset((2,)),
            max_total_tokens=prompt_tokens + num_steps + 1000,
        )
        for index in range(num_running)
    ]
    return scheduler, requests


def sample_anything(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    """What a runner would return: a token for each request whose tokens are all computed."""
    sampled = []
    for request_id in plan.num_scheduled_tokens:
        request = scheduler.requests[request_id]
        sampled.append([7] if request.num_computed_tokens == len(request.token_ids) else [])
    return StepResult(sampled)


def run(num_running: int, prompt_tokens: int, num_steps: int) -> dict[str, float]:
    """Medians in microseconds over num_steps decode steps of num_running requests, and of admitting one request."""
    scheduler, requests = build_scheduler(num_running, prompt_tokens, num_steps + 64)
    admit_us = []
    for request in requests:
        started = time.perf_counter_ns()
        scheduler.add_request(request)
        admit_us.append((time.perf_counter_ns() - started) / 1e3)
    while any(request.num_output_tokens == 0 for request in requests):
        output = StepOutput()
        plan = scheduler.schedule(output)
        scheduler.update_from_output(plan, sample_anything(plan, scheduler), output)
    gc.collect()
    gc.freeze()
    schedule_us, update_us = [], []
    for _ in range(num_steps):
        output = StepOutput()
        t0 = time.perf_counter_ns()
        plan = scheduler.schedule(output)
        t1 = time.perf_counter_ns()
        assert len(plan.num_scheduled_tokens) == num_running
        result = sample_anything(plan, scheduler)
        t2 = time.perf_counter_ns()
        scheduler.update_from_output(plan, result, output)
        t3 = time.perf_counter_ns()
        schedule_us.append((t1 - t0) / 1e3)
        update_us.append((t3 - t2) / 1e3)
    step_us = [a + b for a, b in zip(schedule_us, update_us, strict=True)]
    return {
        "running": num_running,
        "prompt_tokens": prompt_tokens,
        "steps": num_steps,
        "schedule_us_p50": round(statistics.median(schedule_us), 1),
        "update_us_p50": round(statistics.median(update_us), 1),
        "step_us_p50": round(statistics.median(step_us), 1),
        "step_us_p99": round(sorted(step_us)[int(len(step_us) * 0.99)], 1),
        "add_request_us_p50": round(statistics.median(admit_us), 1),
    }


def main() -> None:
    """Parse flags, run, print."""
    parser = argparse.ArgumentParser(description="Time of Scheduler.schedule and update_from_output over steady decode steps.")
    parser.add_argument("--running", type=int, default=256, help="requests that decode")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    for name in ("running", "prompt_tokens", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}; allowed: 1 or more")
    figures = run(arguments.running, arguments.prompt_tokens, arguments.steps)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value:>12}")


if __name__ == "__main__":
    main()
