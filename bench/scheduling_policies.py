"""What options of the scheduler do to waiting: the real scheduler on a virtual clock, with a model of how long a step takes.

A step takes STEP_S, and TOKEN_S per token (about what a model of 8 billion weights needs on one GPU). Requests come at random
times; most prompts are short and some are long.

python -m bench.scheduling_policies --rate 3 --json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from typing import Any

from bench.scheduler_scenarios import BLOCK_SIZE, make_request, random_prompt, result_of
from core.config import EngineOptions
from core.kv.block_pool import BlockPool
from core.kv.ledger import TransferLedger
from core.kv_cache_manager import KVCacheManager
from core.scheduler import Scheduler
from core.stats import EngineStats
from core.step_output import StepOutput

STEP_S, TOKEN_S = 0.008, 0.00005
SHORT_TOKENS, LONG_TOKENS = (32, 256), (6000, 10000)
LONG_SHARE = 0.15
OUTPUT_TOKENS = 100


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def now_s(self) -> float:
        return self.now


def simulate(rate: float, num_requests: int, **options: Any) -> dict[str, float]:
    """Times to the first token in ms, of short and of long prompts, between tokens, and how long it took in all in s."""
    rng = random.Random(5)
    clock, stats, pool = _Clock(), EngineStats(), BlockPool(40_000)
    ledger = TransferLedger(None, pool, clock, stats, block_size=16, block_bytes=1, load_timeout_s=1.0, save_timeout_s=1.0)
    settings = EngineOptions(**{"max_num_seqs": 128, "max_num_batched_tokens": 1024, **options})
    scheduler = Scheduler(settings, KVCacheManager(pool, BLOCK_SIZE), ledger, clock, stats)
    arrivals, at = [], 0.0
    for _ in range(num_requests):
        at += rng.expovariate(rate)
        arrivals.append((at, rng.randint(*(LONG_TOKENS if rng.random() < LONG_SHARE else SHORT_TOKENS))))
    started: dict[str, tuple[float, int]] = {}
    first_token_ms: dict[bool, list[float]] = {False: [], True: []}
    last_s: dict[str, float] = {}
    gaps_ms: list[float] = []
    while arrivals or scheduler.requests:
        if not scheduler.requests:
            clock.now = max(clock.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= clock.now:
            at, num_tokens = arrivals.pop(0)
            request = make_request(f"r{len(started)}", random_prompt(rng, num_tokens), OUTPUT_TOKENS)
            request.arrival_s = at
            started[request.request_id] = (at, num_tokens)
            scheduler.add_request(request)
        output = StepOutput()
        plan = scheduler.schedule(output)
        clock.now += STEP_S + TOKEN_S * plan.num_total_tokens
        scheduler.update_from_output(plan, result_of(plan, scheduler, lambda _request, _number: 7), output)
        for request_id in output.new_token_ids:
            at, num_tokens = started[request_id]
            if request_id in last_s:
                gaps_ms.append(1e3 * (clock.now - last_s[request_id]))
            else:
                first_token_ms[num_tokens > SHORT_TOKENS[1]].append(1e3 * (clock.now - at))
            last_s[request_id] = clock.now
    short, long = (sorted(first_token_ms[is_long]) for is_long in (False, True))
    return {
        "short_first_token_ms_p50": round(statistics.median(short)),
        "short_first_token_ms_p95": round(short[int(0.95 * len(short))]),
        "long_first_token_ms_p50": round(statistics.median(long)),
        "long_first_token_ms_p95": round(long[int(0.95 * len(long))]),
        "between_tokens_ms_mean": round(statistics.mean(gaps_ms), 1),
        "duration_s": round(clock.now, 1),
    }


POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "chunks of 256": {"long_prefill_token_threshold": 256},
    "chunks of 256, one long prompt": {"long_prefill_token_threshold": 256, "max_long_partial_prefills": 1},
    "chunks of 512, one long prompt": {"long_prefill_token_threshold": 512, "max_long_partial_prefills": 1},
    "chunks of 768, one long prompt": {"long_prefill_token_threshold": 768, "max_long_partial_prefills": 1},
    "chunks of 512": {"long_prefill_token_threshold": 512},
    "delay factor 0.5": {"scheduler_delay_factor": 0.5},
    "delay factor 2": {"scheduler_delay_factor": 2.0},
}


def main() -> None:
    """Parse flags, simulate each policy, print."""
    parser = argparse.ArgumentParser(description="Simulated waiting under options of the scheduler.")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    for name in ("rate", "requests"):
        if getattr(arguments, name) <= 0:
            parser.error(f"--{name}: got {getattr(arguments, name)}; allowed: above 0")
    figures = {name: simulate(arguments.rate, arguments.requests, **options) for name, options in POLICIES.items()}
    if arguments.json:
        print(json.dumps({"rate": arguments.rate, **figures}))
    else:
        for name, values in figures.items():
            print(f"{name:34}", *(f"{key} {value}" for key, value in values.items()), sep="  ")


if __name__ == "__main__":
    main()
