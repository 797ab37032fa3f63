"""python -m bench.router overhead: CPU per request of a router in front of nodes that compute nothing.

A request is a chat of about 500 tokens whose answer of 100 tokens is streamed: it is parsed, made a prompt, tokenized (ours; the
others pass text on), routed, and its tokens go out as events. Counted is what the router's process used, user and system, between
two moments, over the requests between them. --against vllm-router,sglang-router measures those too, from a virtual environment of
their own (--venv: one in which they are installed), in front of HTTP servers that answer alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pydoc_data.topics
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import psutil

from bench.router.fake_openai import MODEL_NAME
from bench.router.stream_client import ask_all, chat_body, is_ready
from core.model_files import resolve_model
from router.tokenizer import Tokenizer

START_LIMIT_S = 60.0
OTHERS = {"vllm-router": ("vllm-router",), "sglang-router": ("sglang-router", "launch")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommand's options."""
    parser.add_argument("--against", default="", help=f"also measure these: {', '.join(OTHERS)}")
    parser.add_argument("--venv", type=Path, help="the virtual environment that has them")
    parser.add_argument("--model", default=MODEL_NAME, help="whose tokenizer and chat template are used")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--output-tokens", type=int, default=100)
    parser.add_argument("--pace-ms", type=float, default=0.0, help="between tokens; 0: nodes answer at once")
    parser.add_argument("--rounds", type=int, default=3, help="of --requests each; the median counts")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """CPU milliseconds per request by router, and the ratio of the others' to ours."""
    names = [name for name in arguments.against.split(",") if name]
    if unknown := sorted(set(names) - set(OTHERS)):
        raise SystemExit(f"--against: got {', '.join(unknown)}; allowed: {', '.join(OTHERS)}")
    if names and arguments.venv is None:
        raise SystemExit("--against: needs --venv, a virtual environment with these routers")
    bodies = make_bodies(arguments)
    found = {}
    for name in ["kvrelay", *names]:
        with ExitStack() as stack:
            starter = _start_ours if name == "kvrelay" else _start_other
            process, port = starter(name, arguments, stack)
            found[name] = measure(process, port, bodies, arguments.connections, arguments.rounds)
        print(name, *(f"{key} {value}" for key, value in found[name].items()), flush=True)
    ours = found["kvrelay"]["cpu_ms_per_request"]
    return {
        "cpu_ms_per_request": ours,
        "by_router": found,
        "ours_over_theirs": {name: round(ours / found[name]["cpu_ms_per_request"], 2) for name in names},
        "pace_ms": arguments.pace_ms,
        "connections": arguments.connections,
    }


def make_bodies(arguments: argparse.Namespace) -> list[bytes]:
    """Different prompts of about --prompt-tokens tokens of English, one per request of a round."""
    tokenizer = Tokenizer(resolve_model(arguments.model))
    words = " ".join(pydoc_data.topics.topics.values()).split()
    rng = random.Random(7)
    bodies = []
    for _ in range(arguments.requests):
        start = rng.randrange(len(words) - arguments.prompt_tokens)
        text = " ".join(words[start : start + arguments.prompt_tokens])
        token_ids = tokenizer.encode(text, add_special_tokens=False)[: arguments.prompt_tokens]
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        bodies.append(chat_body(MODEL_NAME, text, arguments.output_tokens))
    return bodies


def measure(
    process: psutil.Process, port: int, bodies: Sequence[bytes], num_connections: int, num_rounds: int
) -> dict[str, float]:
    """CPU of `process` and its children per request: median, least and most of the rounds, after one round to warm up."""
    asyncio.run(_wait_until_ready(port, bodies[0]))
    rounds_ms, num_events = [], 0
    for _ in range(num_rounds + 1):
        before_s = _cpu_s(process)
        num_events = asyncio.run(ask_all(port, bodies, num_connections))
        rounds_ms.append((_cpu_s(process) - before_s) * 1000 / len(bodies))
    ascending = sorted(rounds_ms[1:])
    return {
        "cpu_ms_per_request": round(ascending[len(ascending) // 2], 3),
        "least": round(ascending[0], 3),
        "most": round(ascending[-1], 3),
        "events_per_request": round(num_events / len(bodies), 1),
    }


async def _wait_until_ready(port: int, body: bytes) -> None:
    async with asyncio.timeout(START_LIMIT_S):
        while not await is_ready(port, body):
            await asyncio.sleep(0.2)


def _cpu_s(process: psutil.Process) -> float:
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def _start_ours(_name: str, arguments: argparse.Namespace, stack: ExitStack) -> tuple[psutil.Process, int]:
    port, control_port = _free_ports(2)
    flags = [f"--router.port={port}", f"--router.control_port={control_port}", f"--model.path={arguments.model}"]
    router = _spawn([sys.executable, "-m", "router", *flags], stack)
    fake = [sys.executable, "-m", "bench.router.fake_node", f"--router=127.0.0.1:{control_port}"]
    _spawn([*fake, f"--nodes={arguments.nodes}", f"--pace-ms={arguments.pace_ms}"], stack)
    return psutil.Process(router.pid), port


def _start_other(name: str, arguments: argparse.Namespace, stack: ExitStack) -> tuple[psutil.Process, int]:
    fake = [sys.executable, "-m", "bench.router.fake_openai", f"--ports={arguments.nodes}", f"--pace-ms={arguments.pace_ms}"]
    servers = _spawn(fake, stack, stdout=subprocess.PIPE)
    assert servers.stdout is not None
    urls = [f"http://127.0.0.1:{node_port}" for node_port in json.loads(servers.stdout.readline())]
    port, metrics_port = _free_ports(2)
    program, *words = OTHERS[name]
    command = [str(arguments.venv / "bin" / program), *words, "--host=127.0.0.1", f"--port={port}"]
    command += [f"--prometheus-port={metrics_port}", "--policy=cache_aware", "--log-level=error", "--worker-urls", *urls]
    return psutil.Process(_spawn(command, stack).pid), port


def _spawn(command: Sequence[str], stack: ExitStack, stdout: int | None = None) -> subprocess.Popen[bytes]:
    """A child that ends with the stack; what it writes is shown if it has ended before that."""
    log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    process = subprocess.Popen(command, stdout=stdout or log, stderr=log)

    def end() -> None:
        if process.poll() is not None:
            log.seek(0)
            print(f"{command} ended with {process.returncode}:\n{log.read().decode(errors='replace')}", file=sys.stderr)
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

    stack.callback(end)
    return process


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listened at a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
