"""The load generator against a small server of known timing: what it reports must be what that server did."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from bench.load_generator import Load, arrival_times_s, make_prompt
from bench.serving import main, summarize

FIRST_TOKEN_S = 0.12
TOKEN_S = 0.03


class FakeServer:
    """Answers token by token after fixed waits; every `fail_every`th gets status 503, every `cut_every`th a cut stream."""

    def __init__(self, fail_every: int = 0, cut_every: int = 0) -> None:
        self.prompts: list[list[int]] = []
        self._fail_every, self._cut_every = fail_every, cut_every

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        assert scope["type"] == "http"
        body = b""
        while (message := await receive()).get("more_body") or message.get("body"):
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        match scope["path"]:
            case "/v1/models":
                await self._send_json(send, {"data": [{"id": "fake"}]})
            case "/tokenize":
                await self._send_json(send, {"tokens": [5, 3, 9, 5]})
            case "/v1/completions":
                await self._complete(json.loads(body), send)

    async def _complete(self, request: dict[str, Any], send: Any) -> None:
        self.prompts.append(request["prompt"])
        number = len(self.prompts)
        if self._fail_every and number % self._fail_every == 0:
            await self._send_json(send, {"error": {"type": "overloaded"}}, status=503)
            return
        await asyncio.sleep(FIRST_TOKEN_S)
        usage = {
            "prompt_tokens": len(request["prompt"]),
            "completion_tokens": request["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": len(request["prompt"]) // 4},
        }
        if not request["stream"]:
            await asyncio.sleep(TOKEN_S * (request["max_tokens"] - 1))
            await self._send_json(send, {"choices": [{"text": "x"}], "usage": usage})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for index in range(request["max_tokens"]):
            await self._event(send, {"choices": [{"text": f" {index}"}], "usage": None})
            await asyncio.sleep(TOKEN_S)
        if not (self._cut_every and number % self._cut_every == 0):
            await self._event(send, {"choices": [], "usage": usage})
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _event(self, send: Any, event: dict[str, Any]) -> None:
        payload = f"data: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": payload, "more_body": True})

    async def _send_json(self, send: Any, body: dict[str, Any], status: int = 200) -> None:
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})


@contextmanager
def serving(app: FakeServer) -> Iterator[str]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", log_level="warning")  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        deadline_s = time.monotonic() + 10.0
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10.0)


def run_bench(capsys: pytest.CaptureFixture[str], url: str, *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["--url", url, "--requests", "8", "--input-tokens", "16", "--output-tokens", "6", "--json", *flags])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def make_load(**changes: Any) -> Load:
    values: dict[str, Any] = {"url": "", "model": "m", "num_requests": 400, "rate": 10.0, "num_input_tokens": 32}
    return Load(**{**values, "num_output_tokens": 8, "num_shared_prefix_tokens": 20, **changes})


def test_serving_bench_streaming_reports_the_servers_timing(capsys: pytest.CaptureFixture[str]) -> None:
    app = FakeServer()
    with serving(app) as url:
        code, result = run_bench(capsys, url)
    assert code == 0
    assert (result["num_answered"], result["num_errors"], result["num_output_tokens"]) == (8, 0, 48)
    assert result["cached_share"] == 0.25
    # Ratios: a slow machine adds to all of them alike. First token, one gap, and the whole relate as the server's waits do.
    expected = FIRST_TOKEN_S / TOKEN_S
    assert expected / 2 < result["ttft_ms_p50"] / result["inter_token_ms_p50"] < expected * 2
    assert 0.6 < result["e2e_ms_p50"] / (result["ttft_ms_p50"] + 6 * result["inter_token_ms_p50"]) < 1.6
    assert result["ttft_ms_p50"] <= result["ttft_ms_p90"] <= result["ttft_ms_p99"] <= result["ttft_ms_max"]
    assert set(app.prompts[0]) <= {3, 5, 9}  # only ids that the server's tokenizer gave


def test_serving_bench_without_streaming_reports_whole_answers_only(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as url:
        code, result = run_bench(capsys, url, "--no-stream")
    assert code == 0
    assert result["ttft_ms_p50"] is None
    assert result["e2e_ms_p50"] > 0
    assert result["num_output_tokens"] == 48


def test_serving_bench_failures_are_counted_by_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer(fail_every=4, cut_every=3)) as url:
        code, result = run_bench(capsys, url)
    assert code == 1
    assert result["errors"] == {"http_503": 2, "stream_cut": 2}
    assert result["num_answered"] == 4


def test_serving_bench_concurrency_limit_stretches_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeServer()) as url:
        _, free = run_bench(capsys, url)
        _, limited = run_bench(capsys, url, "--concurrency-limit", "2")
    assert limited["duration_s"] > 2 * free["duration_s"]  # four rounds instead of one


def test_serving_bench_nobody_there_exits_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9", "--requests", "1"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_load_arrivals_have_the_rate_and_follow_from_the_seed() -> None:
    times_s = arrival_times_s(make_load())
    assert times_s == arrival_times_s(make_load())
    assert times_s != arrival_times_s(make_load(seed=1))
    assert times_s == sorted(times_s)
    assert 8.0 < 399 / times_s[-1] < 12.5
    assert set(arrival_times_s(make_load(rate=math.inf))) == {0.0}


def test_load_prompts_share_exactly_the_prefix_and_follow_from_the_seed() -> None:
    vocabulary = list(range(100, 1100))
    first, second = (make_prompt(make_load(), index, vocabulary) for index in (0, 1))
    assert len(first) == len(second) == 32
    assert first[:20] == second[:20]
    assert first[20:] != second[20:]
    assert first == make_prompt(make_load(), 0, vocabulary)
    assert first != make_prompt(make_load(seed=1), 0, vocabulary)


def test_load_summary_without_answers_has_no_numbers() -> None:
    result = summarize(make_load(), [], duration_s=1.0)
    assert result["num_requests"] == 0
    assert result["cached_share"] is None
    assert result["e2e_ms_p99"] is None
