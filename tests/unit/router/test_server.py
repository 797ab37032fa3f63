"""The router as a process: what it loads, what it prints, how it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.api_key_file import add_api_key

ROOT = Path(__file__).parents[3]


def free_port() -> int:
    """A port that is free, as the one after it."""
    for _ in range(50):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise AssertionError("no two free ports in a row")


@pytest.fixture(scope="module")
def servable_folder(model_folder: Path) -> Path:
    """The tiny model with the weights that a folder must have; the router never reads them."""
    (model_folder / "model.safetensors").write_bytes(b"")
    return model_folder


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes: list[subprocess.Popen[str]], *flags: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "router", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
    )
    processes.append(process)
    return process


def test_router_import_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, router.server; print(sorted({'torch', 'transformers', 'ray', 'redis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_router_process_serves_and_ends_with_code_zero(
    processes: list[subprocess.Popen[str]], servable_folder: Path, number: int
) -> None:
    port = free_port()
    process = start(processes, "--model", str(servable_folder), "--served-model-name", "tiny", "--port", str(port))
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert f"http://127.0.0.1:{port}" in line and f"127.0.0.1:{port + 1}" in line, line or process.stderr.read()
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
    assert httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"][0]["id"] == "tiny"
    began_s = time.monotonic()
    process.send_signal(number)
    assert process.wait(10) == 0
    assert time.monotonic() - began_s < 8
    assert "Traceback" not in process.stderr.read()


def test_router_process_port_in_use_says_so_in_one_line(processes: list[subprocess.Popen[str]], servable_folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = start(processes, "--model", str(servable_folder), "--port", str(taken.getsockname()[1]))
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and "router.port" in errors, errors


def test_router_process_missing_model_says_so_in_one_line(processes: list[subprocess.Popen[str]], tmp_path: Path) -> None:
    process = start(processes, "--model", str(tmp_path / "nothing"), "--port", "0")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and "nothing" in errors, errors


@pytest.mark.parametrize(
    ("host", "has_keys", "num_warnings"), [("0.0.0.0", False, 1), ("0.0.0.0", True, 0), ("127.0.0.1", False, 0)]
)
def test_router_process_http_beyond_loopback_without_api_keys_warns_once(
    processes: list[subprocess.Popen[str]], servable_folder: Path, tmp_path: Path, host: str, has_keys: bool, num_warnings: int
) -> None:
    port = free_port()
    flags = ["--model", str(servable_folder), "--host", host, "--port", str(port)]
    if has_keys:
        add_api_key(tmp_path / "api.yaml", "alice", is_admin=False)
        flags += ["--api-keys-file", str(tmp_path / "api.yaml")]
    process = start(processes, *flags)
    assert process.stdout is not None and process.stderr is not None
    assert f"http://{host}:" in (line := process.stdout.readline()) and "nodes register at 127.0.0.1:" in line
    assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 503
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stderr.read().count("there are no API keys (router.api_keys_file)") == num_warnings


@pytest.mark.parametrize(
    ("flags", "expected"),
    [(("--keys", "/no/such/folder"), "security.keys"), (("--api-keys-file", "/no/such/file"), "router.api_keys_file")],
)
def test_router_process_keys_that_are_not_there_are_one_line(
    processes: list[subprocess.Popen[str]], servable_folder: Path, flags: tuple[str, str], expected: str
) -> None:
    process = start(processes, "--model", str(servable_folder), "--port", "0", *flags)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert errors.count("\n") == 1 and f"{expected}: got '{flags[1]}" in errors, errors
