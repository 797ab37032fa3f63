"""What a long prompt does to streams that are decoding: the reason to prefill and decode on separate nodes.

python -m bench.interference --json [--vllm VENV]

Four streams decode without a pause while a prompt of 1,500 tokens arrives every 4 s. Arms: kvrelay with one prefill and one
decode node, a core each; kvrelay with one node on both cores and chunks of 512 or 128 tokens; with --vllm also vLLM's OpenAI
server, one process on both cores, with the same chunks. Each round starts every arm's server once, in an order of its own.
Printed per arm: the median and 99th percentile of the time between tokens of a stream while long prompts come, how many times the
one the other is, and the time to the first token of the long prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.load_generator import fetch_model_name, fetch_vocabulary, make_client
from bench.servers_under_test import ServerSpec, kvrelay_server, running, vllm_server
from core.config import ModelOptions
from core.model_files import resolve_model

CHUNKS = (512, 128)
KVRELAY_SIZES = ("--engine.kv_pool_mib", "768", "--max-num-seqs", "64", "--max-model-len", "8192", "--dtype", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is asked of a server. Streams begin warm_s before the first long prompt, and are cut a period after the last."""

    num_streams: int = 4
    num_stream_prompt_tokens: int = 64
    num_stream_tokens: int = 6000
    num_long_prompts: int = 8
    num_long_tokens: int = 1500
    num_long_output_tokens: int = 16
    period_s: float = 4.0
    warm_s: float = 3.0

    @property
    def long_prompt_times_s(self) -> list[float]:
        """When each is due, from when the streams begin."""
        return [self.warm_s + index * self.period_s for index in range(self.num_long_prompts)]

    @property
    def end_s(self) -> float:
        """When the streams are cut."""
        return self.warm_s + self.num_long_prompts * self.period_s


@dataclass(slots=True)
class Observed:
    """Of one server and round, in seconds: gaps between a stream's tokens while long prompts came; each long prompt's time to its
    first token.
    """

    gaps_s: list[float] = field(default_factory=list)
    first_tokens_s: list[float] = field(default_factory=list)
    num_errors: int = 0


def summarize(rounds: Sequence[Observed]) -> dict[str, float | int | None]:
    """Over all rounds together; milliseconds, None where nothing was seen."""
    gaps = sorted(gap for observed in rounds for gap in observed.gaps_s)
    firsts = sorted(first for observed in rounds for first in observed.first_tokens_s)
    p50, p99 = percentile(gaps, 0.5), percentile(gaps, 0.99)
    return {
        "inter_token_ms_p50": _ms(p50),
        "inter_token_ms_p99": _ms(p99),
        "ratio": round(p99 / p50, 2) if p50 and p99 is not None else None,
        "first_token_ms_p50": _ms(percentile(firsts, 0.5)),
        "first_token_ms_p99": _ms(percentile(firsts, 0.99)),
        "num_gaps": len(gaps),
        "num_long_prompts": len(firsts),
        "num_errors": sum(observed.num_errors for observed in rounds),
    }


def percentile(ordered: Sequence[float], quantile: float) -> float | None:
    """The smallest value that at least this share of all are at or below; None of none."""
    if not ordered:
        return None
    return ordered[max(math.ceil(quantile * len(ordered) - 1e-9) - 1, 0)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 2)


def gaps_within(times_s: Sequence[float], start_s: float, end_s: float) -> list[float]:
    """Between neighbours in time, of which the later is within the window."""
    return [later - earlier for earlier, later in itertools.pairwise(times_s) if start_s <= later <= end_s]


async def observe(url: str, schedule: Schedule, seed: int) -> Observed:
    """Run the schedule against a server. A stream that ends early begins again with another prompt."""
    observed = Observed()
    async with make_client(url, request_timeout_s=600.0) as client:
        model = await fetch_model_name(client)
        vocabulary = await fetch_vocabulary(client, model)

        def body(kind: str, index: int, num_tokens: int, max_tokens: int) -> bytes:
            prompt = random.Random(f"{kind}/{seed}/{index}").choices(vocabulary, k=num_tokens)
            asked = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            return json.dumps(asked | {"stream": True}).encode()

        numbers = itertools.count()
        began_s = time.perf_counter()
        window = (began_s + schedule.warm_s, began_s + schedule.end_s)

        async def decode_steadily() -> None:
            while True:
                times_s: list[float] = []
                try:
                    asked = body("stream", next(numbers), schedule.num_stream_prompt_tokens, schedule.num_stream_tokens)
                    await _read_times(client, asked, times_s.append)
                except (httpx.HTTPError, ValueError) as error:
                    observed.num_errors += 1
                    print(f"a stream failed: {error!r}", file=sys.stderr)
                    await asyncio.sleep(0.1)
                finally:  # also when it is cut
                    observed.gaps_s += gaps_within(times_s, *window)

        async def ask_long(index: int, due_s: float) -> None:
            asked = body("long", index, schedule.num_long_tokens, schedule.num_long_output_tokens)
            await asyncio.sleep(began_s + due_s - time.perf_counter())
            times_s: list[float] = []
            sent_s = time.perf_counter()
            try:
                await _read_times(client, asked, times_s.append)
                observed.first_tokens_s.append(times_s[0] - sent_s)
            except (httpx.HTTPError, ValueError, IndexError) as error:
                observed.num_errors += 1
                print(f"a long prompt failed: {error!r}", file=sys.stderr)

        streams = [asyncio.create_task(decode_steadily()) for _ in range(schedule.num_streams)]
        await asyncio.gather(*(ask_long(index, due_s) for index, due_s in enumerate(schedule.long_prompt_times_s)))
        await asyncio.sleep(max(window[1] - time.perf_counter(), 0.0))
        for stream in streams:
            stream.cancel()
        for stream in streams:
            with contextlib.suppress(asyncio.CancelledError):
                await stream
    return observed


