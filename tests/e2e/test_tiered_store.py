"""Shared memory over files, with real processes: what a cluster has left on disk is hit by the next one, and promoted."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prompts import MODEL, tokenizer
from tests.support.cluster import Cluster, ClusterSpec

NUM_BLOCKS = 12
BLOCK_SIZE = 16


def _spec(path: Path) -> ClusterSpec:
    pool_name = f"tiered-{uuid.uuid4().hex[:12]}"  # of this cluster alone: what is hit after a restart is on disk
    return ClusterSpec(
        model=MODEL,
        prefill=0,
        decode=1,
        connector="tiered",
        connector_options={
            "tiers": "shm,nvme",
            "shm": {"name": pool_name, "capacity_bytes": "64MiB"},
            "nvme": {"path": str(path), "capacity_bytes": "256MiB"},
        },
        pool_name=pool_name,
        dtype="bfloat16",
        engine={"kv_load_policy": "always", "block_size": BLOCK_SIZE, "kv_pool_mib": 300},
    )


@pytest.mark.timeout(600)
def test_restarted_cluster_hits_the_slower_tier_and_promotes_what_it_loads(tmp_path: Path) -> None:
    words = tokenizer().encode("the river and the old mill turned slowly while seven birds sang of summer rain ").ids
    prompt = [*words, *(words * 40)][: NUM_BLOCKS * BLOCK_SIZE + 5]
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with Cluster(_spec(tmp_path / "kv")) as cluster:
        expected = cluster.client.complete(prompt, **body)["choices"][0]["token_ids"]
        cluster.wait_until(
            lambda: cluster.client.metric("kvrelay_store_tier_blocks", tier="nvme") >= NUM_BLOCKS, "the disk has the prompt"
        )
    with Cluster(_spec(tmp_path / "kv")) as cluster:
        assert cluster.client.complete(prompt, **body)["choices"][0]["token_ids"] == expected
        cluster.wait_until(
            lambda: cluster.client.metric("kvrelay_store_tier_hit_blocks_total", tier="nvme") == NUM_BLOCKS, "the disk is hit"
        )
        cluster.wait_until(
            lambda: cluster.client.metric("kvrelay_store_tier_blocks", tier="shm") >= NUM_BLOCKS, "shared memory has it again"
        )
        name = cluster.start_node("decode")  # whose own cache is empty
        cluster.kill("decode-0")
        assert cluster.client.complete(prompt, **body)["choices"][0]["token_ids"] == expected
        cluster.wait_until(
            lambda: cluster.client.metric("kvrelay_store_tier_hit_blocks_total", tier="shm", node_id=name) == NUM_BLOCKS,
            "what was promoted is hit",
        )
        assert cluster.client.metric("kvrelay_store_tier_reachable", tier="nvme", node_id=name) == 1
        cluster.wait_clean()
