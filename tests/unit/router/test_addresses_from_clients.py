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

from core.config import RouterOptions
from core.sampling_params import SamplingParams
from core.wire.messages import Generate, RequestUpdate, RouterMessage, Updates, decode_router_message, encode
from core.wire.numbering import OUTSIDE
from router.flow_actions import RequestSpec
from router.metrics import RouterMetrics
from router.router_core import RouterCore
from tests.support.virtual_clock import VirtualClock
from tests.unit.router.flow_bench import register_message
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
    "lora_path": f"/{MARKER}",
    "lora_name": MARKER,
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
WORDS_OF_ADDRESSES = (
    "address",
    "host",
    "port",
    "url",
    "uri",
    "endpoint",
    "path",
    "connector",
    "store",
    "option",
    "folder",
    "sources",
    "peers",
)
# Where nodes get KV from each other: what nodes have registered, and nothing else; see the last test. Folders of adapters: from
# the configuration or an administrator; see test_http_adapters.py.
NOT_FROM_CLIENTS = ("Generate.kv_sources", "LoadAdapter.path")


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
    found = [name for name in found if name not in NOT_FROM_CLIENTS]
    assert not found, f"what a node connects to comes from its configuration: {found}"


def _field_names(message: type[msgspec.Struct]) -> Iterator[str]:
    yield from message.__struct_fields__
    yield from (leaf.name for leaf in dataclasses.fields(SamplingParams))


def test_sources_of_kv_are_what_nodes_have_registered_and_nothing_else() -> None:
    """Whatever a client and the nodes' other words say: a dispatch names addresses of the registry's connected nodes."""
    sent: list[Generate] = []

    def send(_identity: bytes, frame: bytes) -> bool:
        message = decode_router_message(frame)[1]
        sent.extend([message] if isinstance(message, Generate) else [])
        return True

    core = RouterCore(RouterOptions(), VirtualClock(), send, RouterMetrics("tiny"), MARKER)
    registered = {}
    for node_id, role in (("p0", "prefill"), ("d0", "decode"), ("d1", "decode")):
        registered[node_id] = f"{node_id}.cluster:7"
        message = register_message(node_id, role)
        message = msgspec.structs.replace(
            message, kv_address=registered[node_id], metrics_address=f"{MARKER}:1", connector=MARKER
        )
        core.handle_message(node_id.encode(), message)
    spec = RequestSpec(
        request_id=MARKER,
        prompt_token_ids=list(range(3, 30)),
        sampling=SamplingParams(seed=1, max_tokens=4),
        cache_salt=MARKER,
        client_request_id=MARKER,
    )
    core.submit(spec, lambda _event: None)
    core.handle_message(
        b"p0", Updates((RequestUpdate(request_id=f"{MARKER}.1", token_ids=(5,), is_prefill_done=True, error=MARKER),))
    )
    assert [message.kv_sources for message in sent] == [(), (registered["p0"],)]
