"""One cluster for all tests of this folder that need two nodes per role: starting it and learning the answers takes a while."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.prompts import MODEL
from tests.fault.rig import HEARTBEAT_TIMEOUT_S, Rig
from tests.support.cluster import SLOW_KERNELS, Cluster, ClusterSpec


@pytest.fixture(scope="package")
def shared_rig() -> Iterator[Rig]:
    """Started once; a test takes `rig`."""
    spec = ClusterSpec(
        model=MODEL,
        prefill=2,
        decode=2,
        dtype="bfloat16",
        engine={**SLOW_KERNELS, "kv_pool_mib": 300, "max_num_batched_tokens": 128},
        router={"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
    )
    with Cluster(spec) as cluster:
        rig = Rig(cluster)
        yield rig
        rig.client.close()


@pytest.fixture
def rig(shared_rig: Rig) -> Rig:
    """The shared rig, made whole again."""
    shared_rig.restore()
    return shared_rig
