"""SIGSTOP of a node or the router: work moves after the heartbeat timeout, and who comes back brings no token a second time."""

from __future__ import annotations

import time

import pytest

from tests.fault.rig import HEARTBEAT_TIMEOUT_S, NODE_NAMES, NUM_OUTPUT_TOKENS, Rig

STALL_S = 3.0
assert STALL_S > HEARTBEAT_TIMEOUT_S


@pytest.mark.timeout(300)
def test_prefill_node_stalled_mid_prefill_requests_move_and_it_drops_them_when_it_wakes(rig: Rig) -> None:
    records = rig.start("stalled prefill node")
    rig.wait_busy("prefill-0")
    num_moved = rig.cluster.client.metric("kvrelay_retries_total", reason="node_down")
    assert any(record.first_token_at_s is None for record in records), "some prompt must still be in its prefill"
    rig.cluster.pause("prefill-0")
    rig.wait_status("prefill-0", "down")
    rig.cluster.resume("prefill-0")
    rig.check_right(records)
    assert rig.cluster.client.metric("kvrelay_retries_total", reason="node_down") > num_moved
    rig.wait_status("prefill-0", "up")
    rig.cluster.wait_clean()
    assert "has forgotten this node: dropped" in rig.cluster.log("prefill-0")


@pytest.mark.timeout(300)
def test_decode_node_stalled_mid_stream_streams_go_on_elsewhere_and_it_drops_them_when_it_wakes(rig: Rig) -> None:
    records = rig.start("stalled decode node")
    rig.cluster.wait_until(lambda: rig.node("decode-0")["num_in_flight"] >= 2, "decode-0 has requests", timeout_s=60.0)
    rig.cluster.wait_until(
        lambda: sum(4 <= len(record.token_times_s) < NUM_OUTPUT_TOKENS - 10 for record in records) >= 3,
        "some are in the middle of their streams",
        timeout_s=60.0,
    )
    rig.cluster.pause("decode-0")
    rig.wait_status("decode-0", "down")
    rig.cluster.resume("decode-0")  # while the others work on what it had
    rig.check_right(records)
    rig.wait_status("decode-0", "up")
    rig.cluster.wait_clean()
    assert "has forgotten this node: dropped" in rig.cluster.log("decode-0")


@pytest.mark.timeout(300)
def test_node_stalled_for_less_than_the_heartbeat_timeout_keeps_its_requests(rig: Rig) -> None:
    records = rig.start("short stall", rig.questions[:4])
    rig.wait_busy("decode-0")
    before = rig.node("decode-0")
    num_moved = rig.cluster.client.metric("kvrelay_retries_total")
    rig.cluster.pause("decode-0")
    time.sleep(HEARTBEAT_TIMEOUT_S / 3)
    rig.cluster.resume("decode-0")
    rig.check_right(records)
    assert rig.cluster.client.metric("kvrelay_retries_total") == num_moved
    assert rig.node("decode-0")["uptime_s"] > before["uptime_s"], "it did not have to register again"
    rig.cluster.wait_clean()


@pytest.mark.timeout(300)
def test_router_stalled_mid_stream_streams_go_on_and_no_node_is_declared_dead(rig: Rig) -> None:
    records = rig.start("stalled router")
    rig.cluster.wait_until(lambda: any(len(r.token_times_s) >= 4 for r in records), "a stream has begun")
    uptimes_s = {name: rig.node(name)["uptime_s"] for name in NODE_NAMES}
    num_moved = rig.cluster.client.metric("kvrelay_retries_total")
    rig.cluster.pause("router")
    time.sleep(STALL_S)
    rig.cluster.resume("router")
    rig.check_right(records)
    assert rig.cluster.client.metric("kvrelay_retries_total") == num_moved
    for name in NODE_NAMES:
        assert rig.node(name)["uptime_s"] >= uptimes_s[name] + STALL_S, f"{name} had to register again"
    rig.cluster.wait_clean()
