"""`python -m bench.serving`: sends an open-loop load to a running cluster and reports latencies, throughput and hits.

How the load is made and measured is load_generator.py's business. The table goes to standard output; with --json it goes to
standard error, and one JSON line to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import itertools
import json
import math
import statistics
import sys
from collections.abc import Sequence

import httpx
from tqdm import tqdm

from bench.load_generator import Load, RequestRecord, fetch_model_name, fetch_vocabulary, make_client, run_load

MAX_GOOD_LATENESS_S = 0.05


def main(argv: list[str] | None = None) -> int:
    """Run the load. Exit code 0: every request was answered; 1: some failed; 2: the load could not be started."""
    arguments = _parse(argv)
    try:
        load, records, duration_s = asyncio.run(_measure(arguments))
    except (httpx.HTTPError, OSError, KeyError, ValueError) as error:
        print(f"bench.serving: {arguments.url} does not answer as expected: {error!r}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    result = summarize(load, records, duration_s)
    print(render_table(result), file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(result), flush=True)
    return 1 if result["num_errors"] else 0


def summarize(load: Load, records: Sequence[RequestRecord], duration_s: float) -> dict[str, object]:
    """All results as one flat mapping; latencies in milliseconds, None where nothing was measured.

    inter_token: gaps between chunks of a stream. time_per_output_token: a request's time after its first token, divided by the
    number of its further tokens. cached_share: of the prompt tokens, by the server's own usage.
    """
    answered = [record for record in records if not record.error]
    streams = [record for record in answered if record.chunk_times_s]
    num_prompt_tokens = sum(record.num_prompt_tokens for record in answered)
    num_output_tokens = sum(record.num_output_tokens for record in answered)
    result: dict[str, object] = {
        "num_requests": len(records),
        "num_answered": len(answered),
        "num_errors": len(records) - len(answered),
        "errors": dict(collections.Counter(record.error for record in records if record.error)),
        "rate": load.rate if math.isfinite(load.rate) else "inf",
        "duration_s": round(duration_s, 3),
        "requests_per_s": round(len(answered) / duration_s, 3),
        "prompt_tokens_per_s": round(num_prompt_tokens / duration_s, 1),
        "output_tokens_per_s": round(num_output_tokens / duration_s, 1),
        "num_prompt_tokens": num_prompt_tokens,
        "num_output_tokens": num_output_tokens,
        "cached_share": round(sum(r.num_cached_tokens for r in answered) / num_prompt_tokens, 4) if num_prompt_tokens else None,
    }
    series = {
        "ttft_ms": [record.chunk_times_s[0] - record.sent_at_s for record in streams],
        "inter_token_ms": [gap for record in streams for gap in _gaps(record.chunk_times_s)],
        "time_per_output_token_ms": [
            (record.chunk_times_s[-1] - record.chunk_times_s[0]) / (record.num_output_tokens - 1)
            for record in streams
            if record.num_output_tokens > 1
        ],
        "e2e_ms": [record.ended_at_s - record.sent_at_s for record in answered],
        "lateness_ms": [record.lateness_s for record in records],
    }
    for name, seconds in series.items():
        result |= {f"{name}_{statistic}": value for statistic, value in _statistics_ms(seconds).items()}
    return result


def render_table(result: dict[str, object]) -> str:
    """The summary for people."""
    lines = [
        f"requests      {result['num_answered']} of {result['num_requests']} answered in {result['duration_s']} s",
        f"throughput    {result['requests_per_s']} requests/s, {result['prompt_tokens_per_s']} prompt tokens/s, "
        f"{result['output_tokens_per_s']} output tokens/s",
        f"cached share  {result['cached_share']}",
        "",
        f"{'milliseconds':<24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    for name in ("ttft", "inter_token", "time_per_output_token", "e2e", "lateness"):
        cells = (result[f"{name}_ms_{statistic}"] for statistic in ("mean", "p50", "p90", "p99", "max"))
        label = "generator's lateness" if name == "lateness" else name.replace("_", " ")
        lines.append(f"{label:<24}" + "".join(f"{'-' if cell is None else cell:>10}" for cell in cells))
    lateness_ms = result["lateness_ms_p99"]
    if isinstance(lateness_ms, float) and lateness_ms > MAX_GOOD_LATENESS_S * 1000:
        lines.append("the generator itself was late: the load was less regular than asked for")
    errors = result["errors"]
    if isinstance(errors, dict) and errors:
        lines += ["", "errors        " + ", ".join(f"{kind}: {count}" for kind, count in sorted(errors.items()))]
    return "\n".join(lines)


async def _measure(arguments: argparse.Namespace) -> tuple[Load, list[RequestRecord], float]:
    async with make_client(arguments.url, arguments.timeout_s) as client:
        load = Load(
            url=arguments.url,
            model=arguments.model or await fetch_model_name(client),
            num_requests=arguments.requests,
            rate=arguments.rate,
            num_input_tokens=arguments.input_tokens,
            num_output_tokens=arguments.output_tokens,
            num_shared_prefix_tokens=arguments.shared_prefix,
            concurrency_limit=arguments.concurrency_limit,
            seed=arguments.seed,
            is_streaming=arguments.stream,
            request_timeout_s=arguments.timeout_s,
        )
        vocabulary = await fetch_vocabulary(client, load.model)
        with tqdm(total=load.num_requests, unit="request", file=sys.stderr, dynamic_ncols=True) as bar:
            records, duration_s = await run_load(client, load, vocabulary, lambda _: bar.update())
    return load, records, duration_s


def _gaps(times_s: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(times_s)]


def _statistics_ms(seconds: Sequence[float]) -> dict[str, float | None]:
    names = ("mean", "p50", "p90", "p99", "max")
    if not seconds:
        return dict.fromkeys(names)
    ordered = sorted(seconds)
    values = (statistics.fmean(ordered), *(_percentile(ordered, q) for q in (0.5, 0.9, 0.99, 1.0)))
    return {name: round(value * 1000, 3) for name, value in zip(names, values, strict=True)}


def _percentile(ordered: Sequence[float], quantile: float) -> float:
    """Linear between the two nearest ranks, as numpy's default."""
    position = quantile * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="default: the first that the server lists")
    parser.add_argument("--requests", type=int, default=100, metavar="N")
    parser.add_argument("--rate", type=float, default=math.inf, metavar="R", help="requests per second; inf: all at once")
    parser.add_argument("--input-tokens", type=int, default=256, metavar="I")
    parser.add_argument("--output-tokens", type=int, default=64, metavar="O")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="T", help="tokens that all prompts begin with")
    parser.add_argument("--concurrency-limit", type=int, default=0, metavar="C", help="at most so many at a time; 0: no limit")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrival times")
    parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--timeout-s", type=float, default=600.0, help="of one request")
    parser.add_argument("--json", action="store_true", help="one JSON line on standard output, the table on standard error")
    arguments = parser.parse_args(argv)
    for name, low in (("requests", 1), ("input_tokens", 1), ("output_tokens", 1), ("shared_prefix", 0), ("concurrency_limit", 0)):
        if getattr(arguments, name) < low:
            parser.error(f"--{name.replace('_', '-')}: got {getattr(arguments, name)}; allowed: {low} or more")
    if not arguments.rate > 0:
        parser.error(f"--rate: got {arguments.rate}; allowed: above 0, or inf")
    if arguments.shared_prefix > arguments.input_tokens:
        parser.error(
            f"--shared-prefix: got {arguments.shared_prefix}; allowed: at most --input-tokens ({arguments.input_tokens})"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(main())
