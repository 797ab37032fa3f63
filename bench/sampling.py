"""What choosing the tokens of a step costs, by kind of row, beside a sampler that takes rows one by one and sorts each wholly.

python -m bench.sampling --json

Logits are made up (peaked rows, as a language model's are, or flat ones with --flat) in the model's dtype, with a history of
--history tokens per row. For each kind the two ways alternate; milliseconds are medians, and the ratio is the median over pairs
of the plain sampler's time to ours (above 1: ours is faster). Nothing is loaded and no model runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from core.model.logprobs import token_logprobs
from core.model.sampled_row import SampledRow, TokenCounts
from core.model.sampler import Sampler
from core.sampling_params import SamplingParams
from tests.support.plain_sampler import sample_plainly

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "min_p": {"temperature": 0.8, "min_p": 0.05},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "top_p and penalties": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


def make_logits(num_rows: int, vocab_size: int, dtype: torch.dtype, *, is_flat: bool) -> Tensor:
    """[num_rows, vocab_size]. Peaked: the r-th best token's probability falls about as r ** -1.5; flat: normal."""
    generator = torch.Generator().manual_seed(num_rows)
    if is_flat:
        return torch.randn(num_rows, vocab_size, generator=generator).to(dtype)
    ranks = torch.stack([torch.randperm(vocab_size, generator=generator) for _ in range(num_rows)]) + 1
    noise = torch.randn(num_rows, vocab_size, generator=generator) * 0.3
    return (18.0 - 1.5 * ranks.float().log() + noise).to(dtype)


def make_rows(kind: str, num_rows: int, vocab_size: int, history: int) -> list[SampledRow]:
    """Rows with counts that are kept up, as the runner has them. "mixed": all kinds in turn."""
    rng = np.random.default_rng(0)
    names = list(KINDS) if kind == "mixed" else [kind]
    rows = []
    for i in range(num_rows):
        sampling = SamplingParams(seed=i, max_tokens=history, **KINDS[names[i % len(names)]])
        token_ids = rng.integers(0, vocab_size, history)
        counts = TokenCounts(history // 2)
        counts.advance(token_ids)
        rows.append(SampledRow(sampling, token_ids, history // 2, counts=counts))
    return rows


def compare(logits: Tensor, rows: list[SampledRow], rounds: int) -> dict[str, float]:
    """Alternating pairs over the same rows."""
    sampler = Sampler([0])
    asking = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    num_tops = [rows[i].sampling.logprobs or 0 for i in asking]

    def ours() -> object:
        tokens = sampler.sample(logits, rows)
        return token_logprobs(logits[asking], [tokens[i] for i in asking], num_tops)

    def plain() -> object:
        tokens = sample_plainly(logits, rows, [0])
        return [_plain_logprobs(logits[i], tokens[i], count) for i, count in zip(asking, num_tops, strict=True)]

    pairs = [(_seconds(ours), _seconds(plain)) for _ in range(rounds + 1)][1:]  # the first touches memory
    return {
        "ms": round(statistics.median(pair[0] for pair in pairs) * 1000, 3),
        "plain_ms": round(statistics.median(pair[1] for pair in pairs) * 1000, 3),
        "ratio": round(statistics.median(pair[1] / pair[0] for pair in pairs), 2),
    }


def _plain_logprobs(logits: Tensor, token_id: int, num_top: int) -> tuple[float, Sequence[float]]:
    logprobs = logits.float().log_softmax(-1)
    ordered = logprobs.sort(descending=True).values
    return float(logprobs[token_id]), ordered[:num_top].tolist()


def _seconds(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def main(argv: list[str] | None = None) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--history", type=int, default=600, help="tokens that penalties count, half of them prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    parser.add_argument("--flat", action="store_true", help="rows that are nearly uniform")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    logits = make_logits(arguments.rows, arguments.vocab, getattr(torch, arguments.dtype), is_flat=arguments.flat)
    found = {}
    with torch.inference_mode():
        for kind in (*KINDS, "mixed"):
            found[kind] = compare(logits, make_rows(kind, arguments.rows, arguments.vocab, arguments.history), arguments.rounds)
            print(f"{kind:<20}", *(f"{name} {value:<9}" for name, value in found[kind].items()), flush=True)
    if arguments.json:
        shape = {"rows": arguments.rows, "vocab": arguments.vocab, "dtype": arguments.dtype, "threads": torch.get_num_threads()}
        print(json.dumps({**shape, "is_flat": arguments.flat, "kinds": found}))


if __name__ == "__main__":
    main()
