"""python -m tests.simulation --seeds 0:1000 | --seed 7 --trace: runs seeds, reports, and shrinks the first that fails."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from typing import Any

from tests.simulation.cluster import Report, SimCluster
from tests.simulation.faults import MAX_FAULTS
from tests.simulation.workload import MAX_REQUESTS


def run_seed(seed: int, **limits: Any) -> tuple[Report | None, str]:
    """(report, "") or (None, what broke)."""
    try:
        return SimCluster(seed, **limits).run(), ""
    except Exception as error:  # a crash is a finding like any other
        return None, f"{type(error).__name__}: {error}"


def shrink(seed: int) -> dict[str, Any]:
    """Leave out nodes, requests and faults, one after the other, as long as it still breaks."""
    limits: dict[str, Any] = {"only_requests": set(range(MAX_REQUESTS)), "only_faults": set(range(MAX_FAULTS)), "max_nodes": 3}
    while limits["max_nodes"] > 1 and _breaks(seed, limits | {"max_nodes": limits["max_nodes"] - 1}):
        limits["max_nodes"] -= 1
    for name in ("only_faults", "only_requests"):
        for number in sorted(limits[name], reverse=True):
            if _breaks(seed, limits | {name: limits[name] - {number}}):
                limits[name] = limits[name] - {number}
    return limits


def _breaks(seed: int, limits: dict[str, Any]) -> bool:
    return run_seed(seed, **limits)[0] is None


def _numbers(text: str) -> set[int]:
    """argparse type: "0,3,5", or "" for none."""
    return {int(part) for part in text.split(",") if part}


def _seed_range(text: str) -> range:
    """argparse type: "0:100"."""
    first, _, end = text.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: FIRST:END, at least one seed")
    return range(int(first), int(end))


def main() -> int:
    """Exit code 1 when a seed breaks a promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=_seed_range, default="0:100", metavar="FIRST:END")
    parser.add_argument("--seed", type=int, help="one seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the timeline")
    parser.add_argument("--only-requests", type=_numbers, metavar="N,N", help="only these requests (of a shrunk seed)")
    parser.add_argument("--only-faults", type=_numbers, metavar="N,N", help="only these faults")
    parser.add_argument("--max-nodes", type=int, default=1000, help="only the first so many nodes of each role")
    parser.add_argument("--json", action="store_true", help="one JSON line last")
    arguments = parser.parse_args()
    limits = {name: getattr(arguments, name) for name in ("only_requests", "only_faults", "max_nodes")}
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.trace, limits)
    began_s = time.monotonic()
    reports: list[Report] = []
    failed: list[int] = []
    for seed in arguments.seeds:
        report, problem = run_seed(seed, **limits)
        if report is None:
            failed.append(seed)
            print(f"seed {seed} broke: {problem}", file=sys.stderr)
        else:
            reports.append(report)
    if failed:
        shrunk = shrink(failed[0])
        requests, faults = (",".join(map(str, sorted(shrunk[name]))) for name in ("only_requests", "only_faults"))
        flags = f"--only-requests '{requests}' --only-faults '{faults}' --max-nodes {shrunk['max_nodes']}"
        print(f"replay: python -m tests.simulation --seed {failed[0]} --trace {flags}", file=sys.stderr)
    summary = summarize(reports, time.monotonic() - began_s) | {"failed_seeds": failed}
    print(json.dumps(summary) if arguments.json else "\n".join(f"{name:22} {value}" for name, value in summary.items()))
    return 1 if failed else 0


def summarize(reports: list[Report], seconds: float) -> dict[str, Any]:
    """Sums over all runs; longest_wait_s is the longest gap between two pieces of news of any request that ended right."""
    names = [leaf.name for leaf in dataclasses.fields(Report) if leaf.name.startswith("num_")]
    summary: dict[str, Any] = {name: sum(getattr(report, name) for report in reports) for name in names}
    return {
        "seeds": len(reports),
        "seeds_per_minute": round(60 * len(reports) / max(seconds, 1e-9)),
        **summary,
        "virtual_s": round(sum(report.virtual_s for report in reports)),
        "local_hit_ratio": _ratio(summary["num_local_hit_tokens"], summary["num_prompt_tokens"]),
        "external_hit_ratio": _ratio(summary["num_external_hit_tokens"], summary["num_prompt_tokens"]),
        "longest_wait_s": round(max((report.longest_wait_s for report in reports), default=0.0), 3),
    }


def _ratio(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _replay(seed: int, is_traced: bool, limits: dict[str, Any]) -> int:
    cluster = SimCluster(seed, is_traced=is_traced, **limits)
    try:
        outcome: object = cluster.run()
    except Exception as error:
        outcome = error
    print("\n".join([*cluster.world.trace, str(outcome)]))
    return 1 if isinstance(outcome, Exception) else 0


if __name__ == "__main__":
    sys.exit(main())
