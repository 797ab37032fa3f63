"""The official client, unchanged, against a real cluster with the real model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.prompts import MODEL, token_prompts, tokenizer, transformers_beams, transformers_next_logprobs
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec
from tests.support.tool_templates import HERMES
from tests.unit.router.tiny_language import search_plainly

MESSAGES = [
    {"role": "system", "content": "You answer briefly and always in plain English sentences."},
    {"role": "user", "content": "Name three colours of the rainbow, and say why 🌈 appear after rain."},
]
PROMPT = "The quick brown fox jumps over the lazy dog. The dog, who had been asleep in the warm sun, woke up and"


EOS = 2  # <|im_end|>
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    template: Path = tmp_path_factory.mktemp("template") / "hermes.jinja"  # the model's own has no tools
    template.write_text(HERMES)
    spec = ClusterSpec(
        model=MODEL,
        prefill=1,
        decode=1,
        dtype="float32",
        engine={"kv_pool_mib": 400, "kv_load_policy": "always"},  # so that hits can be counted
        router={"chat_template": str(template)},
    )
    with Cluster(spec) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="unused", max_retries=0, timeout=120) as opened:
        yield opened


def test_chat_streamed_and_whole_are_the_same_text_and_count_cached_tokens(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, temperature=0, max_tokens=40)  # type: ignore[arg-type]
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=MESSAGES,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert text
    assert whole.usage is not None and chunks[-1].usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (
        chunks[-1].usage.prompt_tokens,
        chunks[-1].usage.completion_tokens,
    )
    cached = chunks[-1].usage.prompt_tokens_details
    assert cached is not None and cached.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16


def test_seeded_sampling_is_repeatable_also_in_company_and_seeds_differ(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return (
            client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=24, temperature=0.9, top_p=0.95, seed=seed)
            .choices[0]
            .text
        )

    alone = sample(1)
    with ThreadPoolExecutor(6) as threads:
        in_company = list(threads.map(sample, (1, 2, 3, 1, 4, 5)))
    assert in_company[0] == in_company[3] == alone
    assert len(set(in_company)) == 5


def test_n_choices_logprobs_and_echo_agree_with_each_other(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=8, temperature=0, n=2, logprobs=3, echo=True)
    first, second = answer.choices
    assert first.text == second.text and first.text.startswith(PROMPT)
    logprobs = first.logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == first.text
    assert logprobs.token_logprobs[0] is None, "the first prompt token follows nothing"
    assert all(value <= 0 and math.isfinite(value) for value in logprobs.token_logprobs[1:])
    assert logprobs.top_logprobs is not None
    best = [max(top.values()) for top in logprobs.top_logprobs[-8:]]
    assert logprobs.token_logprobs[-8:] == best, "greedy takes the most likely token"


def test_n_choices_compute_their_prompt_once_per_node(client: openai.OpenAI, cluster: Cluster) -> None:
    prompt = token_prompts()[-1][:200]

    def recomputed(role: str) -> float:
        return cluster.client.metric(name, source="recomputed", role=role)

    name = "kvrelay_prompt_tokens_by_source_total"
    before = {role: cluster.client.settled_metric(name, source="recomputed", role=role) for role in ("prefill", "decode")}
    answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=4, n=4, seed=3)
    assert len(answer.choices) == 4 and answer.usage is not None and answer.usage.prompt_tokens == 200
    # Siblings compute what no full block holds: at the prefill node the 8 tokens behind 192, at the decode node one more.
    cluster.wait_until(lambda: recomputed("decode") - before["decode"] == 4 * 9, "the decode node computed the rest four times")
    cluster.wait_until(lambda: recomputed("prefill") - before["prefill"] == 200 + 3 * 8, "the prefill node computed it once")


def test_best_of_is_the_likeliest_per_token_of_as_many_choices(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 8, "seed": 5, "temperature": 0.9}
    every = client.completions.create(**body, n=4, logprobs=0).choices

    def mean_logprob(choice: Any) -> float:
        return float(sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs))

    expected = [choice.text for choice in sorted(every, key=mean_logprob, reverse=True)[:2]]
    best = client.completions.create(**body, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == expected
    assert best.usage is not None and best.usage.completion_tokens == sum(len(choice.logprobs.token_logprobs) for choice in every)  # type: ignore[union-attr, arg-type]
    assert best.choices[0].logprobs is None


def search(client: openai.OpenAI, prompt: list[int], max_tokens: int, **extra: Any) -> tuple[list[list[int]], list[float]]:
    """Output tokens of a beam search of width 3, and their cumulative log-probabilities."""
    beams = {"use_beam_search": True, "return_token_ids": True, **extra}
    answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, n=3, logprobs=0, extra_body=beams)
    sums = [sum(choice.logprobs.token_logprobs) for choice in answer.choices]  # type: ignore[union-attr, arg-type, misc]
    return [(choice.model_extra or {})["token_ids"] for choice in answer.choices], sums


def test_beam_search_without_end_is_transformers_own(client: openai.OpenAI) -> None:
    prompt = token_prompts()[10][:24]
    expected = transformers_beams(prompt, width=3, max_tokens=6)
    tokens, sums = search(client, prompt, 6, ignore_eos=True)
    assert tokens == [token_ids for token_ids, _ in expected]
    assert sums == pytest.approx([cumulative for _, cumulative in expected], abs=1e-3)


def test_beam_search_that_may_end_is_a_plain_search_by_forward_passes(client: openai.OpenAI) -> None:
    text = "<|im_start|>user\nSay nothing but OK.<|im_end|>\n<|im_start|>assistant\nOK"
    prompt: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    expected = search_plainly(transformers_next_logprobs, prompt, width=3, max_tokens=4, length_penalty=0.5, eos_token_ids=[EOS])
    assert any(token_ids[-1] == EOS for token_ids, _ in expected), "a test of ends needs some"
    tokens, sums = search(client, prompt, 4, length_penalty=0.5, include_stop_str_in_output=True)
    assert tokens == [list(token_ids) for token_ids, _ in expected]
    assert sums == pytest.approx([cumulative for _, cumulative in expected], abs=1e-3)


def test_tools_forced_calls_of_a_small_model_are_valid_and_streamed(client: openai.OpenAI) -> None:
    question = {"role": "user", "content": "What is the weather in Rome in the next three days?"}
    body: dict[str, Any] = {"model": MODEL_NAME, "messages": [question], "tools": [WEATHER], "temperature": 0, "max_tokens": 80}
    required = client.chat.completions.create(**body, tool_choice="required", parallel_tool_calls=False).choices[0]
    (call,) = required.message.tool_calls or ()
    assert required.finish_reason == "tool_calls" and call.type == "function" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Rome") and 1 <= arguments["days"] <= 9
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = client.chat.completions.create(**body, tool_choice=named).choices[0].message.tool_calls
    streamed = ""
    for chunk in client.chat.completions.create(**body, tool_choice=named, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            streamed += piece.function.arguments
    assert whole is not None and streamed == whole[0].function.arguments
    assert set(json.loads(streamed)) == {"city", "days"}


def test_tools_in_a_chat_are_shown_and_a_conversation_with_calls_goes_on(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 3}'}}
    messages = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    body: dict[str, Any] = {"model": MODEL_NAME, "messages": messages, "temperature": 0, "max_tokens": 8}
    shown, hidden = (
        client.chat.completions.create(**body, tools=[WEATHER], tool_choice=choice).usage for choice in ("auto", "none")
    )
    assert shown is not None and hidden is not None and shown.prompt_tokens > hidden.prompt_tokens + 50


def test_stop_string_cuts_the_text_wherever_it_falls(client: openai.OpenAI, cluster: Cluster) -> None:
    whole = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=32, temperature=0).choices[0].text
    for start in range(4, 16, 3):
        stop = whole[start : start + 5]
        cut = client.completions.create(model=MODEL_NAME, prompt=PROMPT, max_tokens=32, temperature=0, stop=stop).choices[0]
        assert cut.text == whole[: whole.index(stop)]
        assert cut.finish_reason == "stop"
    cluster.wait_clean()


def test_client_that_leaves_mid_stream_frees_everything(client: openai.OpenAI, cluster: Cluster) -> None:
    stream = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=2000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    for count, _chunk in enumerate(stream):
        if count == 3:
            break
    stream.close()
    cluster.wait_clean()
    assert cluster.audit()["router"]["requests_in_flight"] == 0


@pytest.mark.parametrize(
    ("keywords", "word"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"prompt": "x " * 20_000}, "prompt"),
        ({"extra_body": {"min_p": 7}}, "min_p"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"stream": True, "extra_body": {"use_beam_search": True}}, "stream"),
    ],
)
def test_bad_parameter_is_a_400_that_names_it(client: openai.OpenAI, keywords: dict[str, object], word: str) -> None:
    request: dict[str, object] = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 4} | keywords
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**request)  # type: ignore[call-overload]
    assert word in caught.value.message


def test_unknown_model_is_a_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-17", prompt="x")
