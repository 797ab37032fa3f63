"""Decode steps of requests that share a prefix, with the shared blocks read together (cascade attention) and one by one.

python -m bench.cascade --dtypes bfloat16 --requests 2,4,8,16,32,64 --prefixes 256,512,1024,2048,4096 --tails 16 --json

With plain-torch attention, which alone reads shared blocks together. Both ways run over one KV pool of random values, step by
step in turn, and must sample the same tokens. With one thread times are CPU time, which a busy machine disturbs little; with
more they are wall time. ratio: median over the pairs of steps; below 1 sharing pays. tile_reads: KV tiles that a layer gathers.
chosen: whether the rule in force shares.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from core.config import ModelOptions
from core.kv.pool_memory import KVPoolMemory
from core.model.description import ModelDescription, describe_model
from core.model.runner import TorchModelRunner, kv_cache_views
from core.model.shared_tiles import CascadeRule
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan, StepResult

BLOCK_SIZE = 16
TILE_TOKENS = 256
NEVER, ALWAYS = CascadeRule(min_requests=1_000_000), CascadeRule(min_requests=2, min_saved_reads=0)


@dataclass(frozen=True, slots=True)
class Cell:
    """One batch. Requests come in groups of group_size (0: all in one) that share prefix_tokens; num_odd more share nothing."""

    num_requests: int
    prefix_tokens: int
    tail_tokens: int
    group_size: int
    num_odd: int

    def block_tables(self) -> list[list[int]]:
        """Block tables with room for a few steps, from block 0 on."""
        num_prefix, num_all = self.prefix_tokens // BLOCK_SIZE, (self.prefix_tokens + self.tail_tokens) // BLOCK_SIZE + 2
        next_block = 0
        prefix: list[int] = []
        tables = []
        for index in range(self.num_requests + self.num_odd):
            if index == 0 or index >= self.num_requests or (self.group_size and index % self.group_size == 0):
                prefix = list(range(next_block, next_block + num_prefix))
                next_block += num_prefix
            num_own = num_all - num_prefix
            tables.append(prefix + list(range(next_block, next_block + num_own)))
            next_block += num_own
        return tables

    def num_tile_reads(self, is_shared: bool) -> int:
        """Of a decode step and layer: whole tiles of the prefix once per group or request, the rest by each request."""
        num_tiles, num_shared = -(-(self.prefix_tokens + self.tail_tokens + 1) // TILE_TOKENS), self.prefix_tokens // TILE_TOKENS
        if not is_shared:
            return num_tiles * (self.num_requests + self.num_odd)
        num_groups = -(-self.num_requests // self.group_size) if self.group_size else 1
        own = (num_tiles - num_shared) * self.num_requests + num_tiles * self.num_odd
        return num_shared * num_groups + own


def add_requests(runner: TorchModelRunner, cell: Cell) -> StepResult:
    """Let the runner take up the cell's requests, all of whose tokens but the last are computed, and decode once."""
    num_known = cell.prefix_tokens + cell.tail_tokens
    sampling = SamplingParams(temperature=0.0, max_tokens=1000)
    new = [
        NewRequest(f"r{index}", [7 + index] * num_known, num_known, num_known - 1, table, sampling)
        for index, table in enumerate(cell.block_tables())
    ]
    return runner.execute(StepPlan(0, {request.request_id: 1 for request in new}, len(new), new, {}, [], []))


def measure(runners: dict[str, TorchModelRunner], cell: Cell, num_pairs: int, num_threads: int) -> dict[str, Any]:
    """A row of figures: medians in milliseconds of CPU (one thread) or wall time."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    names = [f"r{index}" for index in range(cell.num_requests + cell.num_odd)]
    for runner in runners.values():
        add_requests(runner, cell)
    plan = StepPlan(1, dict.fromkeys(names, 1), len(names), [], {}, [], [])
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(num_pairs):
        sampled = []
        for name, runner in runners.items():
            started = clock()
            sampled.append(runner.execute(plan).sampled_token_ids)
            times[name].append((clock() - started) * 1000)
        assert all(tokens == sampled[0] for tokens in sampled), f"{cell}: tokens depend on sharing"
    for runner in runners.values():
        runner.execute(StepPlan(2, {}, 0, [], {}, names, []))
    rule = CascadeRule()
    num_whole = cell.prefix_tokens // TILE_TOKENS
    group_size = cell.group_size or cell.num_requests
    num_saved = num_whole * (group_size - 1)
    return {
        "requests": cell.num_requests,
        "odd": cell.num_odd,
        "group_size": group_size,
        "prefix": cell.prefix_tokens,
        "tail": cell.tail_tokens,
        "tile_reads": [cell.num_tile_reads(False), cell.num_tile_reads(True)],
        **{f"{name}_ms": round(statistics.median(values), 1) for name, values in times.items()},
        "ratio": round(statistics.median(a / b for a, b in zip(times["shared"], times["alone"], strict=True)), 3),
        "chosen": group_size >= rule.min_requests and num_saved >= rule.min_saved_reads,
    }


def load_runners(dtype: str, cells: list[Cell], num_threads: int) -> dict[str, TorchModelRunner]:
    """Two runners over one pool that is filled with random values and holds any of the cells."""
    folder = resolve_model("smollm2")
    description: ModelDescription = describe_model(folder, ModelOptions(dtype=dtype), BLOCK_SIZE)
    num_blocks = max(max(map(max, cell.block_tables())) for cell in cells) + 1
    pool = KVPoolMemory(description.kv_layout, num_blocks)
    torch.manual_seed(0)
    for caches in kv_cache_views(pool):
        for cache in caches:
            cache.copy_(torch.randn(BLOCK_SIZE, *cache.shape[2:]).expand_as(cache))
    rules = {"alone": NEVER, "shared": ALWAYS}
    return {
        name: TorchModelRunner.load(folder, description, pool, num_threads, rule, cpu_kernels="torch")
        for name, rule in rules.items()
    }


def main() -> None:
    """Print a row per dtype and cell; with --json one line of JSON at the end."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m bench.cascade", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--requests", type=numbers, default="2,4,8,16,32,64", help="batch sizes")
    parser.add_argument("--prefixes", type=numbers, default="256,512,1024,2048,4096", help="common prefixes in tokens")
    parser.add_argument("--tails", type=numbers, default="16", help="each request's own tokens")
    parser.add_argument("--group-sizes", type=numbers, default="0", help="requests per prefix; 0: one prefix for all")
    parser.add_argument("--odd", type=int, default=0, help="further requests, which share nothing")
    parser.add_argument("--pairs", type=int, default=5, help="steps of either kind per cell")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    cells = [
        Cell(requests, prefix, tail, group_size, arguments.odd)
        for tail in arguments.tails
        for group_size in arguments.group_sizes
        for requests in arguments.requests
        for prefix in arguments.prefixes
    ]
    rows = []
    for dtype in arguments.dtypes.split(","):
        runners = load_runners(dtype, cells, arguments.threads)
        for cell in cells:
            rows.append({"dtype": dtype, **measure(runners, cell, arguments.pairs, arguments.threads)})
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
