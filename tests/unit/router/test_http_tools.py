"""Tools in chats over HTTP, with the official client: what is refused, rendered, forced, and told of the calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.tool_templates import HERMES
from tests.unit.router.fake_node import FakeNode
from tests.unit.router.running_router import RunningRouter

END = 2  # <|im_end|>
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
BAD_SCHEMA = {"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
QUESTION = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def router(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    template = tmp_path_factory.mktemp("template") / "hermes.jinja"
    template.write_text(HERMES)
    with RunningRouter(model_folder, chat_template=str(template)) as running:
        running.model = running.model.__class__(running.model.names, 4096, running.model.vocab_size)
        running.add_node("decode")
        yield running


@pytest.fixture
def node(router: RunningRouter) -> FakeNode:
    return router.nodes[0]


@pytest.fixture(scope="module")
def client(router: RunningRouter) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="unused", max_retries=0, timeout=10) as opened:
        yield opened


def speak(router: RunningRouter, text: str) -> None:
    """Let every answer be this text."""
    router.nodes[0].script = [*router.tokenizer.encode(text, add_special_tokens=False), END]


def ask(client: openai.OpenAI, **body: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": [QUESTION], "tools": [WEATHER, TIME], **body})


def prompt_of(router: RunningRouter, place: int = -1) -> str:
    return router.tokenizer.decode(router.nodes[0].received[place].prompt_token_ids, skip_special_tokens=False)


def test_tools_call_of_a_whole_answer_is_parsed_and_rendered_back(router: RunningRouter, client: openai.OpenAI) -> None:
    speak(router, f"Let me look. {CALL}")
    choice = ask(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look. "
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert json.dumps(WEATHER) in prompt_of(router)
    speak(router, "It rains.")
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    choice = ask(client, messages=[QUESTION, choice.message.model_dump(exclude_none=True), answer]).choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It rains.", None)
    assert f"Let me look. \n{CALL}<|im_end|>" in prompt_of(router), "arguments are an object for the template"
    assert "<tool_response>\nrain\n</tool_response>" in prompt_of(router)


def test_tools_stream_tells_name_first_then_arguments_in_pieces(router: RunningRouter, client: openai.OpenAI) -> None:
    speak(router, f"Well. {CALL}\n{CALL}")
    content, calls, reasons = "", {}, []
    for chunk in ask(client, stream=True):
        delta = chunk.choices[0].delta
        content += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            if call.index not in calls:
                assert call.id and call.type == "function"
                calls[call.index] = (call.id, call.function.name, [])
            calls[call.index][2].append(call.function.arguments)
    assert content == "Well. "
    assert reasons[-1] == "tool_calls" and set(reasons[:-1]) == {None}
    assert list(calls) == [0, 1] and calls[0][0] != calls[1][0]
    for _, name, pieces in calls.values():
        assert name == "get_weather" and json.loads("".join(pieces)) == {"city": "Paris"}
        assert len(pieces) > 2, "arguments are told while they are written"


def test_tools_one_call_alone_when_parallel_calls_are_off(router: RunningRouter, client: openai.OpenAI) -> None:
    speak(router, f"{CALL}\n{CALL}")
    message = ask(client, parallel_tool_calls=False).choices[0].message
    assert (message.content, len(message.tool_calls)) == (None, 1)


def test_tools_output_that_is_no_call_is_content_and_a_cut_one_too(router: RunningRouter, client: openai.OpenAI) -> None:
    for text in ("<tool_call>{oops}</tool_call>", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'):
        speak(router, text)
        choice = ask(client).choices[0]
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    speak(router, CALL)
    choice = ask(client, max_tokens=30).choices[0]
    assert choice.finish_reason == "length" and choice.message.tool_calls is None
    assert CALL.startswith(choice.message.content)


def test_tools_choice_none_shows_no_tools_and_parses_nothing(router: RunningRouter, client: openai.OpenAI) -> None:
    speak(router, CALL)
    message = ask(client, tool_choice="none").choices[0].message
    assert (message.content, message.tool_calls) == (CALL, None)
    assert "get_weather" not in prompt_of(router)


def test_tools_required_forces_an_array_of_calls(router: RunningRouter, client: openai.OpenAI, node: FakeNode) -> None:
    speak(router, '[{"name": "get_time", "parameters": {}}, {"name": "get_weather", "parameters": {"city": "Rome"}}]')
    choice = ask(client, tool_choice="required").choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["get_time", "get_weather"]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    grammar = node.received[-1].sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    schema = json.loads(grammar.text)
    assert [call["properties"]["name"] for call in schema["items"]["anyOf"]] == [
        {"enum": ["get_weather"]},
        {"enum": ["get_time"]},
    ]


def test_tools_named_function_forces_its_arguments(router: RunningRouter, client: openai.OpenAI, node: FakeNode) -> None:
    speak(router, '{"city": "Oslo"}')
    choice = ask(client, tool_choice={"type": "function", "function": {"name": "get_weather"}}).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Oslo"})
    assert choice.finish_reason == "stop", "as the OpenAI API has it for a call that the client chose"
    grammar = node.received[-1].sampling.grammar
    assert grammar is not None and json.loads(grammar.text)["required"] == ["city"]


def test_tools_choices_of_one_chat_are_parsed_apart(router: RunningRouter, client: openai.OpenAI) -> None:
    speak(router, CALL)
    choices = ask(client, n=2).choices
    ids = [choice.message.tool_calls[0].id for choice in choices]
    assert len(set(ids)) == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [{"type": "web", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [WEATHER] * 129}, "tools"),
        ({"tools": "all"}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "use_beam_search": True}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}], "tool_choice": "required"},
            "tools",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 9 + "]" * 9}}]}]}, None),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": '{"a":' * 40 + "1" + "}" * 40}}]}]},
            "messages[0].tool_calls",
        ),
    ],
)
def test_tools_bad_requests_are_refused_by_name(router: RunningRouter, body: dict[str, Any], param: str | None) -> None:
    speak(router, "x")
    answer = httpx.post(
        f"{router.url}/v1/chat/completions", json={"messages": [QUESTION], "tools": [WEATHER, TIME], **body}, timeout=10
    )
    assert answer.status_code == (200 if param is None else 400), answer.text
    if param is not None:
        error = answer.json()["error"]
        assert error["param"] == param and "allowed" in error["message"], error


def test_tools_without_a_place_in_the_template_are_refused(model_folder: Path) -> None:
    with RunningRouter(model_folder) as running:
        running.add_node("decode")
        body = {"messages": [QUESTION], "tools": [WEATHER], "max_tokens": 2}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=10)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert "template" in answer.json()["error"]["message"]
        unused = httpx.post(f"{running.url}/v1/chat/completions", json={**body, "tool_choice": "none"}, timeout=10)
        assert unused.status_code == 200


def test_tools_of_a_template_whose_calls_are_unknown_may_only_be_forced(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ tools | tojson }}{{ messages[0].content }}")
    with RunningRouter(model_folder, chat_template=str(tmp_path / "own.jinja")) as running:
        running.add_node("decode", script=[5, END])
        body = {"messages": [QUESTION], "tools": [TIME], "max_tokens": 20}
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=10)
        assert answer.status_code == 400 and "router.tool_call_parser" in answer.json()["error"]["message"]
        forced = httpx.post(f"{running.url}/v1/chat/completions", json={**body, "tool_choice": "required"}, timeout=10)
        assert forced.status_code == 200
