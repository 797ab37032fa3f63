"""All nodes of a role killed: decode nodes do it all, and without those every client gets an honest error, never silence."""

from __future__ import annotations

import httpx
import pytest

from tests.fault.rig import Rig
from tests.fault.verified_load import Outcome


@pytest.mark.timeout(300)
def test_all_prefill_nodes_killed_decode_nodes_do_it_all(rig: Rig) -> None:
    for name in ("prefill-0", "prefill-1"):
        rig.cluster.kill(name)
        rig.wait_status(name, "down")
    before = rig.cluster.client.metric("kvrelay_local_prefill_total", reason="no_prefill_node")
    rig.check_right(rig.start("no prefill node"))
    assert rig.cluster.client.metric("kvrelay_local_prefill_total", reason="no_prefill_node") - before == len(rig.questions)
    warnings = rig.cluster.client.http.get("/health").json()["warnings"]
    assert warnings == ["no prefill node: decode nodes prefill"]


@pytest.mark.timeout(300)
def test_last_decode_node_killed_stream_ends_with_an_error_and_never_hangs(rig: Rig) -> None:
    records = rig.start("nobody left", rig.questions[3:4])
    rig.cluster.wait_until(lambda: len(records[0].token_times_s) >= 4, "the stream has begun")
    for name in ("decode-0", "decode-1"):
        rig.cluster.kill(name)
    rig.client.wait_for(records)
    assert records[0].outcome is Outcome.LOST and "no decode node" in records[0].detail, records[0].detail
    assert rig.cluster.client.is_healthy() is False
    refused = httpx.post(f"{rig.cluster.url}/v1/completions", json={"prompt": "Hello", "max_tokens": 2}, timeout=60.0)
    assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
