"""Speed of one store beside the raw medium, in the same run and alternating: what a connector adds to what it stands on.

python -m bench.connectors --backend redis --block-kib 360 --json
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.media.medium import Medium
from connectors.registry import create_connector
from connectors.staging.connector import StagedConnector
from core.clock import MonotonicClock
from core.kv.connector import PrefixLookup, Transfer, TransferDirection, TransferOutcome
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import DevicePool, memory_of

NUM_ROUNDS = 15
BYTES_PER_TRANSFER = 24 * 1024 * 1024
NUM_IN_FLIGHT = 2
STAGING_BYTES = 128 * 1024 * 1024
NUM_LOOKUP_BLOCKS = 128
NUM_KNOWN_BLOCKS = 1_000_000
NUM_LOOKUPS = 3000


MEDIA = ("lmcache", "nvme", "ray", "redis", "shm", "tcp", "tiered")  # modules of bench.media


class Driver:
    """Moves blocks through a connector as a busy engine does: NUM_IN_FLIGHT transfers at a time, each of another request.

    With one at a time a medium would be idle between the end of one and the start of the next, which its limit never is.
    """

    def __init__(self, name: str, options: dict[str, Any], layout: KVLayout, is_staged: bool = False) -> None:
        self.layout = layout
        self.num_part_blocks = max(2, BYTES_PER_TRANSFER // layout.block_bytes)
        self.pool = KVPoolMemory(layout, NUM_IN_FLIGHT * self.num_part_blocks)
        self.pool.buffer[:] = random.Random(0).randbytes(len(self.pool.buffer))
        self.store = self.connector = create_connector(name, options, MonotonicClock())
        memory = self.pool
        if is_staged:
            open_copies = DevicePool(layout, memory_of(self.pool)).open_copies
            self.connector = StagedConnector(self.store, open_copies, MonotonicClock(), save_wait_s=60.0)
            memory = KVPoolMemory(layout, STAGING_BYTES // layout.block_stride_bytes)
        self.connector.register_kv_cache(memory)
        self._next_id = 1
        self._has_news = threading.Event()
        self.connector.on_result = self._has_news.set

    def move(self, direction: TransferDirection, block_hashes: Sequence[bytes]) -> float:
        """All of these, in transfers of a part of the pool each; seconds."""
        start = self.connector.start_load if direction is TransferDirection.LOAD else self.connector.start_save
        free_parts, part_by_id = list(range(NUM_IN_FLIGHT)), dict[int, int]()
        started_s = time.perf_counter()
        for first in range(0, len(block_hashes), self.num_part_blocks):
            while not free_parts:
                self._collect(part_by_id, free_parts)
            names, part = tuple(block_hashes[first : first + self.num_part_blocks]), free_parts.pop()
            block_ids = tuple(range(part * self.num_part_blocks, part * self.num_part_blocks + len(names)))
            part_by_id[self._next_id] = part
            start(Transfer(self._next_id, direction, f"request-{self._next_id}", block_ids, names, time.monotonic() + 60.0))
            self._next_id += 1
        while part_by_id:
            self._collect(part_by_id, free_parts)
        return time.perf_counter() - started_s

    def _collect(self, part_by_id: dict[int, int], free_parts: list[int]) -> None:
        """Wait for results, and take back their parts of the pool."""
        while not (results := self.connector.poll_transfers()):
            self._has_news.wait(60.0)
            self._has_news.clear()
        for result in results:
            if result.outcome is not TransferOutcome.OK:
                raise SystemExit(f"a transfer ended with {result}")
            free_parts.append(part_by_id.pop(result.transfer_id))

    def lookup_us(self, known: Sequence[bytes], name: str, num_lookups: int = NUM_LOOKUPS) -> list[float]:
        """Times of lookups in microseconds, sorted: a new request each, of known blocks, each tenth with an unknown end.
        name: of these requests."""
        times = []
        rng = random.Random(1)
        for number in range(num_lookups):
            chain = rng.sample(known, NUM_LOOKUP_BLOCKS)
            if number % 10 == 0:
                chain[-1] = rng.randbytes(16)
            lookup = PrefixLookup(f"{name}-{number}", chain, self.layout.block_size)
            started_s = time.perf_counter()
            self.connector.get_num_new_matched_tokens(lookup, 0)
            times.append((time.perf_counter() - started_s) * 1e6)
        return sorted(times)


def measure(backend_name: str, block_kib: int, num_rounds: int, is_staged: bool = False) -> dict[str, float]:
    """The figures of one backend and block size. With less than two rounds no speeds."""
    layout = KVLayout(num_layers=block_kib, block_size=16, num_kv_heads=1, head_dim=16, dtype="bfloat16")  # 1 KiB per layer
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-bench-"))
    medium: Medium = importlib.import_module(f"bench.media.{backend_name}").create_medium(folder, layout.block_bytes)
    num_blocks = medium.bytes_per_round // layout.block_bytes
    num_bytes = num_blocks * layout.block_bytes
    speeds: dict[str, list[float]] = {"load": [], "save": [], "limit_load": [], "limit_save": []}
    try:
        driver = Driver(backend_name, medium.options(), layout, is_staged)
        cpu_s = moved_bytes = 0.0
        for round_number in range(1 - medium.num_warmup_rounds, num_rounds):
            names = [os.urandom(16) for _ in range(num_blocks)]
            started_cpu_s = time.process_time()
            for direction in (TransferDirection.SAVE, TransferDirection.LOAD):
                if direction is TransferDirection.LOAD:
                    medium.before_load(driver.store, names)
                seconds = driver.move(direction, names)
                if round_number > 0:
                    speeds[direction.value].append(num_bytes / seconds / 1e9)
            cpu_s += time.process_time() - started_cpu_s
            moved_bytes += 2 * num_bytes
            medium.empty()
            for direction in (TransferDirection.SAVE, TransferDirection.LOAD):
                limit = medium.limit_gbps(direction, num_bytes)
                if round_number > 0:
                    speeds[f"limit_{direction.value}"].append(limit)
            medium.empty()
        known = [os.urandom(16) for _ in range(NUM_KNOWN_BLOCKS)]
        medium.make_known(driver.store, known)
        gc.freeze()  # as after the start of an engine: the collector need not look at what stays
        lookups_us = {"lookup": driver.lookup_us(known, "lookup")}
        if medium.hang(driver.store):
            lookups_us["hung_lookup"] = driver.lookup_us(known, "hung")
            medium.resume()
        driver.connector.close()
    finally:
        medium.close()
        shutil.rmtree(folder, ignore_errors=True)
    figures: dict[str, float] = {}
    if num_rounds > 1:
        median = {name: statistics.median(values) for name, values in speeds.items()}
        figures = {f"{name}_gbps": round(value, 2) for name, value in median.items()}
        figures |= {f"{name}_ratio": round(median[name] / median[f"limit_{name}"], 2) for name in ("load", "save")}
        figures["cpu_s_per_gb"] = round(cpu_s / moved_bytes * 1e9, 3)
    for name, times in lookups_us.items():
        figures[f"{name}_us_p50"] = round(times[len(times) // 2], 1)
        figures[f"{name}_us_p99"] = round(times[len(times) * 99 // 100], 1)
    return {
        **figures,
        **({} if medium.reopen_s is None else {"reopen_s": round(medium.reopen_s, 2)}),
    }


def main() -> None:
    """Print the figures, as one line of JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m bench.connectors", description=__doc__)
    parser.add_argument("--backend", choices=MEDIA, required=True)
    parser.add_argument("--block-kib", type=int, default=360, help="payload of a block: 360 (SmolLM2-135M) or 2048 (an 8B model)")
    parser.add_argument("--staged", action="store_true", help="through staging memory, as from a device; the CPU does the copies")
    parser.add_argument("--lookups", action="store_true", help="no speeds: only lookups, also of a store that hangs")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    num_rounds = 1 if arguments.lookups else NUM_ROUNDS
    figures = measure(arguments.backend, arguments.block_kib, num_rounds, arguments.staged)
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:>16} {value}")


if __name__ == "__main__":
    main()
