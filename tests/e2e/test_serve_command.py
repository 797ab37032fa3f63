"""`kvrelay serve` as a user runs it: ready, answering, healing, and leaving nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import HOST
from tests.support.serve_process import DEADLINE_S, ServeProcess


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServeProcess]:
    serve = ServeProcess(tmp_path)
    yield serve
    serve.close()


def test_serve_heals_a_killed_node_and_leaves_nothing_after_ctrl_c(serve: ServeProcess) -> None:
    serve.wait_ready()
    answer = serve.client.complete("one two three " * 20, max_tokens=4)
    assert answer["usage"]["completion_tokens"] == 4
    assert f"http://{HOST}:{serve.port}/v1/chat/completions" in serve.output
    assert "from openai import OpenAI" in serve.output

    victim = serve.child_pids()["decode-0"]
    os.kill(victim, signal.SIGKILL)
    serve.wait_until(lambda: serve.child_pids().get("decode-0", victim) != victim, "the node is started again")
    serve.wait_until(lambda: "decode-0 ended by SIGKILL" in serve.output, "its end is told")
    serve.wait_until(lambda: serve.client.node_status("decode-0") == "up", "the node is registered again")
    assert serve.client.complete("one two three " * 20, max_tokens=4)["choices"][0]["text"] == answer["choices"][0]["text"]

    serve.process.send_signal(signal.SIGINT)
    assert serve.process.wait(30.0) == 0, serve.output
    assert serve.leftovers() == []
    assert list(serve.temporary_files.iterdir()) == []
    assert "has not ended by itself" not in serve.output


def test_serve_killed_leaves_no_process_and_no_shared_memory(serve: ServeProcess) -> None:
    serve.wait_ready()
    assert set(serve.child_pids()) == {"router", "prefill-0", "decode-0"}
    serve.process.kill()
    serve.process.wait(10.0)
    serve.wait_until(lambda: not serve.child_pids(), "all children have ended")
    assert serve.leftovers() == []


def test_serve_child_that_cannot_start_shows_why_and_ends_all(tmp_path: Path) -> None:
    serve = ServeProcess(tmp_path, "--num-blocks", "1")
    try:
        assert serve.process.wait(DEADLINE_S) == 1, serve.output
        assert "while starting; its last lines" in serve.output
        assert serve.leftovers() == []
        assert list(serve.temporary_files.iterdir()) == []
    finally:
        serve.close()
