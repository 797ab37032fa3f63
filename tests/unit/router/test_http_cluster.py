"""What the router tells operators, and what it does for them: health, requests in flight, drain."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.unit.router.running_router import RunningRouter
from tests.unit.router.test_http_faults import wait_until


@pytest.fixture
def cluster(model_folder: Path) -> Iterator[RunningRouter]:
    """One for each test: these change it."""
    with RunningRouter(model_folder) as router:
        router.add_node("prefill")
        router.add_node("decode")
        yield router


def _statuses(cluster: RunningRouter) -> dict[str, str]:
    return {node["node_id"]: node["status"] for node in httpx.get(f"{cluster.url}/nodes").json()["nodes"]}


def test_health_warns_of_a_store_that_is_away(cluster: RunningRouter) -> None:
    node = next(node for node in cluster.nodes if node.role == "decode")
    node.has_store, node.store_complaint = False, "it cannot be opened: File exists"
    wait_until(lambda: bool(httpx.get(f"{cluster.url}/health").json()["warnings"]), "the heartbeat says so")
    (warning,) = httpx.get(f"{cluster.url}/health").json()["warnings"]
    why = "it cannot be opened: File exists"
    assert warning == f"{node.node_id}: its store none cannot be reached ({why}): prompts are computed anew"


@pytest.mark.parametrize("has_store", [True, False])
def test_health_says_what_a_store_complains_of(cluster: RunningRouter, has_store: bool) -> None:
    node = next(node for node in cluster.nodes if node.role == "decode")
    node.store_complaint, node.has_store = "it is full", has_store
    wait_until(lambda: bool(httpx.get(f"{cluster.url}/health").json()["warnings"]), "the heartbeat says so")
    (warning,) = httpx.get(f"{cluster.url}/health").json()["warnings"]
    assert warning.startswith(f"{node.node_id}: its store none") and "it is full" in warning
    assert ("cannot be reached" in warning) is not has_store
    node.store_complaint, node.has_store = "", True
    wait_until(lambda: not httpx.get(f"{cluster.url}/health").json()["warnings"], "the heartbeat says so")


def test_health_warns_of_a_tier_that_is_away(cluster: RunningRouter) -> None:
    node = next(node for node in cluster.nodes if node.role == "decode")
    node.tier_is_reachable = {"fast": 1, "slow": 0}
    wait_until(lambda: bool(httpx.get(f"{cluster.url}/health").json()["warnings"]), "the heartbeat says so")
    (warning,) = httpx.get(f"{cluster.url}/health").json()["warnings"]
    assert warning == f"{node.node_id}: its store none goes without slow for now"


def test_health_warns_of_nodes_with_different_stores(cluster: RunningRouter) -> None:
    assert httpx.get(f"{cluster.url}/health").json()["warnings"] == []
    cluster.add_node("decode", "other", connector="redis")
    (warning,) = httpx.get(f"{cluster.url}/health").json()["warnings"]
    assert warning.endswith("(none: decode-1, prefill-0; redis: other)")


def test_drain_without_a_name_is_no_path_and_drains_nobody(cluster: RunningRouter) -> None:
    for path in ("/drain", "/drain/", "/drain/nobody"):
        answer = httpx.post(f"{cluster.url}{path}", json={"node_id": "decode-1"})
        assert answer.status_code in (307, 404), path  # the first is only told of the second
    assert not cluster.api.is_draining
    assert set(_statuses(cluster).values()) == {"up"}


def test_drain_names_the_process_that_leaves(cluster: RunningRouter) -> None:
    answer = httpx.post(f"{cluster.url}/drain/decode-1")
    assert (answer.status_code, answer.json()["status"]) == (202, "draining")
    assert {node["node_id"]: node["status"] for node in httpx.get(f"{cluster.url}/nodes").json()["nodes"]}[
        "decode-1"
    ] == "draining"
    assert httpx.get(f"{cluster.url}/health").status_code == 503, "nobody is left who decodes"


def test_requests_lists_what_is_in_flight_under_the_clients_names(cluster: RunningRouter) -> None:
    for node in cluster.nodes:
        node.is_silent = True
    body = {"prompt": "one two three four five six seven", "max_tokens": 4}
    with ThreadPoolExecutor(1) as threads:
        headers = {"x-request-id": "mine"}
        answer = threads.submit(httpx.post, f"{cluster.url}/v1/completions", json=body, headers=headers, timeout=30)
        wait_until(lambda: bool(httpx.get(f"{cluster.url}/requests").json()["requests"]), "it is in flight")
        (listed,) = httpx.get(f"{cluster.url}/requests").json()["requests"]
        assert listed["request_id"] == "mine" and listed["num_output_tokens"] == 0 and listed["node_id"]
        cluster.fail_all()
        assert answer.result().status_code == 503
    assert httpx.get(f"{cluster.url}/requests").json() == {"requests": []}


def test_cached_asks_every_node_for_its_leading_blocks(cluster: RunningRouter) -> None:
    answer = httpx.post(f"{cluster.url}/cached", json={"block_hashes": ["00" * 16, "ab" * 16]})
    assert answer.status_code == 200
    assert answer.json() == {"num_leading_blocks": {"decode-1": 1, "prefill-0": 1}, "missing": []}
    for wrong in ([], ["00"], ["00" * 16 + "\n"], ["zz" * 16], "00" * 16):
        assert httpx.post(f"{cluster.url}/cached", json={"block_hashes": wrong}).status_code == 400


def test_nodes_show_the_namespace_of_their_blocks(cluster: RunningRouter) -> None:
    for node in httpx.get(f"{cluster.url}/nodes").json()["nodes"]:
        assert len(bytes.fromhex(node["model_fingerprint"])) == len(bytes.fromhex(node["layout_fingerprint"])) == 16
        assert node["block_size"] > 0 and node["kv_address"] == ""
