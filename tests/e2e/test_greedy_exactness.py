"""Greedy output is the same token for token: alone, disaggregated, from hits, from disk after a restart; and right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.prompts import MODEL, NUM_OUTPUT_TOKENS, token_prompts, transformers_continues
from tests.support.cluster import Cluster, ClusterSpec
from tests.support.redis_server import EXECUTABLE, RedisProcess

BLOCK_SIZE = 16


class Prompts:
    """All twenty prompts in float32; every other one in bfloat16, which has no reference but itself, and costs the same time.

    A hit leaves at least one known token to compute: on a prefill node the prompt's last one, on a decode node the first output.
    """

    def __init__(self, dtype: str) -> None:
        self.token_ids = token_prompts()[:: 1 if dtype == "float32" else 2]
        lengths = [len(prompt) for prompt in self.token_ids]
        handed_over = [length for length in lengths if length > BLOCK_SIZE]  # shorter prompts stay on the decode node
        self.num_handed_over_tokens = sum(handed_over)
        self.num_prefill_hit_tokens = sum((length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in handed_over)
        self.num_decode_hit_tokens = sum(length // BLOCK_SIZE * BLOCK_SIZE for length in handed_over)


def cluster_spec(dtype: str, *, num_threads: int = 1, **keywords: Any) -> ClusterSpec:
    engine = {
        "kv_pool_mib": 700,
        "num_threads": num_threads,
        "max_num_batched_tokens": 512,
        "kv_load_policy": "always",  # so that hits can be counted
        **keywords.pop("engine", {}),
    }
    return ClusterSpec(model=MODEL, dtype=dtype, engine=engine, **keywords)


def ask_all(cluster: Cluster, prompts: Prompts, max_concurrent: int = 20) -> list[list[int]]:
    """Output token ids of all prompts, sent together."""
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": NUM_OUTPUT_TOKENS, "ignore_eos": True, "return_token_ids": True}
        for prompt in prompts.token_ids
    ]
    return [answer["choices"][0]["token_ids"] for answer in cluster.client.complete_many(bodies, max_concurrent)]


def external_hits(cluster: Cluster, role: str) -> float:
    return cluster.client.metric("kvrelay_external_prefix_cache_hits_total", role=role)


def local_hits(cluster: Cluster, role: str) -> float:
    return cluster.client.metric("kvrelay_prefix_cache_hits_total", role=role)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def prompts(dtype: str) -> Prompts:
    return Prompts(dtype)


@pytest.fixture(scope="module")
def expected(dtype: str, prompts: Prompts) -> list[list[int]]:
    """kvrelay's own tokens, monolithic and without a store, three requests at a time."""
    with Cluster(cluster_spec(dtype, num_threads=2, prefill=0, decode=1, connector="none")) as cluster:
        return ask_all(cluster, prompts, max_concurrent=3)


@pytest.mark.timeout(900)
def test_monolithic_equals_transformers_in_float32(dtype: str, prompts: Prompts, expected: list[list[int]]) -> None:
    """In bfloat16 there is no such reference: transformers' own attention variants disagree with each other there."""
    assert [len(output) for output in expected] == [NUM_OUTPUT_TOKENS] * len(prompts.token_ids)
    if dtype == "float32":
        assert transformers_continues(expected) == expected


@pytest.mark.timeout(900)
def test_disaggregated_through_shm_equals_monolithic_also_from_hits(
    dtype: str, prompts: Prompts, expected: list[list[int]]
) -> None:
    with Cluster(cluster_spec(dtype, prefill=1, decode=1, connector="shm")) as cluster:
        assert ask_all(cluster, prompts) == expected
        assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
        assert local_hits(cluster, "decode") == 0
        assert ask_all(cluster, prompts) == expected
        assert local_hits(cluster, "decode") == prompts.num_decode_hit_tokens
        assert local_hits(cluster, "prefill") == prompts.num_prefill_hit_tokens
        cluster.wait_clean()


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
@pytest.mark.timeout(900)
def test_disaggregated_with_overlapped_steps_equals_monolithic(dtype: str, prompts: Prompts, expected: list[list[int]]) -> None:
    with Cluster(cluster_spec(dtype, prefill=1, decode=1, connector="shm", engine={"overlap_steps": "on"})) as cluster:
        assert ask_all(cluster, prompts) == expected
        assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
        cluster.wait_clean()


@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
@pytest.mark.timeout(900)
def test_disaggregated_with_drafts_equals_monolithic_in_fewer_steps(
    dtype: str, prompts: Prompts, expected: list[list[int]]
) -> None:
    engine = {"num_speculative_tokens": 4, "prompt_lookup_min": 1, "speculative_disable_by_batch_size": 100}
    with Cluster(cluster_spec(dtype, prefill=1, decode=1, connector="shm", engine=engine)) as cluster:
        assert ask_all(cluster, prompts) == expected
        drafted = cluster.client.metric("kvrelay_spec_decode_num_draft_tokens_total", role="decode")
        accepted = cluster.client.metric("kvrelay_spec_decode_num_accepted_tokens_per_pos_total", role="decode")
        assert 0 < accepted < drafted
        cluster.wait_clean()


@pytest.mark.timeout(900)
def test_disaggregated_through_nvme_equals_monolithic_also_after_restart(
    dtype: str, prompts: Prompts, expected: list[list[int]], tmp_path: Path
) -> None:
    spec = cluster_spec(dtype, prefill=1, decode=1, connector="nvme", connector_options={"path": str(tmp_path / "kv")})
    with Cluster(spec) as cluster:
        assert ask_all(cluster, prompts) == expected
        assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
    with Cluster(spec) as cluster:  # all processes are new: what is known is on the disk
        assert ask_all(cluster, prompts) == expected
        assert external_hits(cluster, "prefill") == prompts.num_prefill_hit_tokens
        assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
        recomputed = cluster.client.metric("kvrelay_prompt_tokens_by_source_total", role="prefill", source="recomputed")
        assert recomputed == prompts.num_handed_over_tokens - prompts.num_prefill_hit_tokens
        cluster.wait_clean()


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
@pytest.mark.parametrize("dtype", ["bfloat16"], indirect=True)
@pytest.mark.timeout(900)
def test_disaggregated_through_redis_where_installed_equals_monolithic_also_from_hits_of_new_processes(
    dtype: str, prompts: Prompts, expected: list[list[int]], tmp_path: Path
) -> None:
    server = RedisProcess(tmp_path / "redis")
    spec = cluster_spec(dtype, prefill=1, decode=1, connector="redis", connector_options={"url": server.url})
    try:
        with Cluster(spec) as cluster:
            assert ask_all(cluster, prompts) == expected
            assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
            cluster.wait_clean()
        with Cluster(spec) as cluster:
            assert ask_all(cluster, prompts) == expected
            assert external_hits(cluster, "prefill") == prompts.num_prefill_hit_tokens
            assert external_hits(cluster, "decode") == prompts.num_decode_hit_tokens
            cluster.wait_clean()
    finally:
        server.end()
