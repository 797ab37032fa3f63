"""A cluster whose store is Ray's object store: it is used, and when Ray is killed and started again every answer stays right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.prompts import MODEL
from tests.fault.store_rig import StoreRig
from tests.support.cluster import SLOW_KERNELS, Cluster, ClusterSpec
from tests.support.ray_node import RayNode


class RayRig(StoreRig):
    """With the Ray under it."""

    def __init__(self, cluster: Cluster, ray: RayNode) -> None:
        super().__init__(cluster, Path())
        self.ray = ray


@pytest.fixture(scope="module")
def rig() -> Iterator[RayRig]:
    ray = RayNode()
    spec = ClusterSpec(
        model=MODEL,
        dtype="bfloat16",
        connector="ray",
        connector_options={**ray.options, "capacity_bytes": "128MiB", "linger_s": 5.0},
        engine={**SLOW_KERNELS, "kv_pool_mib": 192, "max_num_batched_tokens": 256, "kv_load_policy": "always"},
    )
    try:
        with Cluster(spec) as cluster:
            rig = RayRig(cluster, ray)
            yield rig
            rig.client.close()
    finally:
        ray.end()


def test_ray_as_a_store_is_used_by_requests_with_the_same_prefix(rig: RayRig) -> None:
    rig.check_used()
    rig.cluster.wait_clean()


def test_ray_killed_and_restarted_empty_under_load_answers_are_right_and_it_is_used_again(rig: RayRig) -> None:
    rig.ray.kill()
    try:
        rig.check_right_under_load(3.0)
    finally:
        rig.ray.start()
    rig.check_used()
    rig.cluster.wait_clean()
