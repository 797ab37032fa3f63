"""One request that crashes whatever node computes it: it is given up while nodes are left, and all others are answered."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.prompts import MODEL
from tests.fault.verified_load import Outcome, Question, VerifiedClient, VerifiedLoad, make_questions
from tests.support.cluster import MODEL_NAME, SLOW_KERNELS, Cluster, ClusterSpec
from tests.support.poisoned_node import POISON

MAX_NODE_DEATHS = 3
ROLES = {"prefill-0": "prefill", "decode-0": "decode", "decode-1": "decode"}


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    spec = ClusterSpec(
        model=MODEL,
        prefill=1,
        decode=2,
        dtype="bfloat16",
        engine={**SLOW_KERNELS, "kv_pool_mib": 200, "max_num_batched_tokens": 128},
        router={"max_node_deaths": MAX_NODE_DEATHS, "max_attempts": 20, "node_wait_s": 60.0},
        node_module="tests.support.poisoned_node",
    )
    with Cluster(spec) as running:
        yield running


@pytest.mark.timeout(400)
def test_poison_request_is_given_up_before_it_has_killed_every_node(cluster: Cluster) -> None:
    client = VerifiedClient(cluster.url, MODEL_NAME, deadline_s=120.0)
    questions: list[Question] = client.with_answers(make_questions(client.vocabulary(), 7, 8))
    load = VerifiedLoad(client, questions, num_clients=3, seed=7)
    load.start()
    answers: list[httpx.Response] = []
    body = {"model": MODEL_NAME, "prompt": [*POISON, *range(200, 240)], "max_tokens": 4}
    poison = threading.Thread(target=lambda: answers.append(cluster.client.http.post("/v1/completions", json=body)))
    poison.start()
    num_deaths = 0
    must_look = True
    while must_look:  # as a supervisor does, and once more after the answer
        must_look = poison.is_alive()
        for name in [name for name, child in cluster.children.items() if child.poll_exit_code() is not None]:
            num_deaths += 1
            cluster.children.pop(name).wait(5.0)
            assert any(child.spec.name.startswith("decode") for child in cluster.children.values()), "the last decode node died"
            cluster.restart_node(name, wait=False)
        poison.join(0.1)
    load.stop()
    client.close()
    assert answers[0].status_code == 500, answers[0].text
    assert f"{MAX_NODE_DEATHS} nodes died while they had this request" in answers[0].json()["error"]["message"]
    assert num_deaths == MAX_NODE_DEATHS
    assert load.records
    assert [record.detail for record in load.records if record.outcome is not Outcome.RIGHT] == []
    cluster.wait_ready()
    cluster.wait_clean()
