"""Draining: a node leaves while it has work, and every process of a loaded cluster is replaced without one failed request."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.prompts import token_prompts
from tests.support.serve_process import ROOT, ServeProcess

MAX_TOKENS = 24
PROMPTS = token_prompts()[8:14]


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    serve = ServeProcess(tmp_path_factory.mktemp("serve"), "--decode", "2")
    try:
        serve.wait_ready()
        yield serve
    finally:
        serve.close()


@pytest.fixture(scope="module")
def expected(serve: ServeProcess) -> list[list[int]]:
    return [_ask(serve, prompt) for prompt in PROMPTS]


def _ask(serve: ServeProcess, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    answer = serve.client.complete(prompt, max_tokens=max_tokens, ignore_eos=True, return_token_ids=True)
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


def _command(serve: ServeProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.cli", *arguments, "--url", f"http://127.0.0.1:{serve.port}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


@pytest.mark.timeout(400)
def test_rolling_restart_of_every_process_under_load_no_request_fails(serve: ServeProcess, expected: list[list[int]]) -> None:
    before = serve.child_pids()
    is_over = threading.Event()

    def ask_until_over(first: int) -> int:
        num_right = 0
        while not is_over.is_set():
            place = (first + num_right) % len(PROMPTS)
            assert _ask(serve, PROMPTS[place]) == expected[place]
            num_right += 1
        return num_right

    with ThreadPoolExecutor(3) as threads:
        clients = [threads.submit(ask_until_over, first) for first in range(3)]
        try:
            done = _command(serve, "restart", "--timeout-s", "120")
        finally:
            is_over.set()
        assert done.returncode == 0, f"{done.stderr}\n{serve.output}"
        assert all(client.result() > 0 for client in clients)
    after = serve.child_pids()
    assert set(after) == set(before) and not set(after.values()) & set(before.values())
    audit: dict[str, Any] = serve.client.audit()
    assert audit["is_clean"], audit


@pytest.mark.timeout(300)
def test_drained_node_finishes_its_requests_and_gets_no_new_ones(serve: ServeProcess) -> None:
    with ThreadPoolExecutor(2) as threads:
        long = [threads.submit(_ask, serve, prompt, 60) for prompt in PROMPTS[:2]]
        serve.wait_until(
            lambda: all(r["phase"] == "decode" for r in serve.client.requests()) and len(serve.client.requests()) == 2,
            "both requests decode",
        )
        name = next(r["node_id"] for r in serve.client.requests())
        done = _command(serve, "drain", name, "--timeout-s", "120")
        assert done.returncode == 0, done.stderr
        assert [len(request.result()) for request in long] == [60, 60]
    assert serve.client.metric("kvrelay_migrations_total") == 0  # it was given the time to finish
    assert f"node {name} is down: drained" in serve.output
    serve.wait_until(lambda: serve.client.node_status(name) == "up", "its successor is there")


def test_drain_unknown_node_is_one_line_that_lists_the_nodes(serve: ServeProcess) -> None:
    done = _command(serve, "drain", "decode-9")
    assert done.returncode == 2
    assert "decode-9" in done.stderr and "decode-0" in done.stderr and "Traceback" not in done.stderr
