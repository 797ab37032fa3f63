"""Time of the scheduler alone, no model involved: steady decode steps of many running requests, and other scenarios.

python -m bench.scheduler --running 256 --prompt-tokens 512 --json
python -m bench.scheduler --scenario admission --json
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

from bench.scheduler_scenarios import BLOCK_SIZE, SCENARIOS, make_request, make_scheduler, random_prompt, result_of
from core.request import Request
from core.scheduler import Scheduler
from core.step import StepPlan, StepResult
from core.step_output import StepOutput


def build_scheduler(num_running: int, prompt_tokens: int, num_steps: int) -> tuple[Scheduler, list[Request]]:
    """A scheduler with room for everything, and its requests, not yet added. Prompts are random and share nothing."""
    num_blocks = num_running * ((prompt_tokens + num_steps) // BLOCK_SIZE + 2)
    rng = random.Random(0)
    prompts = [random_prompt(rng, prompt_tokens) for _ in range(num_running)]
    requests = [make_request(f"request-{index}", prompt, num_steps + 1000) for index, prompt in enumerate(prompts)]
    return make_scheduler(num_blocks, num_running, 8192), requests


def sample_anything(plan: StepPlan, scheduler: Scheduler) -> StepResult:
    """What a runner would return: a token for each request whose tokens are all computed."""
    return result_of(plan, scheduler, lambda _request, _number: 7)


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
    parser.add_argument("--scenario", choices=["decode", *SCENARIOS, "all"], default="decode")
    parser.add_argument("--running", type=int, default=256, help="requests that decode (this and the next two: of that scenario)")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print one JSON line")
    arguments = parser.parse_args()
    for name in ("running", "prompt_tokens", "steps"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}; allowed: 1 or more")
    figures: dict[str, object] = {}
    if arguments.scenario in ("decode", "all"):
        figures = dict(run(arguments.running, arguments.prompt_tokens, arguments.steps))
    for name, scenario in SCENARIOS.items():
        if arguments.scenario in (name, "all"):
            figures[name] = scenario()
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:20} {value!s:>12}")


if __name__ == "__main__":
    main()
