"""No request chooses where KV or messages go: store and node addresses are the configuration's alone.

Fields that the API does not know are ignored, as OpenAI-compatible servers do, and nothing of them reaches a node.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from core.sampling_params import SamplingParams
from core.wire.messages import RouterMessage, encode
from core.wire.numbering import OUTSIDE
from tests.unit.router.running_router import RunningRouter

MARKER = "attacker.example"
ADDRESS = f"tcp://{MARKER}:6379"
PARAMETERS = {"remote_host": MARKER, "remote_port": 1, "remote_engine_id": MARKER, "do_remote_prefill": True}
UNKNOWN_FIELDS: dict[str, object] = {
    "kv_transfer_params": PARAMETERS,
    "connector": {"name": "shm", "options": {"path": f"/{MARKER}", "host": MARKER}},
    "connector_options": {"url": ADDRESS},
    "store": ADDRESS,
    "node": ADDRESS,
    "node_id": MARKER,
    "router": ADDRESS,
    "control_host": MARKER,
    "metrics_address": ADDRESS,
    "security": {"keys": f"/{MARKER}"},
    "model_path": f"/{MARKER}",
    "request_id": MARKER,
    "tenant": MARKER,
    "vllm_xargs": PARAMETERS,
    "extra_body": {"kv_transfer_params": PARAMETERS},
    "user": MARKER,
    "metadata": {"host": MARKER},
}
REQUESTS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": [5, 6, 7, 8, 9, 10], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 2},
}
WORDS_OF_ADDRESSES = ("address", "host", "port", "url", "uri", "endpoint", "path", "connector", "store", "option", "folder")


@pytest.mark.parametrize("field", UNKNOWN_FIELDS)
@pytest.mark.parametrize("path", REQUESTS)
def test_unknown_field_is_ignored_and_reaches_no_node(cluster: RunningRouter, path: str, field: str) -> None:
    before = [len(node.received) for node in cluster.nodes]
    body = {**REQUESTS[path], field: UNKNOWN_FIELDS[field]}
    headers = {"X-Remote-Host": MARKER, "X-Request-Id": MARKER, "X-KV-Transfer-Params": MARKER}
    answer = httpx.post(f"{cluster.url}{path}", json=body, headers=headers, timeout=10)
    assert answer.status_code == 200, answer.text
    told = [message for node, old in zip(cluster.nodes, before, strict=True) for message in node.received[old:]]
    assert told
    for message in told:
        assert MARKER.encode() not in encode(message, OUTSIDE)


def test_unknown_field_inside_known_ones_reaches_no_node(cluster: RunningRouter) -> None:
    before = [len(node.received) for node in cluster.nodes]
    message = {"role": "user", "content": [{"type": "text", "text": "hi", "url": ADDRESS}], "kv_transfer_params": PARAMETERS}
    body = {"messages": [message], "max_tokens": 2, "stream_options": {"host": MARKER}, "stream": True}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=10)
    assert answer.status_code == 200, answer.text
    told = [told for node, old in zip(cluster.nodes, before, strict=True) for told in node.received[old:]]
    assert told and not any(MARKER.encode() in encode(message, OUTSIDE) for message in told)


def test_messages_to_nodes_have_no_field_for_an_address() -> None:
    found = [
        f"{message.__name__}.{name}"
        for message in typing.get_args(RouterMessage)
        for name in _field_names(message)
        if any(word in name.split("_") for word in WORDS_OF_ADDRESSES)
    ]
    assert not found, f"what a node connects to comes from its configuration: {found}"


def _field_names(message: type[msgspec.Struct]) -> Iterator[str]:
    yield from message.__struct_fields__
    yield from (leaf.name for leaf in dataclasses.fields(SamplingParams))
