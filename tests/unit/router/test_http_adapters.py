"""LoRA adapters as clients and administrators see them: names, endpoints, who may call them, and what nodes are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.adapter_files import read_adapter
from core.config import RouterOptions
from core.errors import ConfigError
from router.api_key_file import add_api_key
from router.server import read_lora_modules
from tests.unit.router.running_router import RunningRouter
from tests.unit.router.test_http_faults import wait_until

PROMPT = list(range(5, 30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the router reads of an adapter: its configuration, and bytes."""
    return write_adapter(tmp_path / "adapter", b"first")


def write_adapter(folder: Path, weights: bytes, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def cluster(model_folder: Path) -> Iterator[RunningRouter]:
    """One for each test: these change it."""
    with RunningRouter(model_folder, allow_runtime_lora_updating=True) as router:
        router.add_node("prefill")
        router.add_node("decode")
        yield router


def load(cluster: RunningRouter, name: str, folder: Path, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(folder), **fields}
    return httpx.post(f"{cluster.url}/v1/load_lora_adapter", json=body, timeout=10)


def unload(cluster: RunningRouter, name: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}/v1/unload_lora_adapter", json={"lora_name": name}, timeout=10)


def complete(cluster: RunningRouter, model: str, **fields: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 3, **fields}
    return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=10)


def test_loaded_adapter_is_listed_routed_and_unloaded(cluster: RunningRouter, folder: Path) -> None:
    answer = load(cluster, "sql", folder)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'sql' added successfully.")
    fingerprint = read_adapter(str(folder)).fingerprint
    assert [node.loaded for node in cluster.nodes] == [{fingerprint: str(folder)}] * 2
    cards = httpx.get(f"{cluster.url}/v1/models").json()["data"]
    assert [(card["id"], card["parent"]) for card in cards] == [("tiny", None), ("sql", "tiny")]
    assert httpx.get(f"{cluster.url}/v1/models/sql").json()["parent"] == "tiny"
    assert complete(cluster, "sql").json()["model"] == "sql"
    assert complete(cluster, "tiny").json()["model"] == "tiny"
    chat = {"model": "sql", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    assert httpx.post(f"{cluster.url}/v1/chat/completions", json=chat, timeout=10).json()["model"] == "sql"
    assert httpx.post(f"{cluster.url}/tokenize", json={"model": "sql", "prompt": "hi"}).status_code == 200
    told = [(message.adapter_name, message.adapter_fingerprint) for node in cluster.nodes for message in node.received]
    assert told.count(("sql", fingerprint)) >= 3 and told.count(("", b"")) == 2
    assert unload(cluster, "sql").text == "Success: LoRA adapter 'sql' removed successfully."
    wait_until(lambda: not any(node.loaded for node in cluster.nodes), "nodes have forgotten it")
    assert complete(cluster, "sql").status_code == 404
    assert unload(cluster, "sql").status_code == 404


def test_request_in_flight_keeps_its_adapter_through_reload_and_unload(cluster: RunningRouter, folder: Path) -> None:
    load(cluster, "sql", folder)
    old = read_adapter(str(folder)).fingerprint
    for node in cluster.nodes:
        node.token_delay_s = 0.05
    url = f"{cluster.url}/v1/completions"
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 20, "stream": True}
    with httpx.stream("POST", url, json=body, timeout=20) as streamed:
        lines = streamed.iter_lines()
        next(lines)
        write_adapter(folder, b"second")
        assert load(cluster, "sql", folder).status_code == 400  # a mistake, unless load_inplace says that it is none
        assert load(cluster, "sql", folder, load_inplace=True).status_code == 200
        new = read_adapter(str(folder)).fingerprint
        assert all(set(node.loaded) == {old, new} for node in cluster.nodes)
        cluster.nodes[1].kill()  # it goes on elsewhere, as what it was
        late = cluster.add_node("decode", token_delay_s=0.05)
        text = list(lines)
        assert text[-2:] == ["data: [DONE]", ""]
    assert {message.adapter_fingerprint for message in late.received} == {old}
    assert complete(cluster, "sql").status_code == 200
    assert late.received[-1].adapter_fingerprint == new
    wait_until(lambda: set(late.loaded) == {new}, "nobody needs the old one any more")


def test_node_that_registers_later_is_told_of_all_adapters(cluster: RunningRouter, folder: Path) -> None:
    load(cluster, "a", folder)
    late = cluster.add_node("decode")
    wait_until(lambda: bool(late.loaded), "it was told")
    assert late.loaded == {read_adapter(str(folder)).fingerprint: str(folder)}


