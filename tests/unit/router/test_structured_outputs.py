"""What each form of asking for structure becomes, and what the router answers to grammars that do not compile."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.errors import InvalidInputError, OverloadedError
from core.sampling_params import GrammarSource
from router.grammar_check import GrammarCheck
from router.openai_protocol import CompletionRequest, decode_body
from router.structured_outputs import NO_WHITESPACE, RequestedGrammar, json_schema_grammar, requested_grammar
from router.tokenizer import Tokenizer
from tests.unit.router.running_router import RunningRouter

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b", "a"]}


def asked(**fields: Any) -> RequestedGrammar | None:
    return requested_grammar(decode_body(json.dumps({"prompt": "x", **fields}).encode(), CompletionRequest))


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "json_schema",
            SCHEMA | {"x-guidance": NO_WHITESPACE},
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": True}, "json_schema", True),
        ({"structured_outputs": {"choice": ["a", 'é"\n']}}, "choice", ["a", 'é"\n']),
        ({"guided_choice": ["a"]}, "choice", ["a"]),
    ],
)
def test_requested_grammar_of_json_keeps_values_and_the_order_of_properties(
    fields: dict[str, Any], kind: str, value: object
) -> None:
    grammar = asked(**fields)
    assert grammar is not None and grammar.source.kind == kind
    assert json.dumps(json.loads(grammar.source.text)) == json.dumps(value)


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"structured_outputs": {"regex": "a+"}}, GrammarSource("regex", "a+")),
        ({"guided_regex": "a+"}, GrammarSource("regex", "a+")),
        ({"structured_outputs": {"grammar": "start: A"}}, GrammarSource("grammar", "start: A")),
        ({"guided_grammar": "start: A"}, GrammarSource("grammar", "start: A")),
    ],
)
def test_requested_grammar_of_text_is_the_text(fields: dict[str, Any], source: GrammarSource) -> None:
    grammar = asked(**fields)
    assert grammar is not None and grammar.source == source


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"guided_json": None, "structured_outputs": None}])
def test_requested_grammar_of_nothing_is_none(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
        ({"guided_choice": ["x"], "guided_regex": "a+"}, "guided_choice"),
    ],
)
def test_requested_grammar_of_two_is_refused_with_field_value_and_the_other(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError, match="one grammar at most") as caught:
        asked(**fields)
    assert caught.value.field == field and caught.value.value in ("a+", '["x"]')


def test_json_schema_grammar_takes_values_as_tools_have_them() -> None:
    assert json.loads(json_schema_grammar("tools", SCHEMA, any_whitespace=False).source.text)["x-guidance"] == NO_WHITESPACE
    with pytest.raises(InvalidInputError, match="tools"):
        json_schema_grammar("tools", "not a schema")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"], "pattern": "x"}}, "structured_outputs"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_grammar": "root ::= (" + "(" * 3000}, "guided_grammar"),
        ({"guided_json": {"type": "nonsense"}}, "guided_json"),
        ({"guided_json": {"pattern": "a?" * 4096}}, "guided_json"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}}}},
            "response_format.json_schema.schema",
        ),
    ],
)
def test_completions_grammar_that_does_not_compile_is_400_before_any_dispatch(
    cluster: RunningRouter, body: dict[str, Any], field: str
) -> None:
    num_before = sum(len(node.received) for node in cluster.nodes)
    for _ in range(2):  # the second time from memory
        response = httpx.post(f"{cluster.url}/v1/completions", json={"prompt": "hello", **body}, timeout=60)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field), response.text
    assert sum(len(node.received) for node in cluster.nodes) == num_before


def test_completions_grammar_reaches_the_node_as_it_was_asked(cluster: RunningRouter) -> None:
    body = {"prompt": "hello", "max_tokens": 4, "structured_outputs": {"regex": "[a-z]+ nine"}}
    assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60).status_code == 200
    sent = [generate.sampling.grammar for node in cluster.nodes for generate in node.received]
    assert GrammarSource("regex", "[a-z]+ nine") in sent


def test_grammar_check_lets_the_loop_go_on_and_bounds_who_waits(model_folder: Path) -> None:
    hard = "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(30)) + '\nA30: "x"'

    async def run() -> tuple[int, int]:
        check = GrammarCheck(Tokenizer(model_folder))
        await check.check(RequestedGrammar("known", GrammarSource("regex", "a")))
        grammars = [RequestedGrammar(f"f{i}", GrammarSource("grammar", f"{hard}\n// {i}")) for i in range(66)]
        checks = [asyncio.create_task(check.check(grammar)) for grammar in grammars]
        await asyncio.sleep(0)
        started_s = time.monotonic()
        await check.check(RequestedGrammar("known", GrammarSource("regex", "a")))  # waits for nobody
        assert not any(task.done() for task in checks[:64]) or time.monotonic() - started_s < 1.0
        refused = [task for task in checks if task.done()]
        num_overloaded = sum(isinstance(task.exception(), OverloadedError) for task in refused)
        for task in checks[1:]:
            task.cancel()
        with pytest.raises(InvalidInputError, match="f0"):
            await checks[0]
        return num_overloaded, len(refused)

    assert asyncio.run(run()) == (2, 2)
