"""Starts and ends OpenAI-style servers for benches: kvrelay's own cluster, or vLLM's in another virtual environment.

A server leads a process group of its own, which ends with it. Knows nothing of what is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from deploy.topology import find_free_ports

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parent.parent
START_TIMEOUT_S = 900.0  # vLLM compiles at its first start
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """command: with {port} and {control_port} where these belong. environment: over ours. cores_by_node: the cores that a kvrelay
    node, by its name, is kept on; no name: all are free to run anywhere.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cores_by_node: Mapping[str, Sequence[int]] = field(default_factory=dict)


def kvrelay_server(model: str, num_prefill: int, num_decode: int, *flags: str, cores: Sequence[int] = ()) -> ServerSpec:
    """`kvrelay serve`. cores: one per node, prefill nodes first; (): nodes share all."""
    names = [f"prefill-{i}" for i in range(num_prefill)] + [f"decode-{i}" for i in range(num_decode)]
    command = (
        *(sys.executable, "-m", "deploy.cli", "serve", "--model", model, "--port", "{port}", "--control-port", "{control_port}"),
        *("--prefill", str(num_prefill), "--decode", str(num_decode), *flags),
    )
    by_node = {name: (core,) for name, core in zip(names, cores, strict=True)} if cores else {}
    return ServerSpec(command, {"PYTHONPATH": str(ROOT)}, by_node)


def vllm_server(venv: Path, model_folder: str, *flags: str) -> ServerSpec:
    """vLLM's OpenAI server, one process for everything, in the virtual environment `venv`. Preloaded libraries come from our own
    environment, as the user has set them.
    """
    module = "vllm.entrypoints.openai.api_server"
    command = (str(venv / "bin" / "python"), "-m", module, "--model", model_folder, "--host", HOST, "--port", "{port}", *flags)
    return ServerSpec(command)


@contextlib.contextmanager
def running(spec: ServerSpec) -> Iterator[str]:
    """The server's URL, from when it answers on. Raises RuntimeError with the end of its output if it ends or does not start."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-bench-") as folder:
        port, control_port = find_free_ports(HOST, 2)
        log = Path(folder) / "output"
        with log.open("w") as output:
            process = subprocess.Popen(
                [part.format(port=port, control_port=control_port) for part in spec.command],
                env={**os.environ, **spec.environment, "TMPDIR": folder},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        url = f"http://{HOST}:{port}"
        try:
            _wait_until_it_answers(process, url, log)
            for name, cores in spec.cores_by_node.items():
                _keep_on_cores(_node_pid(name, folder), cores)
            yield url
        finally:
            _end(process)


def _wait_until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            # One token: a router answers before its nodes are there.
            models = httpx.get(f"{url}/v1/models", timeout=10.0, trust_env=False).raise_for_status().json()
            body = {"model": models["data"][0]["id"], "prompt": "a", "max_tokens": 1}
            if httpx.post(f"{url}/v1/completions", json=body, timeout=120.0, trust_env=False).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"the server did not start:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


def _node_pid(name: str, folder: str) -> int:
    """Of the kvrelay node of this name whose temporary files are in `folder`."""
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0") if entry.name.isdigit() else []
            if "--node-id" in arguments and arguments[arguments.index("--node-id") + 1] == name and folder in "".join(arguments):
                return int(entry.name)
    raise RuntimeError(f"no process of node {name}")


def _keep_on_cores(pid: int, cores: Sequence[int]) -> None:
    """All threads that there are; later ones inherit it."""
    for thread in (Path("/proc") / str(pid) / "task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), set(cores))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):  # what it left behind in its group
        os.killpg(process.pid, signal.SIGKILL)
