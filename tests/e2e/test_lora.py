"""LoRA adapters through real processes: routing by name, company, reloading, nodes that come later; KV is never mixed up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from core.model_files import resolve_model
from tests.e2e.prompts import MODEL, token_prompts
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec
from tests.support.lora_folders import ATTENTION, save_adapter

NUM_OUTPUT_TOKENS = 12
PROMPTS = [prompt for prompt in token_prompts() if 17 <= len(prompt) <= 129][:4]
SIZE = 0.06


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made, model = tmp_path_factory.mktemp("adapters"), resolve_model(MODEL)
    return {
        "first": save_adapter(made / "first", model, rank=4, seed=1, size=SIZE, modules=ATTENTION),
        "second": save_adapter(made / "second", model, rank=8, seed=2, size=SIZE, modules=("q_proj", "up_proj", "down_proj")),
        "third": save_adapter(made / "third", model, rank=4, seed=3, size=SIZE, modules=ATTENTION),
        "wide": save_adapter(made / "wide", model, rank=65, seed=4, modules=("q_proj",)),
    }


@pytest.fixture(scope="module")
def cluster(folders: dict[str, Path]) -> Iterator[Cluster]:
    spec = ClusterSpec(
        model=MODEL,
        prefill=1,
        decode=1,
        engine={"kv_pool_mib": 400, "kv_load_policy": "always", "max_loras": 1},  # so that hits and turns can be counted
        router={"lora_modules": {"first": str(folders["first"])}, "allow_runtime_lora_updating": True},
    )
    with Cluster(spec) as running:
        yield running
        running.wait_clean()


def ask(cluster: Cluster, model: str, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Output tokens of all prompts, sent together."""
    bodies: list[dict[str, Any]] = [_body(model, prompt) for prompt in prompts]
    return [answer["choices"][0]["token_ids"] for answer in cluster.client.complete_many(bodies)]


def _body(model: str, prompt: list[int]) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": NUM_OUTPUT_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def load(cluster: Cluster, name: str, folder: Path, **fields: Any) -> None:
    answer = cluster.client.http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder), **fields})
    assert answer.status_code == 200, answer.text


def unload(cluster: Cluster, name: str) -> None:
    answer = cluster.client.http.post("/v1/unload_lora_adapter", json={"lora_name": name})
    assert answer.status_code == 200, answer.text


def hits(cluster: Cluster) -> tuple[float, float]:
    """Tokens that were hits in a node's own cache, and in the store where prompts are computed; a handoff is none of these.

    Nodes' counts come with heartbeats: those of all requests that were routed so far are waited for.
    """
    metric = cluster.client.metric
    routed = metric("kvrelay_routed_requests_total")
    cluster.wait_until(lambda: metric("kvrelay_request_finished_total") == routed, f"nodes have told of {routed} requests")
    return metric("kvrelay_prefix_cache_hits_total"), metric("kvrelay_external_prefix_cache_hits_total", role="prefill")


@pytest.fixture(scope="module")
def alone(cluster: Cluster, folders: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What base, first and second answer, one after the other; each with KV of its own."""
    load(cluster, "second", folders["second"])
    return {name: ask(cluster, name) for name in (MODEL_NAME, "first", "second")}


@pytest.mark.timeout(600)
def test_names_route_to_base_and_adapters_and_all_at_once_answer_the_same(
    cluster: Cluster, alone: dict[str, list[list[int]]]
) -> None:
    assert alone[MODEL_NAME] != alone["first"] != alone["second"] != alone[MODEL_NAME]
    bodies = [_body(name, prompt) for prompt in PROMPTS for name in alone]
    answers = cluster.client.complete_many(bodies)
    for body, answer in zip(bodies, answers, strict=True):
        assert answer["model"] == body["model"]
        assert answer["choices"][0]["token_ids"] == alone[body["model"]][PROMPTS.index(body["prompt"])]
    cards = {card["id"]: card["parent"] for card in cluster.client.http.get("/v1/models").json()["data"]}
    assert cards == {MODEL_NAME: None, "first": MODEL_NAME, "second": MODEL_NAME}
    unknown = cluster.client.http.post("/v1/completions", json=_body("third", PROMPTS[0]))
    assert unknown.status_code == 404 and "third" in unknown.text


@pytest.mark.timeout(600)
def test_changed_weights_under_the_same_name_give_the_new_answer_and_hit_nothing_old(
    cluster: Cluster, folders: dict[str, Path], alone: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(folders["second"], folder)
    load(cluster, "changing", folder)
    before = hits(cluster)
    assert ask(cluster, "changing") == alone["second"]
    assert hits(cluster) > before  # the same content has the same KV, whatever it is called
    shutil.copytree(folders["third"], folder, dirs_exist_ok=True)
    assert ask(cluster, "changing") == alone["second"]  # files alone change nothing
    load(cluster, "changing", folder, load_inplace=True)
    before = hits(cluster)
    changed = ask(cluster, "changing")
    assert hits(cluster) == before
    assert changed != alone["second"]
    load(cluster, "third", folders["third"])
    assert ask(cluster, "third") == changed
    for name in ("changing", "third"):
        unload(cluster, name)
    assert cluster.client.http.post("/v1/completions", json=_body("changing", PROMPTS[0])).status_code == 404


@pytest.mark.timeout(600)
def test_node_that_registers_later_and_one_that_was_killed_serve_the_adapters(
    cluster: Cluster, alone: dict[str, list[list[int]]]
) -> None:
    cluster.start_node("decode")
    cluster.kill("decode-0")
    cluster.wait_until(lambda: cluster.client.node_status("decode-0") == "down", "the node is missed")
    assert ask(cluster, "second") == alone["second"]
    cluster.restart_node("decode-0")
    cluster.kill("decode-1")
    assert ask(cluster, "first") == alone["first"]


def test_adapter_that_nodes_cannot_serve_is_refused_with_the_reason_and_changes_nothing(
    cluster: Cluster, folders: dict[str, Path]
) -> None:
    answer = cluster.client.http.post("/v1/load_lora_adapter", json={"lora_name": "w", "lora_path": str(folders["wide"])})
    assert answer.status_code == 400
    assert "r: got 65; allowed: at most 64 (engine.max_lora_rank)" in answer.text
    assert "w" not in [card["id"] for card in cluster.client.http.get("/v1/models").json()["data"]]
