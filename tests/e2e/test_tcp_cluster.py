"""A cluster without any store: the decode node pulls KV from the prefill node that the router names, with keys and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core.wire.curve import create_keys
from tests.e2e.prompts import MODEL
from tests.fault.store_rig import StoreRig
from tests.support.cluster import Cluster, ClusterSpec

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreRig]:
    folder = tmp_path_factory.mktemp("tcp")
    create_keys(folder / "keys")
    spec = ClusterSpec(
        model=MODEL,
        dtype="bfloat16",
        connector="tcp",
        connector_options={"capacity_bytes": "128MiB", "op_timeout_s": 1.0},
        engine={"kv_pool_mib": 192, "max_num_batched_tokens": 256, "kv_load_policy": "always", "kv_load_timeout_s": 3.0},
        router={"heartbeat_timeout_s": 2.0},
        keys=str(folder / "keys"),
    )
    with Cluster(spec) as cluster:
        rig = StoreRig(cluster, folder)
        yield rig
        rig.client.close()


def test_decode_node_pulls_from_the_prefill_node_and_leaves_no_lease(rig: StoreRig) -> None:
    rig.check_used()
    rig.check_right_under_load(2.0)
    rig.cluster.wait_clean()


def test_prefill_node_killed_under_load_is_computed_anew_and_its_successor_is_used(rig: StoreRig) -> None:
    records = [rig.client.start(question, "killed") for question in rig.questions * 2]
    rig.cluster.kill("prefill-0")
    rig.client.wait_for(records)
    assert [record.detail for record in records] == [""] * len(records)
    rig.cluster.restart_node("prefill-0")
    rig.check_used()
    rig.cluster.wait_clean()


def test_prefill_node_hung_after_its_prefills_costs_time_and_no_token(rig: StoreRig) -> None:
    rig.check_used()
    records = [rig.client.start(question, "hung") for question in rig.questions]
    rig.cluster.pause("prefill-0")
    try:
        rig.client.wait_for(records)
    finally:
        rig.cluster.resume("prefill-0")
    assert [record.detail for record in records] == [""] * len(records)
    rig.cluster.wait_until(lambda: rig.cluster.client.node_status("prefill-0") == "up", "the prefill node is back")
    rig.check_used()
    rig.cluster.wait_clean()
