"""Requests that move: drained nodes, the source of what was known, and requests with which nodes die."""

from __future__ import annotations

from router.policy import Placer
from router.registry import NodeStatus
from tests.unit.router.flow_bench import FlowBench, heartbeat_message


def test_flow_drain_overdue_goes_on_at_another_node_without_a_fault() -> None:
    bench = FlowBench(0, 2).start().update(5, 6)
    first = bench.nodes[0]
    bench.registry.start_drain(first, 0.0)
    bench.take(bench.flow.on_drain_overdue(first, bench.now_s))
    assert bench.nodes[1] != first and bench.dispatches[1].reason == "drain"
    assert bench.flow.num_faults == 0
    bench.update(7, num_cached_tokens=16)
    assert [count.outcome for count in bench.counts if count.what == "migration"] == ["resumed"]
    moved = {count.reason: count.amount for count in bench.counts if count.what == "moved_tokens"}
    assert moved == {"cached": 16, "recomputed": len(bench.flow.spec.prompt_token_ids) + 2 - 16}


def test_flow_drain_overdue_without_another_node_stays() -> None:
    bench = FlowBench(0, 1).start().update(5)
    bench.registry.start_drain("d0", 0.0)
    assert bench.flow.on_drain_overdue("d0", bench.now_s) == []
    assert list(bench.open.values()) == ["d0"]


def test_flow_dispatch_names_the_nodes_that_had_the_request_before_the_latest_first() -> None:
    bench = FlowBench(1, 4).start().update(5).update(is_prefill_done=True, finish_reason="length")
    first, second = bench.nodes
    assert (first, bench.dispatches[0].source_node_ids, bench.dispatches[1].source_node_ids) == ("p0", (), ("p0",))
    bench.update(6).lose(second)
    third = bench.nodes[2]
    assert bench.dispatches[2].source_node_ids == (second, "p0")
    bench.update(7).lose(third)
    assert bench.dispatches[3].source_node_ids == (third, second, "p0")


def test_flow_moved_tokens_are_counted_once_per_move() -> None:
    bench = FlowBench(0, 2).start().update(5)
    assert bench.counted("moved_tokens") == []
    num_known = len(bench.flow.spec.prompt_token_ids) + 1
    bench.lose(bench.nodes[0]).update(6, num_cached_tokens=num_known).update(7)
    assert [count.amount for count in bench.counts if count.what == "moved_tokens"] == [num_known, 0]


def test_flow_nodes_die_with_it_until_it_is_given_up() -> None:
    bench = FlowBench(0, 4, max_node_deaths=3).start()
    for deaths in (1, 2):
        bench.lose(bench.nodes[-1])
        assert bench.fail is None and bench.flow.is_suspect == (deaths == 2)
    bench.lose(bench.nodes[-1])
    assert bench.fail is not None and bench.fail.kind == "too_many_node_deaths"
    assert "3 nodes died" in bench.fail.message
    assert len(bench.dispatches) == 3


def test_flow_suspect_is_kept_from_the_last_living_node() -> None:
    bench = FlowBench(0, 3, max_node_deaths=3, node_wait_s=5.0).start()
    bench.lose(bench.nodes[-1]).lose(bench.nodes[-1])
    assert not bench.open
    bench.wait(4.0)
    assert bench.fail is None
    bench.add("d0", "decode")
    assert len(bench.open) == 1


def test_flow_suspect_kept_from_the_last_living_node_too_long_is_told_so() -> None:
    bench = FlowBench(0, 3, max_node_deaths=3, node_wait_s=5.0).start()
    bench.lose(bench.nodes[-1]).lose(bench.nodes[-1]).wait(14.0)
    assert bench.fail is None
    bench.wait(2.0)
    assert bench.fail is not None and "only one decode node is alive" in bench.fail.message


def test_placer_suspects_do_not_share_a_node() -> None:
    bench = FlowBench(0, 2)
    placer = Placer(bench.flow.options, bench.registry)
    bench.registry.start_dispatch("d0", "other.1", 5, is_suspect=True)
    assert placer.place_decode(is_suspect=True).node_id == "d1"
    bench.registry.start_dispatch("d1", "another.1", 5, is_suspect=True)
    assert placer.place_decode(is_suspect=True).reason == "other_suspect"
    assert placer.place_decode().node_id
    bench.registry.end_dispatch("d1", "another.1")
    assert placer.place_decode(is_suspect=True).node_id == "d1"


def test_registry_told_to_drain_stays_draining_whatever_an_old_heartbeat_says() -> None:
    bench = FlowBench(0, 1)
    bench.registry.start_drain("d0", 10.0)
    bench.registry.heartbeat(heartbeat_message("d0"), bench.registry.nodes["d0"].identity, 1.0)
    assert bench.registry.nodes["d0"].status is NodeStatus.DRAINING
    bench.registry.start_dispatch("d0", "r.1", 5)
    assert bench.registry.overdue_drains(9.0) == []
    assert [node.node_id for node in bench.registry.overdue_drains(10.0)] == ["d0"]
    bench.add("d0", "decode", generation=9)
    assert bench.registry.nodes["d0"].status is NodeStatus.UP