def test_same_content_in_two_folders_is_told_from_one_that_still_has_it(
    cluster: RunningRouter, folder: Path, tmp_path: Path
) -> None:
    """Or a node that comes later, or reads it again, would find other content in the folder that was reloaded."""
    changing = write_adapter(tmp_path / "changing", b"first")
    fingerprint = read_adapter(str(folder)).fingerprint
    load(cluster, "kept", folder)
    load(cluster, "changing", changing)
    load(cluster, "changing", write_adapter(changing, b"second"), load_inplace=True)
    late = cluster.add_node("decode")
    wait_until(lambda: all(len(node.loaded) == 2 for node in cluster.nodes), "all know both contents")
    assert {node.loaded[fingerprint] for node in (late, *cluster.nodes)} == {str(folder)}


def test_adapter_that_one_node_cannot_load_is_given_up_everywhere(cluster: RunningRouter, folder: Path) -> None:
    cluster.nodes[1].adapter_error = "it has another shape"
    answer = load(cluster, "sql", folder)
    assert answer.status_code == 400
    assert "decode-1: it has another shape" in answer.json()["error"]["message"]
    wait_until(lambda: not any(node.loaded for node in cluster.nodes), "nobody keeps it")
    assert complete(cluster, "sql").status_code == 404


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_dora": True}, "use_dora: got True; allowed: absent or null"),
        ({"bias": "all"}, "bias: got 'all'; allowed: none"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save: got ['lm_head']; allowed: absent or null"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: got 'lm_head'; allowed: any of q_proj"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern: got {'q_proj': 4}; allowed: absent or null"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa'; allowed: true, false"),
        ({"peft_type": "IA3"}, "peft_type: got 'IA3'; allowed: LORA"),
        ({"r": 0}, "r: got 0; allowed: a whole number of at least 1"),
        ({"r": True}, "r: got True; allowed: a whole number of at least 1"),
        ({"lora_alpha": float("nan")}, "lora_alpha: got nan; allowed: a number above 0"),
        ({"something_new": 3}, "something_new: got 3; allowed: absent or null: it is not supported"),
    ],
)
def test_folder_with_what_is_not_supported_is_refused_with_field_value_and_allowed(
    cluster: RunningRouter, folder: Path, fields: dict[str, Any], message: str
) -> None:
    answer = load(cluster, "sql", write_adapter(folder, b"first", **fields))
    assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    assert not any(node.loaded for node in cluster.nodes)


def test_names_and_folders_that_cannot_be_are_refused(cluster: RunningRouter, folder: Path, tmp_path: Path) -> None:
    for name, path, fragment in (
        ("", folder, "lora_name"),
        ("n" * 257, folder, "lora_name"),
        ("tiny", folder, "another name than the model's own"),
        ("sql", tmp_path / "nothing", "lora_path"),
        ("sql", tmp_path, "adapter_config.json"),
    ):
        answer = load(cluster, name, path)
        assert answer.status_code == 400 and fragment in answer.text, answer.text
    assert httpx.post(f"{cluster.url}/v1/load_lora_adapter", json={"lora_name": "sql"}).status_code == 400


def test_endpoints_are_closed_unless_allowed_and_then_an_administrators(model_folder: Path, folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        assert load(router, "sql", folder).status_code == 404
        assert unload(router, "sql").status_code == 404
    keys = folder.parent / "api.yaml"
    client, admin = add_api_key(keys, "client", is_admin=False), add_api_key(keys, "admin", is_admin=True)
    with RunningRouter(model_folder, allow_runtime_lora_updating=True, api_keys_file=str(keys)) as router:
        for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            body = {"lora_name": "sql", "lora_path": str(folder)}
            answers = [
                httpx.post(f"{router.url}{path}", json=body, headers={"Authorization": f"Bearer {key}"}).status_code
                for key in ("wrong", client, admin)
            ]
            assert answers == [401, 403, 200]


def test_modules_of_the_configuration_are_read_at_start(cluster: RunningRouter, folder: Path) -> None:
    (adapter,) = read_lora_modules(RouterOptions(lora_modules={"sql": str(folder)}), cluster.model)
    assert (adapter.name, adapter.path, adapter.fingerprint) == ("sql", str(folder), read_adapter(str(folder)).fingerprint)
    with pytest.raises(ConfigError, match=r"router\.lora_modules: got 'tiny=.*another name than the model's own"):
        read_lora_modules(RouterOptions(lora_modules={"tiny": str(folder)}), cluster.model)
