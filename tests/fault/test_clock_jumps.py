"""The wall clocks of router and nodes jump by a day mid-stream: nothing that anybody waits for is measured by them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.prompts import MODEL
from tests.fault.rig import HEARTBEAT_TIMEOUT_S
from tests.fault.verified_load import Outcome, Question, VerifiedClient
from tests.support.cluster import MODEL_NAME, SLOW_KERNELS, Cluster, ClusterSpec

FAKETIME = next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)  # Debian's package faketime
DAY_S = 86_400
JUMPS = ("+1d", "-1d", "+0")


@pytest.fixture
def offset_file(tmp_path: Path) -> Path:
    """What the processes' wall clocks are off by."""
    path = tmp_path / "offset"
    path.write_text("+0\n")
    return path


@pytest.fixture
def cluster(offset_file: Path) -> Iterator[Cluster]:
    spec = ClusterSpec(
        model=MODEL,
        prefill=0,
        dtype="bfloat16",
        engine={**SLOW_KERNELS, "kv_pool_mib": 192},
        router={"heartbeat_timeout_s": HEARTBEAT_TIMEOUT_S},
        environment={
            "LD_PRELOAD": str(FAKETIME),
            "FAKETIME_TIMESTAMP_FILE": str(offset_file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        },
    )
    with Cluster(spec) as running:
        running.start_node("prefill")  # after the other: sleeping while a lock is held fails under libfaketime (EINVAL)
        yield running


@pytest.mark.timeout(300)
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed")
def test_wall_clock_jumps_mid_stream_output_is_right_and_nobody_is_declared_dead_skipped_without_libfaketime(
    cluster: Cluster, offset_file: Path
) -> None:
    client = VerifiedClient(cluster.url, MODEL_NAME, deadline_s=60.0)
    (question,) = client.with_answers([Question(client.vocabulary()[:40], 60, 1.0, 1)])
    created_s = [_created_s(cluster)]
    nodes = cluster.client.nodes()
    record = client.start(question, "jumps")
    for place, jump in enumerate(JUMPS, start=1):
        num_tokens = 15 * place
        cluster.wait_until(lambda num=num_tokens: len(record.token_times_s) >= num, "the stream goes on")  # type: ignore[misc]
        offset_file.write_text(f"{jump}\n")
        created_s.append(_created_s(cluster))
    client.wait_for([record])
    assert (record.outcome, record.detail) == (Outcome.RIGHT, "")
    assert [round((at_s - created_s[0]) / DAY_S) for at_s in created_s] == [0, 1, -1, 0], "the clocks did jump"
    assert cluster.client.metric("kvrelay_retries_total") == 0
    for before, after in zip(nodes, cluster.client.nodes(), strict=True):
        assert after["status"] == "up" and after["uptime_s"] > before["uptime_s"], f"{before['node_id']} had to register again"
    cluster.wait_clean()
    client.close()


def _created_s(cluster: Cluster) -> int:
    return int(cluster.client.complete([1, 2, 3], max_tokens=1)["created"])
