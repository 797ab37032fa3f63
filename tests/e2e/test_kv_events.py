"""Real processes tell the router what their caches hold; a node that dies takes its blocks along."""

from __future__ import annotations

import pytest

from tests.e2e.prompts import MODEL
from tests.support.cluster import Cluster, ClusterSpec

BLOCKS = "kvrelay_router_index_blocks"
DEADLINE_S = 90.0


@pytest.mark.timeout(400)
def test_router_knows_the_blocks_of_real_nodes_until_they_die() -> None:
    spec = ClusterSpec(model=MODEL, dtype="bfloat16", engine={"kv_pool_mib": 200}, router={"kv_events": "on"})
    with Cluster(spec) as cluster:
        client = cluster.client
        prompt = list(range(1000, 1000 + 5 * 16))  # five full blocks
        client.complete(prompt, max_tokens=4, ignore_eos=True)

        def known() -> list[float]:
            return [client.metric(BLOCKS, node_id=name) for name in ("prefill-0", "decode-0")]

        cluster.wait_until(lambda: known() == [5.0, 5.0], "the router knows the prompt's blocks at both nodes", DEADLINE_S)
        client.complete(prompt[:32] + prompt[:33], max_tokens=1)
        cluster.wait_until(lambda: known()[0] == 7.0, "two blocks are told that differ", DEADLINE_S)
        cluster.kill("decode-0")
        cluster.wait_until(lambda: known()[1] == 0.0, "the dead node's blocks are forgotten", DEADLINE_S)
        assert known()[0] == 7.0
        assert client.metric("kvrelay_router_index_gaps_total") == 0
