"""Time to first token from a warm store beside computing the prompt again, and whether engines choose the faster of the two.

python -m bench.warm_prefix --stores shm,nvme,redis --lengths 64,256,1024,2000 --json

For each store: prompts are computed by a node that starts without KV, and saved (recompute). The node is started anew, so that
its own cache is empty, and told to load always: the same prompts again (load). Then anew, free to choose: three rounds over all
prompts, of which the last two count, because a node that has seen neither a load nor a long prompt cannot know. A choice is right
when what was chosen takes at most a tenth longer than the other, by the medians of all that was measured of store and length.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.warm_stores import BLOCK_SIZE, DTYPE, MODEL, STORES, opened_store
from tests.support.cluster import Cluster, ClusterSpec

NODE = "decode-0"
PROMPTS_PER_LENGTH = 2
NUM_ROUNDS = 3
VOCABULARY = 40_000
TOLERANCE = 1.1


@dataclass(slots=True)
class Cell:
    """Prompts of one length at one store. seconds: to the first token, by what was done; chosen: in each round."""

    num_tokens: int
    prompts: list[list[int]]
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"recompute": [], "load": []})
    chosen: list[list[str]] = field(default_factory=list)

    def median_s(self, choice: str) -> float:
        """Seconds to the first token."""
        return statistics.median(self.seconds[choice])

    def num_right(self, choices: list[str]) -> int:
        """How many of these were not clearly slower than the other."""
        best_s = min(self.median_s("recompute"), self.median_s("load"))
        return sum(self.median_s(choice) <= TOLERANCE * best_s for choice in choices)

    def row(self, store: str) -> dict[str, Any]:
        """The figures."""
        counted = [choice for choices in self.chosen[1:] for choice in choices]
        return {
            "store": store,
            "tokens": self.num_tokens,
            "recompute_ms": round(self.median_s("recompute") * 1000),
            "load_ms": round(self.median_s("load") * 1000),
            "speedup": round(self.median_s("recompute") / self.median_s("load"), 2),
            "chose_load": counted.count("load"),
            "choices": len(counted),
            "right": self.num_right(counted),
            "right_at_first": self.num_right(self.chosen[0]),
        }


class Bench:
    """A cluster of one decode node, and what is asked of it."""

    def __init__(self, cluster: Cluster, rng: random.Random) -> None:
        self._cluster = cluster
        self._rng = rng

    def prompt(self, num_tokens: int) -> list[int]:
        """No two share a block."""
        return [self._rng.randrange(100, VOCABULARY) for _ in range(num_tokens)]

    def serve(self, cell: Cell, prompt: list[int]) -> str:
        """Ask an idle node for the first token; whether the prompt was loaded or recomputed."""
        self._cluster.wait_clean(180.0)  # saves of the prompt before hold the pool's blocks
        started_s = time.perf_counter()
        answer = self._cluster.client.complete(prompt, max_tokens=1)
        seconds = time.perf_counter() - started_s
        num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        choice = "load" if num_cached >= len(prompt) // 2 else "recompute"
        cell.seconds[choice].append(seconds)
        return choice

    def warm_up(self) -> None:
        """A short prompt: the process is warm then, its cache is not."""
        self._cluster.client.complete(self.prompt(40), max_tokens=1)

    def restart(self, policy: str) -> None:
        """Start the node anew, without KV of its own."""
        self._cluster.wait_clean(180.0)
        self._cluster.stop_node(NODE)
        self._cluster.restart_node(NODE, "--engine.kv_load_policy", policy)
        self.warm_up()


def measure(store_name: str, lengths: list[int], seed: int, num_threads: int) -> list[Cell]:
    """All lengths at one store."""
    folder = Path(tempfile.mkdtemp(prefix="kvrelay-warm-"))
    num_blocks = max(lengths) // BLOCK_SIZE + 16  # a round over all prompts leaves nothing of its first ones in the pool
    engine = {"num_blocks": num_blocks, "num_threads": num_threads, "kv_load_timeout_s": 60.0, "kv_save_timeout_s": 120.0}
    try:
        with opened_store(store_name, folder) as store:
            spec = ClusterSpec(
                model=MODEL,
                prefill=0,
                dtype=DTYPE,
                connector=store.connector,
                connector_options=store.options,
                environment={"KVRELAY_MODEL_MAX_MODEL_LEN": str(max(lengths) + 64)},
                engine=engine,
            )
            with Cluster(spec) as cluster:
                bench = Bench(cluster, random.Random(seed))
                cells = [Cell(length, [bench.prompt(length) for _ in range(PROMPTS_PER_LENGTH)]) for length in lengths]
                requests = [(cell, prompt) for cell in cells for prompt in cell.prompts]
                bench.warm_up()
                for cell, prompt in requests:
                    assert bench.serve(cell, prompt) == "recompute"
                    store.keep(prompt)
                bench.restart("always")
                for cell, prompt in requests:
                    assert bench.serve(cell, prompt) == "load", f"{store_name} lost a prompt of {len(prompt)} tokens"
                bench.restart("auto")
                for _ in range(NUM_ROUNDS):
                    for cell in cells:
                        cell.chosen.append([bench.serve(cell, prompt) for prompt in cell.prompts])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return cells


def main() -> None:
    """Print a row per store and length, and the share of right choices last."""
    parser = argparse.ArgumentParser(prog="python -m bench.warm_prefix", description=__doc__)
    parser.add_argument("--stores", default=",".join(STORES), help=f"of {', '.join(STORES)}")
    parser.add_argument("--lengths", default="64,256,1024,2000", help="prompt lengths in tokens")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of the node: fewer than cores, as the store needs some, too")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    rows = []
    for store in arguments.stores.split(","):
        if store not in STORES:
            parser.error(f"argument --stores: {store!r}: must be of {', '.join(STORES)}")
        for cell in measure(store, [int(length) for length in arguments.lengths.split(",")], arguments.seed, arguments.threads):
            rows.append(cell.row(store))
            print(*(f"{name} {value}" for name, value in rows[-1].items()), sep="  ", flush=True)
    right_share = sum(row["right"] for row in rows) / sum(row["choices"] for row in rows)
    if arguments.json:
        print(json.dumps({"rows": rows, "right_share": round(right_share, 3)}))
    else:
        print(f"right choices: {right_share:.3f}")


if __name__ == "__main__":
    main()
