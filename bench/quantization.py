"""What 8 and 4 bits cost in answers and bring in speed: projections quantized at load, and KV stored in fewer bits.

python -m bench.quantization --modes bfloat16,float32,int8,int4,kv-fp8,kv-int8 --json

The text is Python's own documentation (pydoc_data.topics), English prose with code. perplexity: over the text. same_answers,
mean_same_tokens: greedy continuations of prompts that equal those of the first mode, and how far they do. likeliest: the share of
the first mode's tokens that a mode would have chosen too, had it written all before. Tokens/s are medians over rounds in which
all modes take turns, in random order; ratios are medians of a round's against the first mode's.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pydoc_data.topics
import random
import statistics
import time
from typing import Any

from core.config import ModelOptions
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan, StepResult
from router.tokenizer import Tokenizer

BLOCK_SIZE = 16
NUM_BLOCKS = 1024
MODES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "kv-fp8": {"kv_cache_dtype": "fp8"},
    "kv-int8": {"kv_cache_dtype": "int8"},
}


class ModeRunner:
    """One mode's runner. Requests of a call own the pool and are forgotten at its end."""

    def __init__(self, model: str, mode: str, num_threads: int) -> None:
        folder = resolve_model(model)
        description = describe_model(folder, ModelOptions(path=model, **MODES[mode]), BLOCK_SIZE)
        pool = KVPoolMemory(description.kv_layout, NUM_BLOCKS)
        self._runner = TorchModelRunner.load(folder, description, pool, num_threads)
        self._step_ids = itertools.count()
        self._names: list[str] = []

    def read(self, token_ids: list[int]) -> tuple[list[float], list[int]]:
        """(log-probability, rank) of all tokens but the first."""
        asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        found = self._prefill([token_ids], len(token_ids) + 1, asked).prompt_logprobs[self._names[0]]
        self._forget()
        return [token.logprob for token in found], [token.rank for token in found]

    def generate(self, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float, float]:
        """(greedy continuations, seconds for the prompts and the first tokens, seconds for all others)."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        started_s = time.perf_counter()
        outputs = self._prefill(prompts, max(map(len, prompts)) + num_tokens, sampling).sampled_token_ids
        first_s = time.perf_counter()
        for _ in range(num_tokens - 1):
            for output, tokens in zip(outputs, self._step(dict.fromkeys(self._names, 1)).sampled_token_ids, strict=True):
                output += tokens
        ended_s = time.perf_counter()
        self._forget()
        return outputs, first_s - started_s, ended_s - first_s

    def _prefill(self, prompts: list[list[int]], max_len: int, sampling: SamplingParams) -> StepResult:
        num_blocks = -(-max_len // BLOCK_SIZE)
        assert num_blocks * len(prompts) <= NUM_BLOCKS, "too many tokens for the pool"
        self._names = [f"{next(self._step_ids)}-{index}" for index in range(len(prompts))]
        new = [
            NewRequest(name, prompt, len(prompt), 0, list(range(index * num_blocks, (index + 1) * num_blocks)), sampling, None)
            for index, (name, prompt) in enumerate(zip(self._names, prompts, strict=True))
        ]
        return self._step({name: len(prompt) for name, prompt in zip(self._names, prompts, strict=True)}, new)

    def _step(
        self, scheduled: dict[str, int], new: list[NewRequest] | None = None, removed: list[str] | None = None
    ) -> StepResult:
        plan = StepPlan(next(self._step_ids), scheduled, sum(scheduled.values()), new or [], {}, removed or [], [], 0, {})
        return self._runner.execute(plan)

    def _forget(self) -> None:
        self._step({}, removed=self._names)


def make_texts(tokenizer: Tokenizer, num_texts: int, num_tokens: int) -> list[list[int]]:
    """num_texts texts of num_tokens tokens each, of different topics."""
    topics = [text for text in pydoc_data.topics.topics.values() if len(text) > 8 * num_tokens]
    assert len(topics) >= num_texts, f"only {len(topics)} topics are that long"
    chosen = random.Random(0).sample(topics, num_texts)
    return [tokenizer.encode(text, add_special_tokens=False)[:num_tokens] for text in chosen]


def quality(
    runners: dict[str, ModeRunner], texts: list[list[int]], prompt_tokens: int, output_tokens: int
) -> dict[str, dict[str, float]]:
    """By mode; see the module's docstring."""
    base = next(iter(runners.values()))
    prompts = [text[:prompt_tokens] for text in texts]
    expected = [base.generate([prompt], output_tokens)[0][0] for prompt in prompts]
    found = {}
    for mode, runner in runners.items():
        logprobs = [logprob for text in texts for logprob in runner.read(text)[0]]
        answers = [runner.generate([prompt], output_tokens)[0][0] for prompt in prompts]
        lengths = [num_same(answer, wanted) for answer, wanted in zip(answers, expected, strict=True)]
        ranks = [
            rank
            for prompt, wanted in zip(prompts, expected, strict=True)
            for rank in runner.read(prompt + wanted)[1][-len(wanted) :]
        ]
        found[mode] = {
            "perplexity": round(math.exp(-statistics.fmean(logprobs)), 3),
            "same_answers": sum(length == output_tokens for length in lengths),
            "answers": len(lengths),
            "mean_same_tokens": round(statistics.fmean(lengths), 1),
            "likeliest": round(sum(rank == 1 for rank in ranks) / len(ranks), 4),
        }
    return found


