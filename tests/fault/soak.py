"""Saturation on an undisturbed cluster for long: memory, descriptors, threads and latency must not change any more.

    python -m tests.fault.soak --minutes 30 --json

The first third of the run warms up; the last third is held against the middle one, by ratios. Prints progress on stderr and one
JSON object last; exit code 1 when something grew, or any answer was not right.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.fault.chaos import percentile
from tests.fault.checked_cluster import ENGINE, CheckedCluster
from tests.fault.process_samples import ProcessHistory, ProcessSample, sample_process
from tests.fault.verified_load import Outcome, RequestRecord, VerifiedLoad
from tests.support.memory_pools import pool_files

STORE_BYTES = "256MiB"  # full, and evicting, within the first third
PROGRESS_EVERY_S = 30.0
IDLE_LIMIT_S = 30.0
ROW_STEP = 8  # batches are padded to multiples of it
MAX_MEMORY_RATIO = 1.01
MAX_LATENCY_RATIOS = {50: 1.25, 99: 1.6}
MAX_DESCRIPTORS_MORE = 1.0  # of medians: connections open and close while we look


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakOptions:
    """What to run."""

    duration_s: float = 1800.0
    prefill: int = 1
    decode: int = 1
    connector: str = "shm"
    num_clients: int = 12
    num_questions: int = 96
    seed: int = 0


class Soak:
    """One run: answers, load, samples, and the report. Use from the main thread."""

    def __init__(self, options: SoakOptions) -> None:
        self._options = options
        self._rig = CheckedCluster(
            prefill=options.prefill, decode=options.decode, connector=options.connector, capacity=STORE_BYTES
        )
        self._store_bytes: list[tuple[float, int]] = []

    def run(self) -> dict[str, Any]:
        """The report. Everything is stopped afterwards, whatever happens."""
        options = self._options
        with self._rig as rig:
            _say(f"{options.num_questions} questions for the idle cluster")
            questions = rig.learn(options.seed, options.num_questions)
            self._warm_up()
            rig.cluster.wait_clean()
            idle = self._idle_samples()
            load = VerifiedLoad(rig.client, questions, num_clients=options.num_clients, seed=options.seed)
            rig.sampler.start()
            began_s = time.monotonic()
            load.start()
            self._watch(load, began_s)
            rig.sampler.stop()
            load.stop()
            rig.cluster.wait_clean()
            left_open = self._wait_descriptors(idle)
        return self._report(load, began_s, left_open)

    def _warm_up(self) -> None:
        """Have prefill nodes compute every number of rows once: the matrix library keeps some megabytes of code for each."""
        for num_tokens in range(ROW_STEP, int(ENGINE["max_num_batched_tokens"]) + 1, ROW_STEP):
            for turn in range(self._options.prefill):
                self._rig.cluster.client.complete([1] * num_tokens, max_tokens=1, cache_salt=f"warm up {num_tokens} {turn}")

    def _watch(self, load: VerifiedLoad, began_s: float) -> None:
        next_progress_s = began_s + PROGRESS_EVERY_S
        while (now_s := time.monotonic()) < began_s + self._options.duration_s:
            time.sleep(1.0)
            self._store_bytes.append((now_s, self._used_store_bytes()))
            if now_s >= next_progress_s:
                next_progress_s += PROGRESS_EVERY_S
                counts = {outcome.value: count for outcome, count in load.counts().items()}
                memory = {h.name: round(h.samples[-1].anon_mib) for h in self._rig.sampler.histories.values()}
                _say(f"{now_s - began_s:5.0f} s: {counts}, anonymous MiB {memory}")

    def _used_store_bytes(self) -> int:
        folder, pool_name = self._rig.folder, self._rig.cluster.pool_name
        pools = [path for kind in ("index", "segment") for path in pool_files(pool_name, kind)]
        files = pools if folder is None else [path for path in folder.rglob("*") if path.is_file()]
        return sum(path.stat().st_blocks * 512 for path in files)

    def _idle_samples(self) -> dict[str, ProcessSample]:
        time.sleep(6.0)  # beyond the server's keep-alive
        return {name: sample_process(pid) for name, pid in self._rig.pids().items()}

    def _wait_descriptors(self, idle: dict[str, ProcessSample]) -> dict[str, int]:
        """How many more descriptors each process has open, idle, than when it was idle before the load; after a while."""
        deadline_s = time.monotonic() + IDLE_LIMIT_S
        while True:
            more = {
                name: sample_process(pid).num_descriptors - idle[name].num_descriptors for name, pid in self._rig.pids().items()
            }
            if not any(count > 0 for count in more.values()) or time.monotonic() > deadline_s:
                return {name: count for name, count in more.items() if count > 0}
            time.sleep(0.5)

    # -- the report ----------------------------------------------------------------------------------------------------
    def _report(self, load: VerifiedLoad, began_s: float, left_open: dict[str, int]) -> dict[str, Any]:
        third_s = self._options.duration_s / 3
        middle, last = (began_s + third_s, began_s + 2 * third_s), (began_s + 2 * third_s, began_s + 3 * third_s)
        counts = load.counts()
        latency_ratios = {}
        latencies_s: dict[str, list[float | None]] = {}
        for name, of_record in _LATENCIES.items():
            for percent in MAX_LATENCY_RATIOS:
                values = [percentile(_latencies(load.records, window, of_record), percent) for window in (middle, last)]
                latencies_s[f"{name}_s_p{percent}"] = values
                latency_ratios[f"{name}_p{percent}"] = _ratio(values[0], values[1])
        processes = {
            history.name: _compare(history, middle, last) for history in self._rig.sampler.histories.values() if history.samples
        }
        store_bytes = [
            max((num for at_s, num in self._store_bytes if start <= at_s < end), default=0) for start, end in (middle, last)
        ]
        faults = [f"{counts[outcome]} {outcome.value}" for outcome in Outcome if outcome is not Outcome.RIGHT and counts[outcome]]
        faults += [f"{name}: {count} descriptors left open" for name, count in left_open.items()]
        for name, found in processes.items():
            if found["anon_ratio"] > MAX_MEMORY_RATIO:
                faults.append(f"{name}: memory grew by {found['anon_growth_mib']} MiB")
            if found["descriptors"][1] > found["descriptors"][0] + MAX_DESCRIPTORS_MORE:
                faults.append(f"{name}: descriptors {found['descriptors']}")
            if found["threads"][1] > found["threads"][0]:
                faults.append(f"{name}: threads {found['threads']}")
        if store_bytes[1] > store_bytes[0] * MAX_MEMORY_RATIO:
            faults.append(f"store bytes {store_bytes}")
        for name, ratio in latency_ratios.items():
            if ratio is None or ratio > MAX_LATENCY_RATIOS[int(name.rpartition("p")[2])]:
                faults.append(f"latency {name} changed by {ratio}")
        return {
            "is_flat": not faults,
            "faults": faults,
            **{outcome.value: counts[outcome] for outcome in Outcome},
            "latency_ratios": latency_ratios,
            "latencies_middle_last": latencies_s,
            "processes": processes,
            "store_mib_middle_last": [round(num / 2**20, 1) for num in store_bytes],
            "tokens_per_s": round(sum(len(record.token_times_s) for record in load.records) / self._options.duration_s, 1),
            "seconds": self._options.duration_s,
            "num_clients": self._options.num_clients,
            "seed": self._options.seed,
        }


def _time_per_token_s(record: RequestRecord) -> float:
    return (record.ended_at_s - record.token_times_s[0]) / len(record.token_times_s)


def _time_to_first_token_s(record: RequestRecord) -> float:
    return record.token_times_s[0] - record.sent_at_s


_LATENCIES: dict[str, Callable[[RequestRecord], float]] = {
    "time_to_first_token": _time_to_first_token_s,
    "time_per_token": _time_per_token_s,
}


def _latencies(
    records: Sequence[RequestRecord], window: tuple[float, float], of_record: Callable[[RequestRecord], float]
) -> list[float]:
    return [of_record(record) for record in records if window[0] <= record.ended_at_s < window[1] and record.token_times_s]


def _ratio(before: float | None, after: float | None) -> float | None:
    return round(after / before, 3) if before and after is not None else None


def _compare(history: ProcessHistory, middle: tuple[float, float], last: tuple[float, float]) -> dict[str, Any]:
    """Medians of the middle and the last third."""
    samples = [[s for s in history.samples if start <= s.at_s < end] for start, end in (middle, last)]
    anon_mib = [statistics.median(s.anon_mib for s in part) for part in samples]
    return {
        "anon_mib": [round(value, 1) for value in anon_mib],
        "anon_growth_mib": round(anon_mib[1] - anon_mib[0], 2),
        "anon_ratio": round(anon_mib[1] / anon_mib[0], 4),
        "descriptors": [statistics.median(s.num_descriptors for s in part) for part in samples],
        "threads": [statistics.median(s.num_threads for s in part) for part in samples],
    }


def _say(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the report, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fault.soak", description="Load a cluster for long; nothing may grow.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--connector", choices=("shm", "nvme"), default="shm")
    parser.add_argument("--clients", type=int, default=12, dest="num_clients")
    parser.add_argument("--questions", type=int, default=96, dest="num_questions", help="different requests, asked beforehand")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="the report as one line, not indented")
    given = vars(parser.parse_args(argv))
    is_one_line = given.pop("json")
    report = Soak(SoakOptions(duration_s=given.pop("minutes") * 60.0, **given)).run()
    print(json.dumps(report, indent=None if is_one_line else 2), flush=True)
    return 0 if report["is_flat"] else 1


if __name__ == "__main__":
    sys.exit(main())
