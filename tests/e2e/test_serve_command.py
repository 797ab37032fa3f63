"""`kvrelay serve` as a user runs it: ready, answering, healing, and leaving nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deploy.topology import check_port_free, find_free_ports
from tests.support.cluster import HOST, MODEL_NAME
from tests.support.cluster_client import ClusterClient

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


class Serve:
    """A running `kvrelay serve`, its output in a file and its temporary files in a folder of the test."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.control_port = find_free_ports(HOST, 2)
        self.temporary_files = folder / "tmp"
        self.temporary_files.mkdir()
        self._output = folder / "output"
        ports = ("--port", str(self.port), "--control-port", str(self.control_port))
        sizes = (
            "--engine.kv_pool_mib",
            "64",
            "--max-model-len",
            "1024",
            "--connector-option",
            "capacity_bytes=64MiB",
            "--served-model-name",
            MODEL_NAME,
        )
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "serve", *ports, *sizes, *flags],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.temporary_files)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = ClusterClient(f"http://{HOST}:{self.port}", MODEL_NAME, timeout_s=60.0)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited until {what}:\n{self.output}"
            time.sleep(0.1)

    def wait_ready(self) -> None:
        self.wait_until(lambda: "Ctrl-C ends everything" in self.output or self.process.poll() is not None, "it is ready")
        assert self.process.poll() is None, self.output

    def child_pids(self) -> dict[str, int]:
        """Node name to process id, of this cluster only."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(self.temporary_files) in "".join(arguments) and int(entry.name) != os.getpid():
                    name = arguments[arguments.index("--node-id") + 1] if "--node-id" in arguments else "router"
                    found[name] = int(entry.name)
        return found

    def leftovers(self) -> list[str]:
        left = [f"process {name} {pid}" for name, pid in self.child_pids().items()]
        left += [str(path) for path in Path("/dev/shm").rglob(f"serve-{self.port}-*")]
        for port in (self.port, self.control_port):
            check_port_free("port", HOST, port)
        return left

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30.0)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    serve = Serve(tmp_path)
    yield serve
    serve.close()


def test_serve_heals_a_killed_node_and_leaves_nothing_after_ctrl_c(serve: Serve) -> None:
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


def test_serve_killed_leaves_no_process_and_no_shared_memory(serve: Serve) -> None:
    serve.wait_ready()
    assert set(serve.child_pids()) == {"router", "prefill-0", "decode-0"}
    serve.process.kill()
    serve.process.wait(10.0)
    serve.wait_until(lambda: not serve.child_pids(), "all children have ended")
    assert serve.leftovers() == []


def test_serve_child_that_cannot_start_shows_why_and_ends_all(tmp_path: Path) -> None:
    serve = Serve(tmp_path, "--num-blocks", "1")
    try:
        assert serve.process.wait(DEADLINE_S) == 1, serve.output
        assert "while starting; its last lines" in serve.output
        assert serve.leftovers() == []
        assert list(serve.temporary_files.iterdir()) == []
    finally:
        serve.close()
