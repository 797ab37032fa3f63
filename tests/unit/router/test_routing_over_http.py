"""Sessions and reasons of decisions from HTTP to the nodes and to the metrics."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.unit.router.running_router import RunningRouter

PROMPT = [5, 6, 7]


def nodes_that_got(cluster: RunningRouter, num_requests: int, body: dict[str, str], headers: dict[str, str]) -> list[str]:
    before = {node.node_id: len(node.received) for node in cluster.nodes}
    for _ in range(num_requests):
        full = {"prompt": PROMPT, "max_tokens": 2, **body}
        httpx.post(f"{cluster.url}/v1/completions", json=full, headers=headers, timeout=60).raise_for_status()
    return [node.node_id for node in cluster.nodes for _ in range(len(node.received) - before[node.node_id])]


@pytest.mark.parametrize("source", ["header", "user", "prompt_cache_key"])
def test_session_sticky_requests_of_a_session_go_to_one_node(source: str, model_folder: Path) -> None:
    with RunningRouter(model_folder, policy="session_sticky", heartbeat_timeout_s=60.0) as cluster:
        for _ in range(3):
            cluster.add_node("decode")
        homes = set()
        for number in range(8):
            session = f"session {number}"
            named = ({}, {"X-Session-Id": session}) if source == "header" else ({source: session}, {})
            got = nodes_that_got(cluster, 3, *named)
            assert len(got) == 3 and len(set(got)) == 1
            homes.add(got[0])
        assert len(homes) > 1, "different sessions are spread"


def test_decisions_are_counted_by_role_and_reason(model_folder: Path) -> None:
    with RunningRouter(model_folder, policy="power_of_two_choices", heartbeat_timeout_s=60.0) as cluster:
        cluster.add_node("decode")
        assert nodes_that_got(cluster, 2, {}, {}) == ["decode-0", "decode-0"]
        text = httpx.get(f"{cluster.url}/metrics", timeout=60).text
    assert 'kvrelay_router_decisions_total{reason="power_of_two_choices",role="decode"} 2.0' in text
    assert 'kvrelay_router_decisions_total{reason="no_prefill_node",role="prefill"} 2.0' in text
