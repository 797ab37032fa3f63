"""Structured output by the real model in real processes: every form is kept to, whole or streamed, jumped, sampled or moved."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from tests.e2e.prompts import MODEL
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec

PROMPT = "The following is a record of one person, with name, age, address and hobbies, in JSON as it was asked for:\n"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "status": {"enum": ["married", "single", None]},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 20},
                "postal_code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "postal_code"],
            "additionalProperties": False,
        },
        "hobbies": {"type": "array", "items": {"anyOf": [{"const": "chess"}, {"const": "rowing"}]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "age", "status", "address", "hobbies"],
    "additionalProperties": False,
}
ADULT = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 18, "maximum": 120}},
    "required": ["age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
COMPACT = {"json": SCHEMA, "disable_any_whitespace": True}
DATE = r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9] (à|é){2} 日本(🙂|🙃)"
SUM = 'start: NUMBER (" + " NUMBER){2}\nNUMBER: /[1-9][0-9]?/'
BODIES: dict[str, dict[str, Any]] = {
    "schema": {"response_format": FORMAT},
    "compact": {"structured_outputs": COMPACT},
    "sampled": {"structured_outputs": COMPACT, "temperature": 1.0, "top_p": 0.9, "seed": 3, "frequency_penalty": 0.5},
    "regex": {"structured_outputs": {"regex": DATE}},
    "choice": {"structured_outputs": {"choice": ["positive", "negative", "not sure at all"]}},
    "grammar": {"guided_grammar": SUM},
    "object": {"response_format": {"type": "json_object"}, "max_tokens": 40},
    "biased": {"guided_choice": ["red", "blue"], "logit_bias": {"1000": 100.0}, "min_tokens": 30, "ignore_eos": True},
    "free": {"max_tokens": 24},
    "logprobs": {"structured_outputs": COMPACT, "logprobs": 3},
}


def ask(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """All bodies at once: requests with and without a grammar share their steps."""
    bodies = [{"prompt": PROMPT, "max_tokens": 200, "return_token_ids": True, **body} for body in BODIES.values()]
    answers = cluster.client.complete_many(bodies)
    return dict(zip(BODIES, [answer["choices"][0] for answer in answers], strict=True))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    engine = {"kv_pool_mib": 400, "num_threads": 1}
    with Cluster(ClusterSpec(model=MODEL, prefill=1, decode=2, dtype="float32", engine=engine)) as running:
        yield running


@pytest.fixture(scope="module")
def answers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return ask(cluster)


def test_structured_outputs_every_form_is_kept_to(answers: dict[str, dict[str, Any]]) -> None:
    texts = {name: choice["text"] for name, choice in answers.items()}
    for name in ("schema", "compact", "sampled", "logprobs"):
        jsonschema.validate(json.loads(texts[name]), SCHEMA)
    assert texts["compact"] == json.dumps(json.loads(texts["compact"]), ensure_ascii=False)
    assert re.fullmatch(DATE, texts["regex"])
    assert texts["choice"] in ("positive", "negative", "not sure at all") and texts["biased"] in ("red", "blue")
    assert re.fullmatch(r"[1-9][0-9]?( \+ [1-9][0-9]?){2}", texts["grammar"])
    assert texts["object"].lstrip().startswith("{")
    ended = {name: choice["finish_reason"] for name, choice in answers.items() if name not in ("object", "free")}
    assert set(ended.values()) == {"stop"}, ended


def test_structured_outputs_logprobs_are_of_what_the_grammar_allows(answers: dict[str, dict[str, Any]]) -> None:
    logprobs = answers["logprobs"]["logprobs"]
    token_logprobs, top_logprobs = logprobs["token_logprobs"], logprobs["top_logprobs"]
    assert len(token_logprobs) == len(answers["logprobs"]["token_ids"]) == len(top_logprobs)
    assert answers["logprobs"]["token_ids"] == answers["compact"]["token_ids"]
    certain = [len(tops) == 1 for tops in top_logprobs]
    assert any(certain) and not all(certain)
    assert all((value == 0.0) == is_certain for value, is_certain in zip(token_logprobs, certain, strict=True))


def test_structured_outputs_streamed_is_the_same_as_whole(cluster: Cluster, answers: dict[str, dict[str, Any]]) -> None:
    for name in ("compact", "regex"):
        chunks = list(cluster.client.stream(PROMPT, max_tokens=200, return_token_ids=True, **BODIES[name]))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == answers[name]["text"]
        assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == answers[name]["token_ids"]
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_structured_outputs_chat_follows_the_schema(cluster: Cluster) -> None:
    body = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "Describe a person."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": ADULT}},
        "max_tokens": 60,
        "temperature": 0,
        "n": 2,
    }
    response = cluster.client.http.post("/v1/chat/completions", json=body).json()
    assert len(response["choices"]) == 2
    for choice in response["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), ADULT)


def test_structured_outputs_wrong_grammar_is_400_and_reaches_no_node(cluster: Cluster) -> None:
    before = cluster.client.settled_metric("kvrelay_request_finished_total")
    for body, field in (
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
            "response_format.",
        ),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
    ):
        response = cluster.client.http.post("/v1/completions", json={"prompt": PROMPT, **body})
        assert response.status_code == 400 and response.json()["error"]["param"].startswith(field), response.text
    assert cluster.client.settled_metric("kvrelay_request_finished_total") == before


@pytest.mark.timeout(300)
def test_structured_outputs_without_jumps_and_with_drafts_are_the_same_tokens(
    cluster: Cluster, answers: dict[str, dict[str, Any]]
) -> None:
    """One node that samples every token and verifies drafts, against two roles that hand over and jump."""
    engine = {"kv_pool_mib": 400, "num_threads": 1, "jump_decoding": False, "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    engine["speculative_disable_by_batch_size"] = 100
    with Cluster(ClusterSpec(model=MODEL, prefill=0, decode=1, dtype="float32", engine=engine)) as stepping:
        others = ask(stepping)
        stepping.wait_until(
            lambda: stepping.client.metric("kvrelay_spec_decode_num_draft_tokens_total") > 0, "drafts were verified"
        )
        assert stepping.client.metric("kvrelay_forced_tokens_total") == 0
    assert {name: choice["token_ids"] for name, choice in others.items()} == {
        name: choice["token_ids"] for name, choice in answers.items()
    }
    cluster.wait_until(lambda: cluster.client.metric("kvrelay_forced_tokens_total") > 0, "tokens were forced")


@pytest.mark.timeout(300)
def test_structured_outputs_request_of_a_killed_node_goes_on_in_its_grammar(cluster: Cluster) -> None:
    body = {"structured_outputs": {"regex": "([a-z]{3,9} ){15}END"}, "max_tokens": 120, "return_token_ids": True}
    whole = cluster.client.complete(PROMPT, **body)["choices"][0]
    assert re.fullmatch("([a-z]{3,9} ){15}END", whole["text"])
    chunks: list[dict[str, Any]] = []
    for chunk in cluster.client.stream(PROMPT, **body):
        chunks.append(chunk)
        if len(chunks) == 8:
            cluster.kill(next(request["node_id"] for request in cluster.client.requests()))
    assert [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]] == whole["token_ids"]
    with pytest.raises(httpx.HTTPStatusError):
        cluster.client.complete(PROMPT, structured_outputs={"regex": "["})