def num_same(tokens: list[int], others: list[int]) -> int:
    """Leading tokens that are equal."""
    pairs = zip(tokens, others, strict=True)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def speed(
    runners: dict[str, ModeRunner], texts: list[list[int]], batches: list[int], output_tokens: int, rounds: int
) -> dict[str, dict[str, float]]:
    """By mode: tokens/s of prefill (one text) and of decoding by batch, with ratios to the first mode's."""
    seconds: dict[str, dict[str, list[float]]] = {mode: {} for mode in runners}
    num_tokens: dict[str, int] = {}
    for place in range(rounds + 1):  # the first warms up
        for mode in random.Random(place).sample(list(runners), len(runners)):
            for batch in batches:
                prompts = [texts[index % len(texts)][:32] for index in range(batch)]
                decode_s = runners[mode].generate(prompts, output_tokens)[2]
                seconds[mode].setdefault(f"decode_{batch}", []).append(decode_s)
                num_tokens[f"decode_{batch}"] = batch * (output_tokens - 1)
            prefill_s = runners[mode].generate([texts[0]], 1)[1]
            name = f"prefill_{len(texts[0])}"
            seconds[mode].setdefault(name, []).append(prefill_s)
            num_tokens[name] = len(texts[0])
    base = next(iter(seconds.values()))
    found: dict[str, dict[str, float]] = {}
    for mode, by_name in seconds.items():
        found[mode] = {}
        for name, taken in by_name.items():
            found[mode][f"{name}_tokens_per_s"] = round(num_tokens[name] / statistics.median(taken[1:]), 1)
            ratios = [theirs / ours for theirs, ours in zip(base[name][1:], taken[1:], strict=True)]
            found[mode][f"{name}_ratio"] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    """Print a row per mode; with --json one line of JSON at the end."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.quantization", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=ModelOptions().path)
    parser.add_argument("--modes", default=",".join(MODES), help="the first is what others are compared with")
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--text-tokens", type=int, default=1024)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5, help="0: no speeds")
    parser.add_argument("--threads", type=int, default=0, help="0: what torch chooses")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    if unknown := [mode for mode in modes if mode not in MODES]:
        parser.error(f"--modes: {unknown[0]!r} is none of {', '.join(MODES)}")
    runners = {mode: ModeRunner(arguments.model, mode, arguments.threads) for mode in modes}
    texts = make_texts(Tokenizer(resolve_model(arguments.model)), arguments.texts, arguments.text_tokens)
    rows: dict[str, dict[str, Any]] = {}
    found = quality(runners, texts, arguments.prompt_tokens, arguments.output_tokens)
    batches = [int(batch) for batch in arguments.batches.split(",")]
    speeds = speed(runners, texts, batches, arguments.output_tokens, arguments.rounds) if arguments.rounds else {}
    for mode in modes:
        rows[mode] = {**found[mode], **speeds.get(mode, {})}
        print(mode, *(f"{key} {value}" for key, value in rows[mode].items()), sep="  ", flush=True)
    if arguments.json:
        text = {"source": "pydoc_data.topics", "texts": arguments.texts, "text_tokens": arguments.text_tokens}
        print(json.dumps({"model": arguments.model, "text": text, "modes": rows}))


if __name__ == "__main__":
    main()
