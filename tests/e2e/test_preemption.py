"""Two hundred requests at once in a pool that holds a few: preempted, resumed, all right, and nothing left behind."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.prompts import MODEL, tokenizer
from tests.support.cluster import Cluster, ClusterSpec

NUM_REQUESTS = 200
SMALL_POOL_BLOCKS = 40  # 640 tokens: a handful of the requests below
MAX_MODEL_LEN = 512


def _bodies() -> list[dict[str, Any]]:
    """Distinct prompts of 1 to 250 tokens, most of them short, and 4 to 40 tokens to generate."""
    rng = random.Random(7)
    words = tokenizer().encode("the river and the old mill turned slowly while seven birds sang of summer rain ").ids
    bodies: list[dict[str, Any]] = []
    for index in range(NUM_REQUESTS):
        length = rng.choice((rng.randrange(1, 20), rng.randrange(20, 80), rng.randrange(80, 250)))
        prompt = [*tokenizer().encode(str(index)).ids, *(rng.choice(words) for _ in range(length))][:length]
        bodies.append(
            {
                "prompt": prompt,
                "max_tokens": rng.randrange(4, 40),
                "ignore_eos": True,
                "return_token_ids": True,
                "temperature": rng.choice((0, 0, 0.8)),
                "seed": index,
            }
        )
    return bodies


def _ask(spec: ClusterSpec) -> tuple[list[list[int]], float]:
    """All answers and the number of preemptions; checks that the cluster is clean afterwards."""
    with Cluster(spec) as cluster:
        answers = cluster.client.complete_many(_bodies(), max_concurrent=NUM_REQUESTS)
        cluster.wait_clean()
        cluster.wait_until(  # metrics of nodes are as old as their last heartbeat
            lambda: (
                cluster.client.metric("kvrelay_num_requests_running") == 0
                and cluster.client.metric("kvrelay_kv_blocks", state="used") == 0
            ),
            "the metrics show that nothing is held",
        )
        tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        return tokens, cluster.client.metric("kvrelay_preempted_requests_total")


@pytest.mark.timeout(900)
def test_two_hundred_requests_in_a_tiny_pool_are_preempted_and_all_right() -> None:
    large = ClusterSpec(
        model=MODEL, prefill=0, decode=1, dtype="bfloat16", connector="none", engine={"kv_pool_mib": 1500, "num_threads": 2}
    )
    expected, num_preemptions = _ask(large)
    assert num_preemptions == 0
    small = ClusterSpec(
        model=MODEL,
        prefill=1,
        decode=1,
        dtype="bfloat16",
        engine={"num_blocks": SMALL_POOL_BLOCKS, "max_num_seqs": 64, "max_num_batched_tokens": 256},
        flags=("--max-model-len", str(MAX_MODEL_LEN)),
    )
    tokens, num_preemptions = _ask(small)
    assert num_preemptions > 0, "the pool was meant to be too small"
    assert tokens == expected
