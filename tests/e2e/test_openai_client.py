"""The official client, unchanged, against a real cluster with the real model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.prompts import MODEL
from tests.support.cluster import MODEL_NAME, Cluster, ClusterSpec

MESSAGES = [
    {"role": "system", "content": "You answer briefly and always in plain English sentences."},
    {"role": "user", "content": "Name three colours of the rainbow, and say why 🌈 appear after rain."},
]
PROMPT = "The quick brown fox jumps over the lazy dog. The dog, who had been asleep in the warm sun, woke up and"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(ClusterSpec(model=MODEL, prefill=1, decode=1, dtype="float32", engine={"kv_pool_mib": 400})) as running:
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
