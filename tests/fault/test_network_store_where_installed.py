"""A cluster on a real Redis that is killed, hung, full or corrupt, and on networks that lose everything without a word.

One decode node is in a network namespace of its own, with one link to the router and another one to the store.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.wire.curve import create_keys
from tests.e2e.prompts import MODEL
from tests.fault.store_rig import StoreRig
from tests.support.cluster import SLOW_KERNELS, Cluster, ClusterSpec
from tests.support.delaying_proxy import DelayingProxy
from tests.support.network_namespace import NetworkNamespace, can_make_namespaces
from tests.support.redis_server import EXECUTABLE, RedisProcess

pytestmark = [
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server"),
    pytest.mark.skipif(not can_make_namespaces(), reason="this machine lets us make no network namespaces"),
    pytest.mark.timeout(400),
]
REMOTE = "decode-1"
HEARTBEAT_TIMEOUT_S = 2.0


class NetworkRig(StoreRig):
    """store: the server; network: the remote node's."""

    def __init__(self, cluster: Cluster, root: Path, store: RedisProcess, network: NetworkNamespace) -> None:
        super().__init__(cluster, root)
        self.store = store
        self.network = network


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkRig]:
    folder = tmp_path_factory.mktemp("network")
    create_keys(folder / "keys")
    store = RedisProcess(folder / "redis", "--maxmemory", "200mb", "--maxmemory-samples", "32")
    with NetworkNamespace("remote", ("router", "store")) as network:
        path = DelayingProxy(store.port, network.links["store"].host_address)
        spec = ClusterSpec(
            model=MODEL,
            prefill=1,
            decode=1,
            dtype="bfloat16",
            connector="redis",
            connector_options={"url": f"redis://{network.links['store'].host_address}:{path.port}/0", "op_timeout_s": 1.0},
            engine={
                **SLOW_KERNELS,
                "kv_pool_mib": 192,
                "max_num_batched_tokens": 256,
                "kv_load_policy": "always",
                "kv_load_timeout_s": 3.0,
            },
            router={"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
            control_host=network.links["router"].host_address,
            keys=str(folder / "keys"),
        )
        try:
            with Cluster(spec) as cluster:
                assert cluster.start_node("decode", inside=network.command) == REMOTE
                rig = NetworkRig(cluster, folder, store, network)
                yield rig
                rig.client.close()
        finally:
            path.close()
            store.end()


def test_partition_from_the_router_mid_stream_streams_go_on_elsewhere_and_the_node_comes_back(rig: NetworkRig) -> None:
    records = [rig.client.start(question, "cut from the router") for question in rig.questions * 2]
    rig.cluster.wait_until(
        lambda: any(r["node_id"] == REMOTE and int(r["num_output_tokens"]) >= 2 for r in rig.cluster.client.requests()),
        "the remote node is in the middle of streams",
    )
    rig.network.cut("router")
    try:
        rig.cluster.wait_until(lambda: rig.cluster.client.node_status(REMOTE) == "down", "the partition is noticed")
        rig.client.wait_for(records)
    finally:
        rig.network.heal("router")
    assert [record.detail for record in records] == [""] * len(records)
    assert rig.cluster.client.metric("kvrelay_migrations_total", outcome="resumed") > 0
    rig.cluster.wait_until(lambda: rig.cluster.client.node_status(REMOTE) == "up", "the node is back", 60.0)
    rig.cluster.wait_clean()
    rig.check_used(node_id=REMOTE)


def test_partition_of_one_node_from_the_store_answers_are_right_and_it_is_used_again(rig: NetworkRig) -> None:
    rig.check_used(node_id=REMOTE)
    rig.network.cut("store")
    try:
        rig.check_right_under_load()
    finally:
        rig.network.heal("store")
    rig.check_used(node_id=REMOTE)


def test_store_killed_and_restarted_empty_under_load_answers_are_right_and_it_is_used_again(rig: NetworkRig) -> None:
    rig.check_used()
    rig.store.kill()
    try:
        rig.check_right_under_load(4.0)
    finally:
        rig.store.start()
    rig.check_right_under_load(2.0)
    rig.check_used()


def test_store_hung_under_load_answers_are_right_and_it_is_used_again(rig: NetworkRig) -> None:
    rig.check_used()
    rig.store.pause()
    try:
        rig.check_right_under_load(4.0)
    finally:
        rig.store.resume()
    rig.check_used()


def test_store_full_and_corrupt_under_load_answers_are_right_and_it_is_used_again(rig: NetworkRig) -> None:
    rng = random.Random(3)
    with rig.store.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1mb")
        rig.check_right_under_load(3.0)
        client.config_set("maxmemory", "200mb")
        client.config_set("maxmemory-policy", "volatile-ttl")
        rig.check_used()
        num_damaged = 0
        end_s = time.monotonic() + 3.0
        records = [rig.client.start(question, "corrupt") for question in rig.questions * 2]
        while time.monotonic() < end_s or not num_damaged:
            for key in client.scan_iter():
                length = int(client.strlen(key))  # type: ignore[arg-type]
                if length:
                    client.setrange(key, rng.randrange(length), bytes([rng.randrange(256)]))  # type: ignore[arg-type]
                    num_damaged += 1
        rig.client.wait_for(records)
    assert num_damaged > 0
    assert [record.detail for record in records] == [""] * len(records)
    rig.check_used()
    rig.cluster.wait_clean()