async def _read_times(client: httpx.AsyncClient, body: bytes, on_text: Callable[[float], None]) -> None:
    """Call on_text with the time at which each piece of text came. Raises httpx.HTTPError or ValueError."""
    headers = {"content-type": "application/json"}
    async with client.stream("POST", "/v1/completions", content=body, headers=headers) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data:") and line[5:].strip() != "[DONE]":
                event: dict[str, Any] = json.loads(line[5:])
                if "error" in event:
                    raise ValueError(str(event["error"]))
                if any(choice.get("text") for choice in event.get("choices", ())):
                    on_text(time.perf_counter())


def make_arms(model: str, vllm: Path | None) -> dict[str, ServerSpec]:
    """Servers by the arm's name."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    store = ("--connector-option", "capacity_bytes=1GiB")
    arms = {
        "kvrelay 1 prefill + 1 decode": kvrelay_server(
            model, 1, 1, *KVRELAY_SIZES, *store, "--engine.num_threads", "1", cores=cores if len(cores) == 2 else ()
        )
    }
    for chunk in CHUNKS:
        size = ("--max-num-batched-tokens", str(chunk))
        arms[f"kvrelay monolithic, chunk {chunk}"] = kvrelay_server(model, 0, 1, *KVRELAY_SIZES, "--connector", "none", *size)
    if vllm is not None:
        sizes = ("--dtype", "bfloat16", "--max-model-len", "8192", "--max-num-seqs", "64")
        for chunk in CHUNKS:
            arms[f"vLLM, chunk {chunk}"] = vllm_server(
                vllm, str(resolve_model(model)), *sizes, "--max-num-batched-tokens", str(chunk)
            )
    return arms


def round_orders(names: Sequence[str], num_rounds: int) -> list[list[str]]:
    """Each round's arms: all of them, in an order that differs from round to round and not from run to run."""
    return [random.Random(place).sample(names, len(names)) for place in range(num_rounds)]


def render(name: str, result: Mapping[str, object]) -> str:
    """One arm as a line."""
    return (
        f"{name:<32} between tokens p50 {result['inter_token_ms_p50']} ms, p99 {result['inter_token_ms_p99']} ms "
        f"({result['ratio']} times); long prompts' first token p50 {result['first_token_ms_p50']} ms, "
        f"p99 {result['first_token_ms_p99']} ms; {result['num_errors']} errors"
    )


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring. Exit code 1: a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelOptions().path)
    parser.add_argument("--vllm", type=Path, default=None, metavar="VENV", help="a virtual environment with vLLM")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long-prompts", type=int, default=8, help="per arm and round")
    parser.add_argument("--long-tokens", type=int, default=1500)
    parser.add_argument("--period-s", type=float, default=4.0)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--arms", default="", help="only arms whose names contain one of these words, separated by commas")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args(argv)
    schedule = Schedule(
        num_streams=arguments.streams,
        num_long_prompts=arguments.long_prompts,
        num_long_tokens=arguments.long_tokens,
        period_s=arguments.period_s,
    )
    words = [word.strip() for word in arguments.arms.split(",")]
    arms = {
        name: spec for name, spec in make_arms(arguments.model, arguments.vllm).items() if any(word in name for word in words)
    }
    if not arms:
        parser.error(f"--arms: got {arguments.arms}; allowed: words of {', '.join(make_arms(arguments.model, arguments.vllm))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that whoever ends this ends the server with it
    found: dict[str, list[Observed]] = {name: [] for name in arms}
    for place, order in enumerate(round_orders(list(arms), arguments.rounds)):
        for name in order:
            with running(arms[name]) as url:
                found[name].append(asyncio.run(observe(url, schedule, seed=place)))
            print(f"round {place + 1}: {render(name, summarize(found[name][-1:]))}", flush=True)
    results = {name: summarize(rounds) for name, rounds in found.items()}
    for name, result in results.items():
        print(render(name, result))
    if arguments.json:
        print(json.dumps({"rounds": arguments.rounds, "period_s": schedule.period_s, "arms": results}))
    return 1 if any(result["num_errors"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
