"""A node of several processes that loses one, or whose own process is killed: all of them end, and nothing else suffers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.errors import ModelLoadError, RankLostError
from core.ranks.messages import RankSetup
from core.ranks.processes import MODULE, RankProcesses
from tests.e2e.prompts import MODEL, token_prompts
from tests.support.cluster import Cluster, ClusterSpec
from tests.unit.core.model.support import Driver, random_prompt, save_llama

DEADLINE_S = 60.0
PROMPT = token_prompts()[11]  # 100 tokens, 6 blocks
TWO_RANKS = ("--tensor-parallel-size", "2")

pytestmark = pytest.mark.timeout(400)


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:.0f} s until {what}"
        time.sleep(0.02)


def rank_pids(node_pid: int) -> list[int]:
    """Of the other ranks of a node."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == node_pid and MODULE.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, ValueError):  # no process, or one that has ended since
            continue
    return found


def is_running(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def complete(cluster: Cluster, salt: str) -> list[int]:
    answer = cluster.client.complete(PROMPT, max_tokens=8, ignore_eos=True, return_token_ids=True, cache_salt=salt)
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def num_hits(cluster: Cluster) -> float:
    return cluster.client.metric("kvrelay_external_prefix_cache_hits_total", role="decode")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A decode node of one rank; tests add a prefill node of two."""
    spec = ClusterSpec(
        model=MODEL,
        prefill=0,
        engine={
            "kv_pool_mib": 400,
            "max_num_batched_tokens": 128,
            "kv_load_policy": "always",
            "lookup_timeout_s": 30.0,
            "kv_load_timeout_s": 60.0,
        },
        router={"heartbeat_timeout_s": 20.0},
    )
    with Cluster(spec) as started:
        yield started


@pytest.fixture
def node(cluster: Cluster) -> Iterator[str]:
    """A prefill node of two ranks, gone afterwards."""
    name = cluster.start_node("prefill", *TWO_RANKS)
    yield name
    if name in cluster.children:
        cluster.kill(name)


def test_rank_killed_ends_its_node_and_requests_go_on_elsewhere(cluster: Cluster, node: str) -> None:
    expected = complete(cluster, "before")
    # Two ranks have computed them, one has read them.
    cluster.wait_until(lambda: num_hits(cluster) == len(PROMPT) // 16 * 16, "the decode node tells of its hits", DEADLINE_S)
    process = cluster.children[node]
    (rank,) = rank_pids(process.pid)
    os.kill(rank, signal.SIGKILL)
    assert process.wait(DEADLINE_S) and process.poll_exit_code() == 1
    del cluster.children[node]
    assert f"rank 1 (process {rank}) ended by SIGKILL" in cluster.log(node)
    cluster.wait_until(lambda: cluster.client.node_status(node) != "up", "the node is missed", DEADLINE_S)
    assert complete(cluster, "after") == expected
    cluster.wait_clean(DEADLINE_S)


def test_node_that_is_asked_to_end_ends_its_ranks_in_order(cluster: Cluster, node: str) -> None:
    ranks = rank_pids(cluster.children[node].pid)
    assert len(ranks) == 1
    os.kill(ranks[0], signal.SIGTERM)  # as a service manager does to all of a service; the node alone decides
    assert cluster.stop_node(node) == 0
    assert not is_running(ranks[0]) and "CRITICAL" not in cluster.log(node)


def test_node_killed_takes_its_ranks_along(cluster: Cluster, node: str) -> None:
    process = cluster.children.pop(node)
    ranks = rank_pids(process.pid)
    assert len(ranks) == 1
    process.send(signal.SIGKILL)  # to itself alone
    assert process.wait(DEADLINE_S)
    wait_until(lambda: not any(is_running(rank) for rank in ranks), "no rank is left")


@pytest.mark.parametrize(
    ("number", "expected"),
    [(signal.SIGSTOP, "rank 1 has not answered for"), (signal.SIGKILL, "ended by SIGKILL")],
    ids=["hung", "killed"],
)
def test_rank_lost_in_a_step_is_told_before_the_step_ends(tmp_path: Path, number: signal.Signals, expected: str) -> None:
    """So that a node ends before it can tell clients of a failed step: their requests go on elsewhere."""
    save_llama(tmp_path)
    lost: list[str] = []
    driver = Driver(tmp_path, num_ranks=2, rank_timeout_s=0.5, on_lost=lost.append)
    (rank,) = rank_pids(os.getpid())
    try:
        os.kill(rank, number)
        with pytest.raises(RankLostError):
            driver.step([(driver.add("request", random_prompt(20, seed=1)), 20)])
        assert len(lost) == 1 and expected in lost[0]
    finally:
        if number is signal.SIGSTOP:
            os.kill(rank, signal.SIGCONT)
        driver.close()
    assert not is_running(rank)


def test_rank_that_ends_while_loading_is_an_error_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    lost: list[str] = []
    monkeypatch.setattr("core.ranks.processes.MODULE", "core.model.no_such_module")
    with pytest.raises(ModelLoadError, match=r"rank 1 \(process \d+\) ended with exit code 1 while loading"):
        Driver(tmp_path, num_ranks=2, on_lost=lost.append)
    assert not lost


def test_rank_that_cannot_load_says_why_and_no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    lost: list[str] = []

    def start_elsewhere(setups: Sequence[RankSetup], *arguments: Any) -> RankProcesses:
        return RankProcesses([msgspec.structs.replace(setup, model_dir=str(tmp_path / "gone")) for setup in setups], *arguments)

    monkeypatch.setattr("core.model.parallel_loading.RankProcesses", start_elsewhere)
    with pytest.raises(ModelLoadError, match=r"rank 1: .*gone"):
        Driver(tmp_path, num_ranks=2, on_lost=lost.append)
    assert not lost and not rank_pids(os.getpid())
