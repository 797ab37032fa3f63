"""What overlapped steps and drafts bring with a real model, in one process, without a network or a store.

python -m bench.stepping --json

Each round serves the same greedy requests four times, in random order: steps one after the other, overlapped, and with drafts;
ratios are medians over rounds of tokens per second against the first. "Repeating" prompts are Python's documentation, whose
greedy continuation repeats words of the prompt, as summaries, code and extraction do; "plain" ones are random tokens.
"""

from __future__ import annotations

import argparse
import json
import pydoc_data.topics
import random
import statistics
import time
from typing import Any

from core.clock import MonotonicClock
from core.config import EngineOptions, ModelOptions
from core.engine import EngineCore
from core.model.loading import LoadedModel, load_model
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from router.tokenizer import Tokenizer

MODES: dict[str, dict[str, Any]] = {
    "one after the other": {"overlap_steps": "off"},
    "overlapped": {"overlap_steps": "on"},
    "drafts in small batches": {"num_speculative_tokens": 4},
    "drafts": {"num_speculative_tokens": 4, "speculative_disable_by_batch_size": 1024},
}


def make_prompts(kind: str, num_prompts: int, num_tokens: int, tokenizer: Tokenizer) -> list[list[int]]:
    """num_prompts prompts of num_tokens tokens."""
    rng = random.Random(num_prompts)
    if kind == "plain":
        return [[rng.randrange(100, 40000) for _ in range(num_tokens)] for _ in range(num_prompts)]
    texts = [text for text in pydoc_data.topics.topics.values() if len(text) > 8 * num_tokens]
    return [tokenizer.encode(text, add_special_tokens=False)[:num_tokens] for text in rng.choices(texts, k=num_prompts)]


def serve(loaded: LoadedModel, options: EngineOptions, prompts: list[list[int]], num_output: int) -> dict[str, float]:
    """All prompts at once, to the end. Seconds are counted from the first sampled token on."""
    engine = EngineCore(
        options,
        loaded.model,
        loaded.num_blocks,
        loaded.runner,
        None,
        MonotonicClock(),
        has_model_thread=options.overlaps_steps,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(f"r{index}", prompt, [], sampling)
    while engine.num_waiting_tokens() > len(prompts):
        engine.step()
    started_s, num_before, num_steps = time.perf_counter(), engine.stats.num_generation_tokens, engine.stats.num_steps
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - started_s
    engine.step()  # the runner forgets the requests
    engine.close()
    stats = engine.stats
    return {
        "tokens_per_s": (stats.num_generation_tokens - num_before) / seconds,
        "steps": stats.num_steps - num_steps,
        "drafted": stats.num_draft_tokens,
        "accepted": sum(stats.accepted_by_position.values()),
    }


def main() -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelOptions().path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    options = {name: EngineOptions(kv_pool_mib=512, **mode) for name, mode in MODES.items()}
    loaded = load_model(ModelOptions(path=arguments.model, dtype=arguments.dtype), options["overlapped"])
    tokenizer = Tokenizer(resolve_model(arguments.model))
    rows = []
    for kind in ("plain", "repeating"):
        for batch in map(int, arguments.batches.split(",")):
            prompts = make_prompts(kind, batch, arguments.prompt_tokens, tokenizer)
            rounds: dict[str, list[dict[str, float]]] = {name: [] for name in MODES}
            for place in range(arguments.rounds + 1):
                for name in random.Random(place).sample(list(MODES), len(MODES)):
                    rounds[name].append(serve(loaded, options[name], prompts, arguments.output_tokens))
            for name, found in rounds.items():
                pairs = zip(found[1:], rounds["one after the other"][1:], strict=True)  # the first round warms up
                rows.append(
                    {
                        "text": kind,
                        "batch": batch,
                        "mode": name,
                        "tokens_per_s": round(statistics.median(one["tokens_per_s"] for one in found[1:]), 1),
                        "ratio": round(statistics.median(one["tokens_per_s"] / base["tokens_per_s"] for one, base in pairs), 3),
                        **{key: found[-1][key] for key in ("steps", "drafted", "accepted")},
                    }
                )
                print(*(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if arguments.json:
        print(json.dumps({"prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens, "rows": rows}))


if __name__ == "__main__":
    main()
