"""Random nodes of a loaded cluster are killed again and again, and started again as a supervisor would; clients check all tokens.

    python -m tests.fault.chaos --prefill 2 --decode 2 --kill-every-s 20 --minutes 5 --json

Prints progress on stderr and one JSON object last; exit code 1 when anything was wrong, lost or leaked.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.fault.checked_cluster import CheckedCluster
from tests.fault.verified_load import Outcome, VerifiedLoad
from tests.support.cluster import holds_nothing

DETECTION_LIMIT_S = 30.0
STALL_MARGIN_S = 1.0  # a stalled node stays stopped so long after the router has noticed
IDLE_LIMIT_S = 60.0
REDIS_FLAGS = ("--maxmemory", "512mb", "--maxmemory-samples", "32")
NUM_PROBLEMS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What to run. signals: of "kill" (SIGKILL, then started again) and "stop" (SIGSTOP beyond the heartbeat timeout, SIGCONT).

    victim_roles: roles of the first victims in order; chosen at random when they are used up.
    """

    prefill: int = 2
    decode: int = 2
    kill_every_s: float = 20.0
    duration_s: float = 300.0
    connector: str = "shm"
    num_clients: int = 8
    num_questions: int = 120
    seed: int = 0
    signals: Sequence[str] = ("kill",)
    heartbeat_timeout_s: float = 5.0
    warm_after_s: float = 45.0
    victim_roles: Sequence[str] = ()


@dataclass(slots=True)
class Hit:
    """One fault. request_ids: what the node had in flight just before. detection_s: until the router said that it is down."""

    node_id: str
    signal: str
    at_s: float
    request_ids: frozenset[str]
    detection_s: float | None = None


@dataclass(slots=True)
class _Pauses:
    """Seconds from a fault to the client's next token, of requests that were on the node, by what they were doing."""

    streaming: list[float] = field(default_factory=list)
    in_prefill: list[float] = field(default_factory=list)


