"""python -m bench.router decide: how long one routing decision takes with many nodes and a large index of what they hold.

A decision is what the router does between a request's block hashes and the name of its node: matching the index, reading the
nodes' load, the policy. Hashing a prompt's tokens is timed beside it. Prompts are of 500 to 100,000 tokens, evenly on a
logarithmic scale; each begins as one of the sequences in the index does, for a random share of it. Beside the time that passed
there is the thread's own CPU time, which other work on the machine does not lengthen as much.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Sequence
from typing import Any

from bench.router.cost_model import CostModel
from bench.router.virtual_node import VirtualNode
from bench.router.virtual_router import VirtualRouter
from core.kv.hashing import Namespace, extend_block_hashes

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 500, 100_000
NUM_SYSTEM_PROMPTS, SYSTEM_PROMPT_BLOCKS = 10, 64
SYSTEM_PROMPT_SHARE = 0.3  # of the sequences
SECOND_HOME_SHARE = 0.1  # of the sequences are in two nodes
NUM_IN_FLIGHT = 8  # requests per node, so that loads differ
MAX_NUM_SEQS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="in the index, of all nodes together")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--policy", default="kv_aware")
    parser.add_argument("--decisions", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Percentiles in µs, of decisions over all prompts and over the shortest and longest tenth, and of hashing."""
    rng = random.Random(arguments.seed)
    nodes = [VirtualNode(f"decode-{place:03}", "decode", 1, MAX_NUM_SEQS, CostModel()) for place in range(arguments.nodes)]
    router = VirtualRouter(arguments.policy, nodes, arguments.block_size)
    sequences, num_indexed = fill_index(router, nodes, arguments.blocks, rng)
    gc.collect()
    gc.freeze()  # a router has no such sequences to look through
    for node in nodes:
        router.heartbeat(node, 0.0)
    placed: list[str] = []
    timings: list[tuple[int, float, float]] = []
    for number in range(arguments.decisions):
        num_tokens = round(MIN_PROMPT_TOKENS * (MAX_PROMPT_TOKENS / MIN_PROMPT_TOKENS) ** rng.random())
        names = make_prompt(sequences, num_tokens // arguments.block_size, rng)
        started_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        placement = router.place_decode(num_tokens, names, number / 1000)
        cpu_us = (time.thread_time_ns() - cpu_ns) / 1000
        timings.append((num_tokens, (time.perf_counter_ns() - started_ns) / 1000, cpu_us))
        router.registry.start_dispatch(placement.node_id, f"{number}.1", num_tokens, prefill_ms=placement.prefill_ms)
        placed.append(placement.node_id)
        if (oldest := number - NUM_IN_FLIGHT * arguments.nodes) >= 0:
            router.registry.end_dispatch(placed[oldest], f"{oldest}.1")
    timings.sort()
    tenth = max(1, len(timings) // 10)
    gc.unfreeze()
    return {
        "decision_us": _percentiles([us for _tokens, us, _cpu in timings]),
        "decision_us_shortest_tenth": _percentiles([us for _tokens, us, _cpu in timings[:tenth]]),
        "decision_us_longest_tenth": _percentiles([us for _tokens, us, _cpu in timings[-tenth:]]),
        "decision_cpu_us": _percentiles([cpu for _tokens, _us, cpu in timings]),
        "hashing_us_10000_tokens": _hashing_us(10_000, arguments.block_size),
        "nodes": arguments.nodes,
        "blocks": num_indexed,
        "policy": arguments.policy,
    }


def fill_index(
    router: VirtualRouter, nodes: Sequence[VirtualNode], num_blocks: int, rng: random.Random
) -> tuple[list[list[bytes]], int]:
    """Tell the router of sequences until it knows num_blocks blocks, evenly over the nodes; the sequences, and the blocks."""
    systems = [[rng.randbytes(16) for _ in range(SYSTEM_PROMPT_BLOCKS)] for _ in range(NUM_SYSTEM_PROMPTS)]
    held: list[set[bytes]] = [set() for _ in nodes]
    sequences: list[list[bytes]] = []
    num_known = 0
    while num_known < num_blocks:
        begin = rng.choice(systems) if rng.random() < SYSTEM_PROMPT_SHARE else []
        sequence = [*begin, *(rng.randbytes(16) for _ in range(rng.randint(20, 2000)))]
        sequences.append(sequence)
        for place in rng.sample(range(len(nodes)), 2 if len(nodes) > 1 and rng.random() < SECOND_HOME_SHARE else 1):
            added = [name for name in sequence if name not in held[place]][: num_blocks - num_known]
            router.index.store(nodes[place].node_id, added)
            held[place].update(added)
            num_known += len(added)
    return sequences, num_known


def make_prompt(sequences: Sequence[list[bytes]], num_blocks: int, rng: random.Random) -> list[bytes]:
    """Names of a prompt's blocks, the first of which some node may have."""
    known = rng.choice(sequences)
    names = known[: min(num_blocks, rng.randint(0, len(known)))]
    return names + [rng.randbytes(16) for _ in range(num_blocks - len(names))]


def _hashing_us(num_tokens: int, block_size: int) -> float:
    root = Namespace(b"model", b"layout", block_size).root_hash()
    token_ids = list(range(num_tokens))
    rounds = []
    for _ in range(20):
        started_ns = time.perf_counter_ns()
        extend_block_hashes([], token_ids, block_size, root)
        rounds.append((time.perf_counter_ns() - started_ns) / 1000)
    return round(sorted(rounds)[len(rounds) // 2], 1)


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ascending = sorted(values)
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {name: round(ascending[min(len(ascending) - 1, int(share * len(ascending)))], 1) for name, share in shares.items()}
