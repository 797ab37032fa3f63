"""An open-loop load generator for OpenAI-style completions: requests leave when they are due, whatever the server does.

Prompts and arrival times follow from the seed alone. What is measured is a list of RequestRecord; serving.py makes the report.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from core.config import router_api_key

# Words that every tokenizer knows: their token ids are valid, ordinary, and never special.
VOCABULARY_TEXT = (
    "the river carried small boats past green fields while people talked about music science bread winter roads and light "
    "every morning a teacher would open seven windows then read long stories from old books to quiet children near water "
    "some numbers grow fast others slowly but each machine must count hours days errors names letters colors stones and trees"
)
CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What to send. rate: requests per second, math.inf: all at once. num_shared_prefix_tokens: equal at the head of all prompts.

    concurrency_limit 0: none (a limit makes the loop half closed: a request may wait for its turn in the generator).
    """

    url: str
    model: str
    num_requests: int
    rate: float
    num_input_tokens: int
    num_output_tokens: int
    num_shared_prefix_tokens: int = 0
    concurrency_limit: int = 0
    seed: int = 0
    is_streaming: bool = True
    request_timeout_s: float = 600.0


@dataclass(slots=True)
class RequestRecord:
    """What one request saw; times are seconds on one monotonic clock. error: "" or a short word by which errors are counted.

    chunk_times_s: arrival of each chunk that brought text. lateness_s: how much later than due the generator came to it, which is
    its own fault and not the server's.
    """

    lateness_s: float = 0.0
    sent_at_s: float = 0.0
    ended_at_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""


def arrival_times_s(load: Load) -> list[float]:
    """When each request is due, in seconds from the start: a Poisson process, or all at 0."""
    if math.isinf(load.rate):
        return [0.0] * load.num_requests
    source, now_s, times_s = random.Random(f"arrivals/{load.seed}"), 0.0, []
    for _ in range(load.num_requests):
        times_s.append(now_s)
        now_s += source.expovariate(load.rate)
    return times_s


def make_prompt(load: Load, index: int, vocabulary: Sequence[int]) -> list[int]:
    """Token ids of request `index`: the shared prefix, then ids of its own, num_input_tokens in all."""
    shared = random.Random(f"shared/{load.seed}").choices(vocabulary, k=load.num_shared_prefix_tokens)
    own = random.Random(f"prompt/{load.seed}/{index}").choices(
        vocabulary, k=load.num_input_tokens - load.num_shared_prefix_tokens
    )
    return shared + own


async def fetch_vocabulary(client: httpx.AsyncClient, model: str) -> list[int]:
    """Token ids that the server's model surely has, by its own /tokenize."""
    response = await client.post("/tokenize", json={"model": model, "prompt": VOCABULARY_TEXT, "add_special_tokens": False})
    response.raise_for_status()
    return sorted(set(response.json()["tokens"]))


async def fetch_model_name(client: httpx.AsyncClient) -> str:
    """The first model that the server lists."""
    response = await client.get("/v1/models")
    response.raise_for_status()
    return str(response.json()["data"][0]["id"])


async def run_load(
    client: httpx.AsyncClient, load: Load, vocabulary: Sequence[int], on_done: Callable[[RequestRecord], None]
) -> tuple[list[RequestRecord], float]:
    """Send the load. Returns a record per request, in order, and the seconds from the first due time to the last end."""
    bodies = [_encode_body(load, make_prompt(load, index, vocabulary)) for index in range(load.num_requests)]
    turns = asyncio.Semaphore(load.concurrency_limit or load.num_requests)
    began_s = time.perf_counter()

    async def send_when_due(due_s: float, body: bytes) -> RequestRecord:
        await asyncio.sleep(began_s + due_s - time.perf_counter())
        record = RequestRecord(lateness_s=time.perf_counter() - began_s - due_s)
        async with turns:
            await _send(client, load, body, record)
        on_done(record)
        return record

    records = await asyncio.gather(*map(send_when_due, arrival_times_s(load), bodies))
    return list(records), time.perf_counter() - began_s


def make_client(url: str, request_timeout_s: float) -> httpx.AsyncClient:
    """A client without limits of its own: the server is what is measured. It sends KVRELAY_API_KEY, if there is one."""
    api_key = router_api_key()
    return httpx.AsyncClient(
        headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        base_url=url.rstrip("/"),
        timeout=httpx.Timeout(request_timeout_s, connect=CONNECT_TIMEOUT_S),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,
    )


def _encode_body(load: Load, prompt: list[int]) -> bytes:
    # Encoded before the clock starts: json of long prompts would make the generator late.
    body: dict[str, Any] = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": load.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": load.is_streaming,
    }
    if load.is_streaming:
        body["stream_options"] = {"include_usage": True}
    return json.dumps(body).encode()


async def _send(client: httpx.AsyncClient, load: Load, body: bytes, record: RequestRecord) -> None:
    record.sent_at_s = time.perf_counter()
    try:
        async with client.stream(
            "POST", "/v1/completions", content=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status_code != 200:
                await response.aread()
                record.error = f"http_{response.status_code}"
            elif load.is_streaming:
                await _read_events(response, record)
            else:
                _read_usage(json.loads(await response.aread()).get("usage"), record)
    except httpx.TimeoutException:
        record.error = "timeout"
    except (httpx.HTTPError, OSError) as error:
        record.error = type(error).__name__
    except (ValueError, KeyError, TypeError, AttributeError):
        record.error = "malformed_answer"
    record.ended_at_s = time.perf_counter()
    if not record.error and not record.num_output_tokens:
        record.error = "no_tokens"


async def _read_events(response: httpx.Response, record: RequestRecord) -> None:
    is_done = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        payload = line[5:].strip()
        if payload == "[DONE]":
            is_done = True
            continue
        event = json.loads(payload)
        if "error" in event:
            record.error = f"stream_{event['error'].get('type') or 'error'}"
            return
        if any(choice.get("text") for choice in event.get("choices", ())):
            record.chunk_times_s.append(time.perf_counter())
        _read_usage(event.get("usage"), record)
    if not is_done:
        record.error = "stream_cut"


def _read_usage(usage: dict[str, Any] | None, record: RequestRecord) -> None:
    if usage:
        record.num_prompt_tokens = usage["prompt_tokens"]
        record.num_output_tokens = usage["completion_tokens"]
        record.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
