"""kill -9 of the router mid-stream: clients are told by a broken connection, and the next router takes the nodes as they are."""

from __future__ import annotations

import pytest

from tests.fault.rig import NODE_NAMES, Rig
from tests.fault.verified_load import Outcome


@pytest.mark.timeout(300)
def test_router_killed_mid_stream_next_one_takes_the_nodes_back_without_their_old_work(rig: Rig) -> None:
    records = rig.start("killed router")
    rig.cluster.wait_until(lambda: any(len(r.token_times_s) >= 4 for r in records), "a stream has begun")
    rig.cluster.wait_until(lambda: any(rig.node(name)["num_in_flight"] for name in NODE_NAMES[:2]), "a prompt is in its prefill")
    pids = {name: rig.cluster.children[name].pid for name in NODE_NAMES}
    generations = {name: rig.node(name)["generation"] for name in NODE_NAMES}
    rig.cluster.kill("router")
    outcomes = rig.client.wait_for(records)
    assert set(outcomes) <= {Outcome.RIGHT, Outcome.LOST}, [record.detail for record in records]
    assert Outcome.LOST in outcomes, "some request must have been cut"
    for record in records:  # neither silence until a deadline nor an orderly end
        assert record.outcome is Outcome.RIGHT or "Error after" in record.detail

    rig.cluster.start_router()
    rig.cluster.wait_ready()
    rig.cluster.wait_clean()
    assert {name: rig.cluster.children[name].pid for name in NODE_NAMES} == pids
    assert {name: rig.node(name)["generation"] for name in NODE_NAMES} == generations
    assert any("dropped" in rig.cluster.log(name) for name in NODE_NAMES)
    rig.check_right(rig.start("killed router"))  # also from the KV that the lost ones left
    rig.cluster.wait_clean()
