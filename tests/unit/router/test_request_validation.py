"""What clients may ask, as a table: each refusal names its field, each allowed form reaches the node as meant."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from core.errors import InvalidInputError
from router.chat_validation import template_messages
from router.openai_protocol import ChatRequest, CompletionRequest, decode_body
from router.request_validation import ModelLimits, plan_chat, plan_completion, split_prompts
from tests.unit.router.running_router import RunningRouter

LIMITS = ModelLimits(served_names=("tiny",), max_model_len=256, vocab_size=420, max_choices=8)
HELLO = [{"role": "user", "content": "hello"}]

COMPLETION_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [[1], 2]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [420]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": [3] * 256}, "prompt"),
    ({"prompt": [3] * 250, "max_tokens": 7}, "max_tokens"),
    ({"prompt": ["a"] * 9}, "prompt"),
    ({"prompt": ["a"] * 3, "n": 3}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2**40}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**64}, "seed"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [420]}, "stop_token_ids"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
    ({"logit_bias": {str(place): 1 for place in range(1025)}}, "logit_bias"),
    ({"user": "x" * 1025}, "user"),
    ({"best_of": 2**63}, "best_of"),
    ({"n": 10**30}, "n"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"420": 1}}, "logit_bias"),
    ({"logit_bias": {"3": 101}}, "logit_bias[3]"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 2, "best_of": 3, "stream": True}, "best_of"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[" * 5000}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a" * 65537}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": "yes"}}, "structured_outputs.choice"),
    ({"structured_outputs": "json"}, "structured_outputs"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"suffix": "x"}, "suffix"),
    ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "guided_json"),
    ({"priority": 2**31}, "priority"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
]

CHAT_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].type"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
    ({"logprobs": 1}, "logprobs"),
    ({"echo": True}, "echo"),
    ({"chat_template": "x"}, "chat_template"),
    ({"max_tokens": 250}, "max_tokens"),
    ({"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("change", "field"), COMPLETION_FAULTS, ids=lambda value: json.dumps(value)[:40])
def test_completions_fault_is_400_naming_the_field(cluster: RunningRouter, change: dict[str, Any], field: str) -> None:
    check_refused(cluster, "/v1/completions", {"prompt": "hello", **change}, field)


@pytest.mark.parametrize(("change", "field"), CHAT_FAULTS, ids=lambda value: json.dumps(value)[:40])
def test_chat_fault_is_400_naming_the_field(cluster: RunningRouter, change: dict[str, Any], field: str) -> None:
    check_refused(cluster, "/v1/chat/completions", {"messages": HELLO, **change}, field)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"\xff\xfe",
        b'{"prompt": "\\ud800x"}',
        b"[" * 9999,
    ],
)
def test_completions_body_that_is_no_json_object_is_400(cluster: RunningRouter, body: bytes) -> None:
    response = httpx.post(f"{cluster.url}/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"


def check_refused(cluster: RunningRouter, path: str, body: dict[str, Any], field: str) -> None:
    num_before = sum(len(node.received) for node in cluster.nodes)
    response = httpx.post(f"{cluster.url}{path}", json=body, timeout=10)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field, error
    assert field in error["message"] and "allowed" in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert sum(len(node.received) for node in cluster.nodes) == num_before, "a refused request reached a node"


def test_completions_accepted_fields_reach_the_node_as_meant(cluster: RunningRouter) -> None:
    body = {
        "prompt": [5, 6, 7],
        "max_completion_tokens": 3,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -4,
        "min_tokens": 2,
        "stop": ["zzz"],
        "stop_token_ids": [4],
        "ignore_eos": True,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.3,
        "logit_bias": {"5": -100},
        "priority": -3,
        "cache_salt": "tenant",
        "user": "someone",
        "best_of": 1,
        "tools": None,
        "an_unknown_field": {"x": 1},
    }
    assert httpx.post(f"{cluster.url}/v1/completions", json=body).status_code == 200
    message = cluster.nodes[1].received[-1]
    sampling = message.sampling
    assert (message.priority, message.cache_salt) == (-3, "tenant")
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed) == (3, 2, -4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 7, 0.1)
    assert (sampling.stop, sampling.stop_token_ids, sampling.ignore_eos) == (("zzz",), (4,), True)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.1, 0.2, 1.3)
    assert sampling.logit_bias == {5: -100.0}
    assert sampling.logprobs is None


def test_completions_nulls_mean_defaults(cluster: RunningRouter) -> None:
    names = ("temperature", "top_p", "n", "stop", "logprobs", "seed", "stream", "logit_bias", "max_tokens", "echo", "best_of")
    response = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "hi", **dict.fromkeys(names)})
    assert response.status_code == 200
    assert response.json()["usage"]["completion_tokens"] == 16
    assert cluster.nodes[1].received[-1].sampling.seed is not None, "the router draws a seed"


def test_completions_default_length_shrinks_to_the_context() -> None:
    plan = plan_completion(decode_body(b'{"prompt": "x"}', CompletionRequest), LIMITS)
    assert plan.sampling_for(250, 0, LIMITS).max_tokens == 6
    assert plan.sampling_for(10, 0, LIMITS).max_tokens == 16
    with pytest.raises(InvalidInputError, match=r"256 tokens.*256"):
        plan.sampling_for(256, 0, LIMITS)


def test_plan_choices_get_seeds_of_their_own_even_at_the_edge() -> None:
    body = json.dumps({"prompt": "x", "seed": 2**63 - 1, "n": 2}).encode()
    plan = plan_completion(decode_body(body, CompletionRequest), LIMITS)
    assert [plan.sampling_for(1, place, LIMITS).seed for place in range(2)] == [2**63 - 1, -(2**63)]


def test_plan_chat_tools_with_choice_none_are_allowed() -> None:
    body = json.dumps({"messages": HELLO, "tools": [{"type": "function"}], "tool_choice": "none"}).encode()
    assert plan_chat(decode_body(body, ChatRequest), LIMITS).num_choices == 1


@pytest.mark.parametrize(
    ("prompt", "parts"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_split_prompts_four_forms(prompt: Any, parts: list[Any]) -> None:
    assert split_prompts(prompt, LIMITS) == parts


def test_template_messages_join_text_parts_and_keep_names() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = json.dumps({"messages": [{"role": "user", "content": parts, "name": "ann"}]}).encode()
    assert template_messages(decode_body(body, ChatRequest).messages) == [{"role": "user", "content": "one\ntwo", "name": "ann"}]


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": [value]}
    return value


@pytest.mark.parametrize(
    ("fields", "field", "fragment"),
    [
        ({"messages": HELLO * 257}, "messages", "257 messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 30_000}]}, "messages", "characters"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"a": "x" * 30_000}]}]}, "messages", "characters"),
        ({"messages": [{"role": "assistant", "tool_calls": [_nested(9)]}]}, "messages[0].tool_calls", "16 levels"),
        ({"messages": [{"role": "user", "content": "a", "name": "x" * 257}]}, "messages[0].name", "256 characters"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": "x" * 30_000}]}, "messages", "characters"),
        ({"messages": HELLO, "chat_template_kwargs": {"a": _nested(9)}}, "chat_template_kwargs", "16 levels"),
        ({"messages": HELLO, "chat_template_kwargs": {"a": "x" * 20_000}}, "chat_template_kwargs", "16384 bytes"),
        ({"messages": HELLO, "top_logprobs": 21, "logprobs": True}, "logprobs", "0 to 20"),
    ],
)
def test_chat_larger_than_any_model_needs_is_refused_by_field(
    cluster: RunningRouter, fields: dict[str, Any], field: str, fragment: str
) -> None:
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert fragment in answer.json()["error"]["message"]


@pytest.mark.parametrize(("written", "shown"), [("1e999", "1e999"), ("-1e999", "-1e999"), ("9" * 4500, "9" * 50)])
def test_number_that_no_float_holds_is_shown_as_it_was_written(written: str, shown: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        decode_body(b'{"prompt": "a", "top_k": 1, "temperature": %s}' % written.encode(), CompletionRequest)
    assert caught.value.field == "temperature"
    assert str(caught.value).startswith(f"temperature: got {shown}") and len(str(caught.value)) < 250


def test_refusal_of_a_large_value_does_not_walk_through_it() -> None:
    class Counted(str):
        num_shown = 0

        def __repr__(self) -> str:
            Counted.num_shown += 1
            return super().__repr__()

    assert len(str(InvalidInputError("prompt", [Counted("x")] * 100_000, "less"))) < 200
    assert Counted.num_shown < 100


def test_detokenize_of_more_than_the_context_is_refused(cluster: RunningRouter) -> None:
    answer = httpx.post(f"{cluster.url}/detokenize", json={"tokens": [5] * 257})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tokens")
