"""Requests to a running router that check what every answer must be: honest, in OpenAI's shape, and in time."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

import httpx

from tests.unit.router.fake_node import expected_tokens
from tests.unit.router.running_router import RunningRouter

HANG_S = 20.0
PROMPT = list(range(10, 24))


def post_checked(client: httpx.Client, path: str, body: bytes, headers: dict[str, str] | None = None) -> httpx.Response:
    """Send bytes as a body; the answer, whose shape is checked."""
    answer = client.post(path, content=body, headers={"content-type": "application/json", **(headers or {})}, timeout=HANG_S)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        for event in events:
            if event != "[DONE]":
                parsed = json.loads(event, parse_constant=_no_constant)
                if "error" in parsed:
                    check_error(parsed, parsed["error"]["code"])
        return answer
    parsed = json.loads(answer.content, parse_constant=_no_constant)
    if answer.status_code != 200:
        check_error(parsed, answer.status_code)
    return answer


def check_error(body: dict[str, Any], status: int) -> None:
    """OpenAI's shape, a status that fits, and no bug behind it."""
    error = body["error"]
    assert isinstance(error["message"], str) and len(error["message"]) < 2000
    assert error["type"] not in ("internal", "internal_error"), error
    assert error["code"] == status
    assert 400 <= status < 500 or status in (503, 504), error


def check_honest(router: RunningRouter) -> None:
    """An ordinary request gets its tokens."""
    body = {"prompt": PROMPT, "max_tokens": 6, "return_token_ids": True}
    answer = httpx.post(f"{router.url}/v1/completions", json=body, timeout=HANG_S)
    assert answer.json()["choices"][0]["token_ids"] == expected_tokens(PROMPT, 6, router.model.vocab_size)


def send_raw(router: RunningRouter, data: bytes, *, half_close: bool = True) -> bytes:
    """What the router answers to these bytes of a connection, until it closes it."""
    host, port = router.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG_S) as connection:
        answer = b""
        try:
            connection.sendall(data)
            if half_close:
                with contextlib.suppress(OSError):  # it is closed already
                    connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                answer += chunk
        except (BrokenPipeError, ConnectionResetError):
            pass  # it did not want to read all of this
        return answer


def check_raw_answer(answer: bytes) -> None:
    """Nothing, or an HTTP answer whose errors are JSON."""
    if answer:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 "), answer[:200]
        status = int(head.split()[1])
        if status >= 400 and b"transfer-encoding" not in head.lower() and body[:4] != b"head" and body:
            check_error(json.JSONDecoder().raw_decode(body.decode())[0], status)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
