"""python -m bench.router replay: a trace through the real policy and real block pools, on a virtual clock."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.router.cost_model import CostModel
from bench.router.sequential import replay_sequential
from bench.router.trace import TraceRequest, read_trace
from bench.router.virtual_cluster import ClusterShape, Served, VirtualCluster

# Milliseconds to bring a block of 160 MiB from a shared store: nvme at 20 GB/s, redis over 100 Gbit/s.
STORE_MS_PER_BLOCK = {"nvme": 8.4, "redis": 13.4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options; every time of the cost model is one."""
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines in Mooncake's format")
    parser.add_argument("--requests", type=int, help="only so many of the first ones")
    parser.add_argument("--nodes", type=int, default=8, help="nodes that prefill and decode")
    parser.add_argument("--prefill", type=int, default=0, help="with --decode: separate nodes instead of --nodes")
    parser.add_argument("--decode", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=5859, help="of 512 tokens, per node; 0 with --sequential: unlimited")
    parser.add_argument("--policy", default="kv_aware,least_loaded,round_robin", help="several: the first one's figures lead")
    parser.add_argument("--store", choices=("none", *STORE_MS_PER_BLOCK), default="none", help="what the nodes share")
    parser.add_argument("--store-blocks", type=int, default=0, help="0: ten times the nodes' blocks")
    parser.add_argument(
        "--sequential", action="store_true", help="one pool, one request after the other: the trace's own numbers"
    )
    parser.add_argument("--speed", type=float, default=1.0, help="times so many requests a second as the trace has")
    for cost in fields(CostModel):
        kind = int if cost.name == "step_tokens" else float
        parser.add_argument(f"--{cost.name.replace('_', '-')}", type=kind, help=f"default: {cost.default}")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The figures; those of the first policy at the top, and of all below by_policy."""
    requests = read_trace(arguments.trace, arguments.requests)
    if arguments.sequential:
        return _sequential(requests, arguments.blocks or None)
    if arguments.speed != 1.0:
        requests = [_sooner(traced, arguments.speed) for traced in requests]
    given = {cost.name: getattr(arguments, cost.name) for cost in fields(CostModel)}
    if arguments.store != "none" and given["store_ms_per_block"] is None:
        given["store_ms_per_block"] = STORE_MS_PER_BLOCK[arguments.store]
    costs = CostModel(**{name: value for name, value in given.items() if value is not None})
    shape = _shape(arguments)
    by_policy = {}
    for policy in arguments.policy.split(","):
        cluster = VirtualCluster(shape, policy, costs)
        by_policy[policy] = summarize(cluster.run(requests), cluster)
        print(policy, *(f"{name} {value}" for name, value in by_policy[policy].items()), flush=True)
    first = next(iter(by_policy))
    return {
        "policy": first,
        **by_policy[first],
        "ceiling_one_cache": round(replay_sequential(requests, None).by_tokens, 4),
        "requests": len(requests),
        "store_blocks": shape.num_store_blocks,
        "by_policy": by_policy,
    }


def summarize(served: Sequence[Served], cluster: VirtualCluster) -> dict[str, Any]:
    """Reuse as shares of all prompt tokens; times in ms."""
    num_prompt_tokens = sum(one.num_prompt_tokens for one in served)
    ttfts_ms = sorted(one.ttft_s * 1000 for one in served)
    num_requests = sorted(cluster.num_requests_by_node.values())
    return {
        "prefix_reuse_ratio": round(sum(one.num_hit_tokens for one in served) / num_prompt_tokens, 4),
        "of_which_from_store": round(sum(one.num_stored_tokens for one in served) / num_prompt_tokens, 4),
        "ttft_ms_mean": round(statistics.fmean(ttfts_ms), 1),
        "ttft_ms_p50": round(_percentile(ttfts_ms, 0.5), 1),
        "ttft_ms_p99": round(_percentile(ttfts_ms, 0.99), 1),
        "ttft_ms_max": round(ttfts_ms[-1], 1),
        "e2e_ms_mean": round(statistics.fmean(one.end_to_end_s * 1000 for one in served), 1),
        "prefills_on_decode_nodes": dict(sorted(cluster.num_prefills_by_reason.items())),
        "requests_per_node": [num_requests[0], num_requests[-1]],
    }


def _sequential(requests: Sequence[TraceRequest], num_blocks: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"requests": len(requests), "blocks": num_blocks}
    for order in ("head_first", "tail_first"):
        reuse = replay_sequential(requests, num_blocks, order)
        found[order] = {"reuse_by_blocks": round(reuse.by_blocks, 4), "reuse_by_tokens": round(reuse.by_tokens, 4)}
    return found


def _shape(arguments: argparse.Namespace) -> ClusterShape:
    num_prefill, num_decode = arguments.prefill, arguments.decode
    if (num_prefill > 0) != (num_decode > 0):
        raise SystemExit("--prefill and --decode: both or neither")
    num_mixed = 0 if num_decode else arguments.nodes
    num_store_blocks = 0
    if arguments.store != "none":
        num_store_blocks = arguments.store_blocks or 10 * arguments.blocks * (num_mixed + num_prefill + num_decode)
    return ClusterShape(num_mixed, num_prefill, num_decode, arguments.blocks, num_store_blocks)


def _sooner(traced: TraceRequest, speed: float) -> TraceRequest:
    return TraceRequest(
        traced.index, traced.arrival_s / speed, traced.num_prompt_tokens, traced.num_output_tokens, traced.block_names
    )


def _percentile(ascending: Sequence[float], share: float) -> float:
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
