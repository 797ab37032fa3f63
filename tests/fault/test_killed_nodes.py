"""kill -9 of a node in the middle of its work, with a second one of its role alive: every client gets the right tokens."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.prompts import MODEL, token_prompts
from tests.support.cluster import Cluster, ClusterSpec

MAX_TOKENS = 64
PROMPTS = [*token_prompts()[10:16], *token_prompts()[-3:]]  # 64 to 450 tokens, and 1,000 to 2,000


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(
        model=MODEL, prefill=2, decode=2, dtype="bfloat16", engine={"kv_pool_mib": 300, "max_num_batched_tokens": 128}
    )
    with Cluster(spec) as running:
        yield running


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[list[int]]:
    """What an undisturbed cluster answers. Its KV has a salt of its own, so that the tests start without hits."""
    answers = cluster.client.complete_many([_body(prompt, "undisturbed") for prompt in PROMPTS])
    return [answer["choices"][0]["token_ids"] for answer in answers]


def _body(prompt: list[int], salt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True, "cache_salt": salt}


def _stream_tokens(cluster: Cluster, prompt: list[int], salt: str, progress: list[int], index: int) -> list[int]:
    """Output tokens in the order they came; progress[index] counts them meanwhile."""
    tokens: list[int] = []
    for event in cluster.client.stream(**_body(prompt, salt)):
        assert "error" not in event, event
        for choice in event["choices"]:
            tokens += choice.get("token_ids") or []
            progress[index] = len(tokens)
    return tokens


def _start_streams(cluster: Cluster, threads: ThreadPoolExecutor, salt: str) -> tuple[list[Future[list[int]]], list[int]]:
    progress = [0] * len(PROMPTS)
    streams = [threads.submit(_stream_tokens, cluster, prompt, salt, progress, index) for index, prompt in enumerate(PROMPTS)]
    return streams, progress


def _restore(cluster: Cluster, role: str) -> None:
    cluster.start_node(role)
    cluster.wait_clean()


@pytest.mark.timeout(600)
def test_prefill_node_killed_mid_prefill_all_requests_finish_right(cluster: Cluster, expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams, progress = _start_streams(cluster, threads, "kill prefill")
        cluster.wait_until(
            lambda: any(node["num_running"] and node["node_id"] == "prefill-0" for node in cluster.client.nodes()),
            "prefill-0 computes",
        )
        assert 0 in progress, "some prompt must still be in its prefill"
        cluster.kill("prefill-0")
        assert [stream.result() for stream in streams] == expected
    assert cluster.client.metric("kvrelay_retries_total", reason="node_down") > 0
    _restore(cluster, "prefill")


@pytest.mark.timeout(600)
def test_decode_node_killed_mid_stream_all_streams_go_on_without_gap_or_repeat(
    cluster: Cluster, expected: list[list[int]]
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        streams, progress = _start_streams(cluster, threads, "kill decode")
        cluster.wait_until(
            lambda: (
                any(
                    node["node_id"] == "decode-0" and node["num_running"] >= 2 and node["num_in_flight"] >= 2
                    for node in cluster.client.nodes()
                )
                and sum(4 <= count < MAX_TOKENS - 20 for count in progress) >= 3
            ),
            "decode-0 is in the middle of streams",
            timeout_s=120,
        )
        cluster.kill("decode-0")
        assert [stream.result() for stream in streams] == expected
    assert cluster.client.metric("kvrelay_migrations_total", outcome="resumed") > 0
    _restore(cluster, "decode")


@pytest.mark.timeout(600)
def test_all_prefill_nodes_killed_decode_nodes_do_it_all(cluster: Cluster, expected: list[list[int]]) -> None:
    for name in [name for name in cluster.children if name.startswith("prefill")]:
        cluster.kill(name)
        cluster.wait_until(lambda name=name: cluster.client.node_status(name) == "down", f"{name} is noticed")  # type: ignore[misc]
    answers = cluster.client.complete_many([_body(prompt, "no prefill node") for prompt in PROMPTS])
    assert [answer["choices"][0]["token_ids"] for answer in answers] == expected
    assert cluster.client.metric("kvrelay_local_prefill_total", reason="no_prefill_node") >= len(PROMPTS)
    cluster.wait_clean()


@pytest.mark.timeout(600)
def test_last_decode_node_killed_stream_ends_with_an_error_and_never_hangs(cluster: Cluster) -> None:
    events: list[dict[str, Any]] = []

    def read_events() -> None:
        for event in cluster.client.stream(**_body(PROMPTS[5], "nobody left")):
            events.append(event)

    with ThreadPoolExecutor(1) as threads:
        stream = threads.submit(read_events)
        cluster.wait_until(lambda: len(events) >= 4, "the stream has begun", timeout_s=120)
        for name in [name for name in cluster.children if name.startswith("decode")]:
            cluster.kill(name)
        with pytest.raises(AssertionError, match=r"ended without \[DONE\]"):  # an error ends a stream instead
            stream.result(timeout=120)
    assert "no decode node" in events[-1]["error"]["message"]
    assert cluster.client.is_healthy() is False
    _restore(cluster, "decode")  # which also takes over what the killed ones left in shared memory
    assert cluster.client.complete(PROMPTS[0], max_tokens=3)["usage"]["completion_tokens"] == 3