class Chaos:
    """One run: answers, load, faults, and the report. Use from the main thread, which starts processes."""

    def __init__(self, options: ChaosOptions) -> None:
        self._options = options
        self._rng = random.Random(f"chaos/{options.seed}")
        self._rig = CheckedCluster(
            prefill=options.prefill,
            decode=options.decode,
            connector=options.connector,
            capacity="512MiB",
            router={"heartbeat_timeout_s": options.heartbeat_timeout_s},
            redis_flags=REDIS_FLAGS,
        )
        self._cluster = self._rig.cluster
        self._hits: list[Hit] = []
        self._victim_roles = list(options.victim_roles)

    def run(self) -> dict[str, Any]:
        """The report. Everything is stopped afterwards, whatever happens."""
        rig, cluster = self._rig, self._cluster
        with rig:
            _say(f"{self._options.num_questions} questions for the undisturbed cluster")
            questions = rig.learn(self._options.seed, self._options.num_questions)
            cluster.wait_clean()
            self._load = VerifiedLoad(rig.client, questions, num_clients=self._options.num_clients, seed=self._options.seed)
            rig.sampler.start()
            began_s = time.monotonic()
            self._load.start()
            self._break_things(began_s)
            self._load.stop()
            seconds = time.monotonic() - began_s
            rig.sampler.stop()
            audit = self._wait_idle()
            moved_tokens = {
                source: cluster.client.metric("kvrelay_moved_tokens_total", source=source) for source in ("cached", "recomputed")
            }
            leftovers = [*cluster.stop(), *self._stray_store_files()]
        return self._report(audit, leftovers, moved_tokens, seconds)

    # -- faults --------------------------------------------------------------------------------------------------------
    def _break_things(self, began_s: float) -> None:
        options = self._options
        num_faults = 0
        while (next_at_s := began_s + (num_faults + 1) * options.kill_every_s) < began_s + options.duration_s:
            num_faults += 1
            time.sleep(max(0.0, next_at_s - time.monotonic()))
            victim = self._choose_victim()
            if victim is None:
                _say("no node may be killed now")
                continue
            self._hit(victim, self._rng.choice(list(options.signals)))
            counts = {outcome.value: count for outcome, count in self._load.counts().items()}
            _say(f"{time.monotonic() - began_s:5.0f} s: {self._hits[-1].signal} {victim}, detected after "
                 f"{self._hits[-1].detection_s}, requests so far {counts}")  # fmt: skip
        time.sleep(max(0.0, began_s + options.duration_s - time.monotonic()))

    def _choose_victim(self) -> str | None:
        """A node that is up; never the last decode node."""
        up = [
            node for node in self._cluster.client.nodes() if node["status"] == "up" and node["node_id"] in self._cluster.children
        ]
        roles = [node["role"] for node in up]
        allowed = sorted(node["node_id"] for node in up if node["role"] == "prefill" or roles.count("decode") > 1)
        if self._victim_roles:
            wanted = self._victim_roles.pop(0)
            allowed = [name for name in allowed if name.startswith(wanted)]
        return self._rng.choice(allowed) if allowed else None

    def _hit(self, name: str, signal_name: str) -> None:
        cluster = self._cluster
        request_ids = frozenset(listed["request_id"] for listed in cluster.client.requests() if listed["node_id"] == name)
        hit = Hit(name, signal_name, time.monotonic(), request_ids)
        self._hits.append(hit)
        if signal_name == "kill":
            cluster.kill(name)
            cluster.restart_node(name, wait=False)
        else:
            cluster.pause(name)
        while cluster.client.node_status(name) != "down":
            if time.monotonic() > hit.at_s + DETECTION_LIMIT_S:
                break
            time.sleep(0.005)
        else:
            hit.detection_s = round(time.monotonic() - hit.at_s, 3)
        if signal_name == "stop":
            time.sleep(STALL_MARGIN_S)
            cluster.resume(name)

    # -- afterwards ----------------------------------------------------------------------------------------------------
    def _wait_idle(self) -> dict[str, Any]:
        """The last audit: the first clean one, or what is still held at the deadline."""
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while True:
            try:
                audit = self._cluster.audit()
            except httpx.HTTPError as error:
                audit = {"is_clean": False, "problems": [str(error)], "router": {"requests_in_flight": -1}, "nodes": {}}
            if holds_nothing(audit) or time.monotonic() > deadline_s:
                return audit
            time.sleep(0.2)

    def _stray_store_files(self) -> list[str]:
        """What a persistent store should not keep when nobody uses it. Leases of killed nodes go with the next start."""
        if self._rig.folder is None or self._rig.redis is not None:
            return []
        kept = ("lock", "index", "segment")
        return [str(path) for path in self._rig.folder.rglob("*") if path.is_file() and path.name not in kept]

    def _pauses(self) -> _Pauses:
        pauses = _Pauses()
        for hit in self._hits:
            for record in self._load.records:
                if record.request_id not in hit.request_ids or not record.sent_at_s <= hit.at_s < record.ended_at_s:
                    continue
                next_at_s = record.next_token_after_s(hit.at_s)
                if next_at_s is None:
                    continue  # all its tokens were here already, or it never went on and counts as lost
                first_at_s = record.first_token_at_s
                is_streaming = first_at_s is not None and first_at_s <= hit.at_s
                (pauses.streaming if is_streaming else pauses.in_prefill).append(next_at_s - hit.at_s)
        return pauses

    def _report(
        self, audit: dict[str, Any], leftovers: list[str], moved_tokens: dict[str, float], seconds: float
    ) -> dict[str, Any]:
        counts = self._load.counts()
        pauses = self._pauses()
        detections = [hit.detection_s for hit in self._hits if hit.detection_s is not None]
        growths = self._rig.sampler.growth_mib_by_process(self._options.warm_after_s)
        num_moved_tokens = sum(moved_tokens.values())
        problems = [record for record in self._load.records if record.outcome in (Outcome.WRONG, Outcome.LOST)]
        for record in problems[:NUM_PROBLEMS_SHOWN]:
            _say(f"{record.request_id} {record.outcome}: {record.detail}")
        return {
            "accepted": counts[Outcome.RIGHT] + counts[Outcome.WRONG] + counts[Outcome.LOST],
            **{outcome.value: counts[outcome] for outcome in Outcome},
            "pause_s_p50": percentile(pauses.streaming, 50),
            "pause_s_p99": percentile(pauses.streaming, 99),
            "pause_s_max": percentile(pauses.streaming, 100),
            "prefill_pause_s_p50": percentile(pauses.in_prefill, 50),
            "prefill_pause_s_p99": percentile(pauses.in_prefill, 99),
            "detection_s_p50": percentile(detections, 50),
            "detection_s_p99": percentile(detections, 99),
            "undetected": sum(hit.detection_s is None for hit in self._hits),
            "kills": len(self._hits),
            "kills_by_node": dict(sorted(Counter(hit.node_id for hit in self._hits).items())),
            "moved_requests": len(pauses.streaming) + len(pauses.in_prefill),
            "moved_tokens_from_store_share": round(moved_tokens["cached"] / num_moved_tokens, 4) if num_moved_tokens else None,
            "leaked_blocks": sum(node["counts"].get("blocks_used", 0) for node in audit["nodes"].values()),
            "leaked_files": len(leftovers),
            "leftovers": leftovers,
            "is_audit_clean": holds_nothing(audit),
            "audit_problems": audit["problems"],
            "rss_growth_mb": max(growths.values(), default=None),
            "rss_growth_mb_by_process": growths,
            "tokens_per_s": round(sum(len(r.token_times_s) for r in self._load.records) / seconds, 1),
            "seconds": round(seconds, 1),
            **{name: value for name, value in dataclasses.asdict(self._options).items() if name in _ECHOED},
        }


_ECHOED = ("prefill", "decode", "connector", "num_clients", "seed", "signals", "kill_every_s")


def is_all_right(report: dict[str, Any]) -> bool:
    """Whether nothing was wrong, lost or leaked."""
    return (
        not (report["wrong"] or report["lost"] or report["leaked_blocks"] or report["leaked_files"]) and report["is_audit_clean"]
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The nearest-rank percentile, rounded to milliseconds; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 3)


def _say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> tuple[ChaosOptions, bool]:
    parser = argparse.ArgumentParser(prog="python -m tests.fault.chaos", description="Kill nodes under load; check every token.")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--kill-every-s", type=float, default=20.0)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--connector", choices=("shm", "nvme", "redis"), default="shm")
    parser.add_argument("--clients", type=int, default=8, dest="num_clients")
    parser.add_argument("--questions", type=int, default=120, dest="num_questions", help="different requests, asked beforehand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--signals", default="kill", help="kill, stop, or both: kill,stop")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=5.0)
    parser.add_argument("--json", action="store_true", help="the report as one line, not indented")
    given = vars(parser.parse_args(argv))
    is_one_line = given.pop("json")
    signals = tuple(given.pop("signals").split(","))
    if not set(signals) <= {"kill", "stop"}:
        parser.error(f"--signals: got {','.join(signals)}; allowed: kill, stop")
    return ChaosOptions(duration_s=given.pop("minutes") * 60.0, signals=signals, **given), is_one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the report, and return the exit code."""
    options, is_one_line = _parse(argv)
    report = Chaos(options).run()
    print(json.dumps(report, indent=None if is_one_line else 2), flush=True)
    return 0 if is_all_right(report) else 1


if __name__ == "__main__":
    sys.exit(main())
