"""The API as clients see it: the official client and plain HTTP against fake nodes on a real control socket."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.unit.router.fake_node import BLOCK_SIZE, CACHED_TOKENS_BY_ROLE, expected_tokens
from tests.unit.router.running_router import RunningRouter

LONG_PROMPT = "the quick brown fox jumps over the lazy dog, hello world"


def post(cluster: RunningRouter, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(f"{cluster.url}{path}", json=body, headers=headers, timeout=10)


def expected_text(cluster: RunningRouter, prompt_token_ids: list[int], num_tokens: int) -> str:
    tokens = expected_tokens(prompt_token_ids, num_tokens, cluster.model.vocab_size)
    return cluster.tokenizer.decode(tokens, skip_special_tokens=True)


def stream_events(cluster: RunningRouter, path: str, body: dict[str, object]) -> list[str]:
    with httpx.stream("POST", f"{cluster.url}{path}", json={**body, "stream": True}, timeout=10) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [line.removeprefix("data: ") for line in response.iter_lines() if line]


def openai_client(cluster: RunningRouter) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=10)


def test_completions_long_prompt_runs_on_both_nodes_and_counts_usage(cluster: RunningRouter) -> None:
    prompt = cluster.tokenizer.encode(LONG_PROMPT, add_special_tokens=True)
    assert len(prompt) > BLOCK_SIZE
    num_before = [len(node.received) for node in cluster.nodes]
    body = post(cluster, "/v1/completions", {"model": "tiny", "prompt": LONG_PROMPT, "max_tokens": 9}).json()
    assert body["choices"][0]["text"] == expected_text(cluster, prompt, 9)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 9,
        "total_tokens": len(prompt) + 9,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS_BY_ROLE["prefill"]},
    }
    assert [len(node.received) - before for node, before in zip(cluster.nodes, num_before, strict=True)] == [1, 1]
    handoff = cluster.nodes[1].received[-1]
    assert handoff.stage == "decode"
    assert handoff.output_token_ids == expected_tokens(prompt, 1, cluster.model.vocab_size)


def test_completions_short_prompt_stays_on_the_decode_node(cluster: RunningRouter) -> None:
    num_before = len(cluster.nodes[0].received)
    body = post(cluster, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 3, "return_token_ids": True}).json()
    assert body["choices"][0]["token_ids"] == expected_tokens([5, 6, 7], 3, cluster.model.vocab_size)
    assert body["choices"][0]["prompt_token_ids"] == [5, 6, 7]
    assert len(cluster.nodes[0].received) == num_before
    assert 'kvrelay_local_prefill_total{reason="short_prompt"}' in httpx.get(f"{cluster.url}/metrics").text


def test_completions_several_prompts_and_choices_are_ordered_and_seeded(cluster: RunningRouter) -> None:
    body = {"prompt": [[5, 6, 7], [9, 8]], "n": 2, "max_tokens": 2, "seed": 40, "return_token_ids": True}
    num_before = len(cluster.nodes[1].received)
    answer = post(cluster, "/v1/completions", body).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (5, 8)
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6, 7], [5, 6, 7], [9, 8], [9, 8]]
    assert sorted(message.sampling.seed or 0 for message in cluster.nodes[1].received[num_before:]) == [40, 40, 41, 41]


def test_completions_stream_equals_the_whole_answer_and_ends_with_usage(cluster: RunningRouter) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 20, "temperature": 0}
    whole = post(cluster, "/v1/completions", body).json()
    events = stream_events(cluster, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == whole["choices"][0]["text"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


def test_completions_continuous_usage_counts_up(cluster: RunningRouter) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream_events(
        cluster, "/v1/completions", {"prompt": [5, 6], "max_tokens": 4, "stream_options": options, "return_token_ids": True}
    )
    counts = [json.loads(event)["usage"]["completion_tokens"] for event in events[:-1]]
    assert counts == [1, 2, 3, 4, 4]


def test_completions_echo_with_logprobs_covers_prompt_and_output(cluster: RunningRouter) -> None:
    body = {"prompt": LONG_PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1}
    prompt = cluster.tokenizer.encode(LONG_PROMPT, add_special_tokens=True)
    choice = post(cluster, "/v1/completions", body).json()["choices"][0]
    assert choice["text"] == LONG_PROMPT + expected_text(cluster, prompt, 2)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == [None] + [-0.5] * (len(prompt) + 1)
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == len(prompt) + 2
    assert "".join(logprobs["tokens"][: len(prompt)]) == LONG_PROMPT
    offset = logprobs["text_offset"][3]
    assert LONG_PROMPT[offset:].startswith(logprobs["tokens"][3])
    decode = cluster.nodes[1].received[-1]
    assert decode.sampling.prompt_logprobs is None, "the decode node must not compute the prompt again"


def test_completions_echo_without_output_returns_the_prompt_alone(cluster: RunningRouter) -> None:
    body = post(cluster, "/v1/completions", {"prompt": LONG_PROMPT, "max_tokens": 0, "echo": True, "logprobs": 0}).json()
    assert body["choices"][0]["text"] == LONG_PROMPT
    assert body["usage"]["completion_tokens"] == 0
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["prompt_tokens"]


def test_completions_prompt_logprobs_are_keyed_by_token_id(cluster: RunningRouter) -> None:
    body = post(cluster, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 1, "prompt_logprobs": 2}).json()
    entries = body["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [set(entry) for entry in entries[1:]] == [{"6", "7"}, {"7", "8"}]


def test_completions_stop_string_cuts_text_and_ends_the_flow(cluster: RunningRouter) -> None:
    full = post(cluster, "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 60}).json()["choices"][0]["text"]
    stop = full[6:9]
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "stop": stop}
    response = post(cluster, "/v1/completions", body).json()
    choice = response["choices"][0]
    assert choice["text"] == full[: full.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert response["usage"]["completion_tokens"] < 60
    included = post(cluster, "/v1/completions", {**body, "include_stop_str_in_output": True}).json()["choices"][0]
    assert included["text"] == full[: full.index(stop)] + stop


def test_completions_token_that_ends_the_text_counts_but_is_not_shown(
    cluster: RunningRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.nodes[1], "stop_after", 5)
    tokens = expected_tokens([5, 6, 7], 5, cluster.model.vocab_size)
    body = {"prompt": [5, 6, 7], "max_tokens": 9, "stop_token_ids": [tokens[-1]]}
    answer = post(cluster, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == cluster.tokenizer.decode(tokens[:-1], skip_special_tokens=True)
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", tokens[-1])
    assert answer["usage"]["completion_tokens"] == 5
    shown = post(cluster, "/v1/completions", {**body, "include_stop_str_in_output": True}).json()["choices"][0]["text"]
    assert shown == cluster.tokenizer.decode(tokens, skip_special_tokens=True)


def test_chat_official_client_streams_and_answers_whole(cluster: RunningRouter) -> None:
    client = openai_client(cluster)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    whole = client.chat.completions.create(model="tiny", messages=messages, max_tokens=12)  # type: ignore[arg-type]
    text = cluster.tokenizer.encode(
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n",
        add_special_tokens=False,
    )
    assert whole.choices[0].message.content == expected_text(cluster, text, 12)
    assert whole.usage is not None and whole.usage.prompt_tokens == len(text)
    stream = client.chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == whole.usage


def test_chat_logprobs_have_bytes_and_alternatives(cluster: RunningRouter) -> None:
    client = openai_client(cluster)
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2, 2]
    content = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert content.decode(errors="replace") == answer.choices[0].message.content


def test_chat_default_length_is_the_rest_of_the_context(cluster: RunningRouter) -> None:
    body = post(cluster, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert body["usage"]["total_tokens"] == cluster.model.max_model_len


def test_official_client_unknown_model_raises_not_found(cluster: RunningRouter) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        openai_client(cluster).completions.create(model="other", prompt="hi")
    assert caught.value.body["param"] == "model"  # type: ignore[index]


def test_models_lists_name_and_context(cluster: RunningRouter) -> None:
    card = next(iter(openai_client(cluster).models.list()))
    assert card.id == "tiny"
    assert card.max_model_len == cluster.model.max_model_len  # type: ignore[attr-defined]
    assert openai_client(cluster).models.retrieve("tiny").id == "tiny"


def test_tokenize_and_detokenize_are_inverse(cluster: RunningRouter) -> None:
    tokenized = post(cluster, "/tokenize", {"model": "tiny", "prompt": LONG_PROMPT}).json()
    assert tokenized["count"] == len(tokenized["tokens"])
    assert tokenized["max_model_len"] == cluster.model.max_model_len
    assert post(cluster, "/detokenize", {"tokens": tokenized["tokens"]}).json() == {"prompt": LONG_PROMPT}
    chat = post(cluster, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]}).json()
    assert post(cluster, "/detokenize", {"tokens": chat["tokens"]}).json()["prompt"].endswith("<|im_start|>assistant\n")


def test_request_id_is_echoed_and_made_up_when_unfit(cluster: RunningRouter) -> None:
    response = post(cluster, "/v1/completions", {"prompt": [5], "max_tokens": 1}, **{"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    assert response.json()["id"] == "cmpl-abc-1"
    made_up = httpx.get(f"{cluster.url}/version", headers={"X-Request-Id": "x" * 500})
    assert 1 <= len(made_up.headers["x-request-id"]) <= 128
    assert made_up.headers["x-request-id"] != "x" * 500


def test_health_nodes_and_metrics_tell_about_both_nodes(cluster: RunningRouter) -> None:
    assert httpx.get(f"{cluster.url}/health").json() == {"status": "ok", "warnings": []}
    nodes = {node["node_id"]: node for node in httpx.get(f"{cluster.url}/nodes").json()["nodes"]}
    assert {name: node["role"] for name, node in nodes.items()} == {"prefill-0": "prefill", "decode-1": "decode"}
    assert all(node["status"] == "up" and node["heartbeat_age_s"] < 1 for node in nodes.values())
    text = httpx.get(f"{cluster.url}/metrics").text
    assert 'kvrelay_node_up{model_name="tiny",node_id="decode-1",role="decode"} 1.0' in text
    assert 'kvrelay_num_requests_running{model_name="tiny",node_id="decode-1",role="decode"} 0.0' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names)), "a family is exposed twice"


def test_audit_idle_cluster_is_clean(cluster: RunningRouter) -> None:
    response = httpx.get(f"{cluster.url}/audit")
    assert response.status_code == 200
    body = response.json()
    assert body["is_clean"] is True
    assert body["router"] == {"requests_in_flight": 0}
    assert body["nodes"]["decode-1"]["counts"] == {"requests": 0}


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nothing", 404), ("GET", "/v1/completions", 405), ("POST", "/health", 405)]
)
def test_unknown_route_answers_in_openai_shape(cluster: RunningRouter, method: str, path: str, status: int) -> None:
    response = httpx.request(method, f"{cluster.url}{path}")
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_body_of_another_type_is_415_and_too_large_is_413(cluster: RunningRouter) -> None:
    url = f"{cluster.url}/v1/completions"
    assert httpx.post(url, content=b"prompt=x", headers={"content-type": "text/plain"}).status_code == 415
    too_large = b" " * (cluster.options.max_body_bytes + 1)
    headers = {"content-type": "application/json"}
    assert httpx.post(url, content=too_large, headers=headers).status_code == 413
    chunks = (b" " * 2**20 for _ in range(cluster.options.max_body_bytes // 2**20 + 1))
    assert httpx.post(url, content=chunks, headers=headers).status_code == 413


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    cluster: RunningRouter, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = cluster.tokenizer
    text = "a" * (cluster.model.max_model_len * tokenizer.max_token_chars + 1)
    monkeypatch.setattr(tokenizer, "encode", lambda *_args, **_keywords: pytest.fail("it was tokenized"))
    body = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    answer = httpx.post(f"{cluster.url}{path}", json=body)
    assert answer.status_code == 400
    assert "characters" in answer.json()["error"]["message"]
