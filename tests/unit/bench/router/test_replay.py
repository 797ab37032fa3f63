"""The simulated cluster: repeatable, true to the real pools, and it gives everything back."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.router import __main__
from bench.router.cost_model import CostModel
from bench.router.replay import summarize
from bench.router.trace import BLOCK_TOKENS, parse_trace
from bench.router.virtual_cluster import ClusterShape, VirtualCluster
from tests.unit.bench.router.traces import conversations, line

SHAPES = [ClusterShape(4, 0, 0, 100), ClusterShape(0, 2, 2, 100), ClusterShape(0, 2, 2, 100, num_store_blocks=1000)]


def test_cluster_one_unlimited_node_reuses_what_the_trace_repeats() -> None:
    requests = conversations(1, gap_ms=60_000)  # one after the other
    served = VirtualCluster(ClusterShape(1, 0, 0, 5000), "round_robin", CostModel()).run(requests)
    seen: set[bytes] = set()
    for request, one in zip(requests, served, strict=True):
        names = request.full_block_names
        num_hits = next((place for place, name in enumerate(names) if name not in seen), len(names))
        assert one.num_hit_tokens == num_hits * BLOCK_TOKENS
        seen.update(names)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", ["kv_aware", "round_robin", "least_loaded"])
def test_cluster_same_trace_gives_same_figures(shape: ClusterShape, policy: str) -> None:
    requests = conversations(2)
    clusters = [VirtualCluster(shape, policy, CostModel()) for _ in range(2)]
    first, second = (summarize(cluster.run(requests), cluster) for cluster in clusters)
    assert first == second
    assert 0 < first["prefix_reuse_ratio"] < 1
    assert (first["of_which_from_store"] > 0) == (shape.num_store_blocks > 0)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_cluster_kv_aware_reuses_more_than_round_robin(shape: ClusterShape) -> None:
    requests = conversations(4)
    ratios = []
    for policy in ("kv_aware", "round_robin"):
        cluster = VirtualCluster(shape, policy, CostModel())
        ratios.append(summarize(cluster.run(requests), cluster)["prefix_reuse_ratio"])
    assert ratios[0] > 1.2 * ratios[1]


@pytest.mark.parametrize("shape", SHAPES)
def test_cluster_after_the_trace_holds_nothing(shape: ClusterShape) -> None:
    cluster = VirtualCluster(shape, "round_robin", CostModel())
    served = cluster.run(conversations(3, gap_ms=20))
    assert all(0 < one.ttft_s <= one.end_to_end_s for one in served)
    for node in cluster.nodes:
        assert node.is_idle
        assert node.pool.num_free == node.pool.num_blocks


def test_cluster_shared_store_gives_one_node_what_another_computed() -> None:
    requests = parse_trace([line(0, range(40)), line(60_000, range(40))])
    alone, stored = (
        VirtualCluster(ClusterShape(2, 0, 0, 100, num_store_blocks), "round_robin", CostModel()).run(requests)
        for num_store_blocks in (0, 1000)
    )
    assert alone[1].num_hit_tokens == 0
    assert stored[1].num_stored_tokens == 39 * BLOCK_TOKENS  # one token at least is computed
    assert stored[1].ttft_s < alone[1].ttft_s


def test_cluster_request_that_comes_with_its_twin_waits_for_its_blocks() -> None:
    served = VirtualCluster(ClusterShape(1, 0, 0, 100), "round_robin", CostModel()).run(
        parse_trace([line(0, range(20)), line(0, range(20))])
    )
    assert [one.num_hit_tokens for one in served] == [0, 19 * BLOCK_TOKENS]


def test_main_replay_prints_one_json_line_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line(place * 100, [0, 1, 2 + place], 9) for place in range(12)))
    command = ["bench.router", "replay", "--trace", str(path), "--nodes", "2", "--blocks", "50", "--json"]
    monkeypatch.setattr(sys, "argv", [*command, "--policy", "round_robin,least_loaded"])
    __main__.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["prefix_reuse_ratio"] == found["by_policy"]["round_robin"]["prefix_reuse_ratio"] > 0
    assert found["ttft_ms_mean"] <= found["ttft_ms_p99"]
    monkeypatch.setattr(sys, "argv", [*command, "--sequential"])
    __main__.main()
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["head_first"]["reuse_by_blocks"] == round(22 / 36, 4)
