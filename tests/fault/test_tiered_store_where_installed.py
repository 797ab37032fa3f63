"""A loaded cluster on shared memory over a real Redis, which is killed and stopped: prompts are handed over all the same."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.prompts import MODEL
from tests.fault.store_rig import StoreRig
from tests.support.cluster import SLOW_KERNELS, Cluster, ClusterSpec
from tests.support.redis_server import EXECUTABLE, RedisProcess

pytestmark = [pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server"), pytest.mark.timeout(400)]

RECOVERY_S = 5.0


class TieredRig(StoreRig):
    """redis: the slower tier."""

    def __init__(self, cluster: Cluster, root: Path, redis: RedisProcess) -> None:
        super().__init__(cluster, root)
        self.redis = redis

    def check_handed_over(self) -> None:
        """Decode nodes load what the prefill node has just computed."""
        for _ in range(3):
            self.check_used()

    def wait_redis(self, *, is_reachable: bool, timeout_s: float) -> None:
        """Until both nodes say so."""
        client = self.cluster.client
        self.cluster.wait_until(
            lambda: client.metric("kvrelay_store_tier_reachable", tier="redis") == 2 * is_reachable,
            f"redis is {'' if is_reachable else 'not '}reachable",
            timeout_s,
        )


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TieredRig]:
    folder = tmp_path_factory.mktemp("tiers")
    redis = RedisProcess(folder / "redis", "--maxmemory", "200mb", "--maxmemory-samples", "32")
    pool_name = f"tiers-{uuid.uuid4().hex[:12]}"
    spec = ClusterSpec(
        model=MODEL,
        dtype="bfloat16",
        connector="tiered",
        connector_options={
            "tiers": "shm,redis",
            "shm": {"name": pool_name, "capacity_bytes": "64MiB"},
            "redis": {"url": redis.url, "op_timeout_s": 1.0},
        },
        pool_name=pool_name,
        engine={**SLOW_KERNELS, "kv_pool_mib": 192, "max_num_batched_tokens": 256, "kv_load_policy": "always"},
    )
    try:
        with Cluster(spec) as cluster:
            rig = TieredRig(cluster, folder, redis)
            yield rig
            rig.client.close()
    finally:
        redis.end()


def test_tier_killed_under_load_the_other_hands_over_and_it_is_used_again(rig: TieredRig) -> None:
    rig.check_handed_over()
    rig.redis.kill()
    try:
        rig.wait_redis(is_reachable=False, timeout_s=30.0)
        rig.check_right_under_load(3.0)
        rig.check_handed_over()
    finally:
        rig.redis.start()
    rig.wait_redis(is_reachable=True, timeout_s=2 * RECOVERY_S)  # a heartbeat later than the node
    rig.check_handed_over()
    with rig.redis.client() as client:
        rig.cluster.wait_until(lambda: client.dbsize() > 0, "it is written again")


def test_tier_stopped_under_load_the_other_hands_over_and_it_is_used_again(rig: TieredRig) -> None:
    rig.check_handed_over()
    rig.redis.pause()
    try:
        rig.check_right_under_load(3.0)
        rig.check_handed_over()
        rig.wait_redis(is_reachable=False, timeout_s=30.0)
    finally:
        rig.redis.resume()
    rig.wait_redis(is_reachable=True, timeout_s=2 * RECOVERY_S)
    rig.check_handed_over()
