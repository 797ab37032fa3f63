"""Time to first token from a warm store beside computing the prompt again, and whether engines choose the faster of the two.

python -m bench.warm_prefix --stores shm,nvme,redis --lengths 64,256,1024,2000 --json

For each store: prompts are computed by a node that starts without KV, and saved (recompute). The node is started anew, so that
its own cache is empty, and told to load always: the same prompts again (load). Then anew, free to choose: three rounds over all
prompts, of which the last two count. A choice is right when the time measured for it is at most a tenth above the other's.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from tests.support.cluster import Cluster, ClusterSpec
from tests.support.delaying_proxy import DelayingProxy
from tests.support.redis_server import RedisProcess

MODEL = "smollm2"
LAYOUT = KVLayout(num_layers=30, block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")
NODE = "decode-0"
PROMPTS_PER_LENGTH = 2
NUM_ROUNDS = 3
VOCABULARY = 40_000
TOLERANCE = 1.1
NUM_CONNECTIONS = 4  # of the redis connector, for one transfer


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a node and a Redis server. bytes_per_s: over all of a transfer's connections."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


REDIS_LINKS = {
    "redis": None,
    "redis-200ms": Link(latency_s=0.2),
    "redis-500ms": Link(latency_s=0.5),
    "redis-20MBps": Link(bytes_per_s=20e6),
    "redis-4MBps": Link(bytes_per_s=4e6),
}
STORES = ("shm", "nvme", *REDIS_LINKS)


@dataclass(slots=True)
class Prompt:
    """One prompt, and what was measured with it: seconds to the first token."""

    token_ids: list[int]
    recompute_s: float = 0.0
    load_s: float = 0.0
    chosen: list[str] = field(default_factory=list)

    @property
    def right_choices(self) -> set[str]:
        """What was not clearly slower."""
        best_s = min(self.recompute_s, self.load_s)
        times = {"recompute": self.recompute_s, "load": self.load_s}
        return {name for name, seconds in times.items() if seconds <= TOLERANCE * best_s}


def random_prompt(rng: random.Random, num_tokens: int) -> Prompt:
    """No two share a block."""
    return Prompt([rng.randrange(100, VOCABULARY) for _ in range(num_tokens)])


@contextmanager
def opened_store(name: str, folder: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A store that outlives the node: connector and options."""
    if name in REDIS_LINKS:
        server = RedisProcess(folder / "redis", "--maxmemory", "4gb")
        link, proxy = REDIS_LINKS[name], None
        try:
            if link is not None:
                proxy = DelayingProxy(server.port)
                proxy.latency_s, proxy.bytes_per_s = link.latency_s, link.bytes_per_s / NUM_CONNECTIONS
            port = server.port if proxy is None else proxy.port
            yield "redis", {"url": f"redis://127.0.0.1:{port}/0", "op_timeout_s": 20.0}
        finally:
            if proxy is not None:
                proxy.close()
            server.end()
    elif name == "nvme":
        yield "nvme", {"path": str(folder / "kv"), "capacity_bytes": 4 * 1024**3}
    else:
        options = {"name": folder.name, "capacity_bytes": 2 * 1024**3}
        keeper = create_connector("shm", options, MonotonicClock())  # a member that stays, as another node would
        keeper.register_kv_cache(KVPoolMemory(LAYOUT, 2))
        yield "shm", options
        keeper.close()


def measure(store: str, lengths: list[int], seed: int) -> list[Prompt]:
    """All prompts of one store."""
    rng = random.Random(seed)
    prompts = [
        Prompt([rng.randrange(100, VOCABULARY) for _ in range(length)]) for length in lengths for _ in range(PROMPTS_PER_LENGTH)
    ]
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-warm-"))
    num_blocks = max(lengths) // LAYOUT.block_size + 16  # a round over all prompts leaves nothing of its first ones in the pool
    try:
        with opened_store(store, folder) as (connector, options):
            spec = ClusterSpec(
                model=MODEL,
                prefill=0,
                dtype="bfloat16",
                connector=connector,
                connector_options=options,
                environment={"KVRELAY_MODEL_MAX_MODEL_LEN": str(max(lengths) + 64)},
                engine={"num_blocks": num_blocks, "num_threads": 1, "kv_load_timeout_s": 60.0, "kv_save_timeout_s": 120.0},
            )
            with Cluster(spec) as cluster:

                def first_token(prompt: Prompt) -> tuple[float, bool]:
                    started_s = time.perf_counter()
                    answer = cluster.client.complete(prompt.token_ids, max_tokens=1)
                    seconds = time.perf_counter() - started_s
                    num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                    return seconds, num_cached >= len(prompt.token_ids) // 2

                def restart(policy: str) -> None:
                    cluster.wait_clean(180.0)
                    cluster.stop_node(NODE)
                    cluster.restart_node(NODE, "--engine.kv_load_policy", policy)
                    first_token(
                        Prompt([rng.randrange(100, VOCABULARY) for _ in range(40)])
                    )  # the process is warm, its cache is not

                first_token(random_prompt(rng, 40))
                for prompt in prompts:
                    prompt.recompute_s, was_loaded = first_token(prompt)
                    assert not was_loaded
                restart("always")
                for prompt in prompts:
                    prompt.load_s, was_loaded = first_token(prompt)
                    assert was_loaded, f"{store} lost a prompt of {len(prompt.token_ids)} tokens"
                restart("auto")
                for round_number in range(NUM_ROUNDS):
                    for prompt in prompts:
                        was_loaded = first_token(prompt)[1]
                        if round_number:
                            prompt.chosen.append("load" if was_loaded else "recompute")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return prompts


def report(store: str, prompts: list[Prompt]) -> list[dict[str, Any]]:
    """A row per length, medians."""
    rows = []
    for length in sorted({len(prompt.token_ids) for prompt in prompts}):
        same = [prompt for prompt in prompts if len(prompt.token_ids) == length]
        recompute_s, load_s = (statistics.median(getattr(p, name) for p in same) for name in ("recompute_s", "load_s"))
        choices = [(choice, prompt) for prompt in same for choice in prompt.chosen]
        rows.append(
            {
                "store": store,
                "tokens": length,
                "recompute_ms": round(recompute_s * 1000),
                "load_ms": round(load_s * 1000),
                "speedup": round(recompute_s / load_s, 2),
                "chose_load": sum(choice == "load" for choice, _ in choices),
                "choices": len(choices),
                "right": sum(choice in prompt.right_choices for choice, prompt in choices),
            }
        )
    return rows


def main() -> None:
    """Print a row per store and length, and the share of right choices last."""
    parser = argparse.ArgumentParser(prog="python -m bench.warm_prefix", description=__doc__)
    parser.add_argument("--stores", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--lengths", default="64,256,1024,2000", help="prompt lengths in tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    rows = []
    for store in arguments.stores.split(","):
        if store not in STORES:
            parser.error(f"argument --stores: {store!r}: must be of {', '.join(STORES)}")
        rows += report(store, measure(store, [int(length) for length in arguments.lengths.split(",")], arguments.seed))
        for row in rows[-len(arguments.lengths.split(",")) :]:
            print(*(f"{name} {value}" for name, value in row.items()), sep="  ", flush=True)
    right_share = sum(row["right"] for row in rows) / sum(row["choices"] for row in rows)
    print(
        json.dumps({"rows": rows, "right_share": round(right_share, 3)})
        if arguments.json
        else f"right choices: {right_share:.3f}"
    )


if __name__ == "__main__":
    main()
