"""What codecs and encryption at rest cost and save on a real model's KV, and what lossy ones do to its output.

python -m bench.codecs --json

Prompts are pieces of Python's own documentation. Each is computed once. Its full blocks are then encoded and decoded as a store
would do it, and the answer is generated, greedily, from what came back: what a decode node does after a handoff. Perplexity is of
the text that really follows, given the same blocks.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from connectors.coding.block_cipher import BlockCipher
from connectors.coding.block_coding import BlockCoding
from connectors.coding.codec import Codec
from connectors.coding.quantized import Fp8Codec, Int8Codec
from connectors.coding.zstd import ZstdCodec
from connectors.stored_block import BlockCheck
from core.config import ModelOptions
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan
from router.tokenizer import Tokenizer

BLOCK_SIZE = 16
NUM_PREFIX_BLOCKS = 16  # what a store has of each prompt
TAIL_TOKENS = 7  # of the prompt behind it
NUM_TIMED_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A piece of text: prefix and tail are computed, what follows is compared with. blocks: of prefix, tail and answer."""

    token_ids: list[int]
    following: list[int]
    blocks: list[int]

    @property
    def prefix_blocks(self) -> list[int]:
        return self.blocks[:NUM_PREFIX_BLOCKS]


def codings(layout: KVLayout) -> dict[str, BlockCoding]:
    """By name, as the tables have them."""
    cipher = BlockCipher(bytes(32))
    codecs: dict[str, tuple[Codec | None, BlockCipher | None]] = {
        "none": (None, None),
        "zstd, level 1": (ZstdCodec(layout.dtype, 1), None),
        "zstd, level 3": (ZstdCodec(layout.dtype, 3), None),
        "zstd, level 9": (ZstdCodec(layout.dtype, 9), None),
        "int8": (Int8Codec(layout), None),
        "fp8": (Fp8Codec(layout), None),
        "encrypted": (None, cipher),
        "zstd, level 1, encrypted": (ZstdCodec(layout.dtype, 1), cipher),
    }
    return {name: BlockCoding(layout, *pair) for name, pair in codecs.items()}


class Bench:
    """The model, its pool, and prompts whose KV lies in it."""

    def __init__(self, num_prompts: int, num_answer_tokens: int, first: int = 0) -> None:
        folder = resolve_model("smollm2")
        described = describe_model(folder, ModelOptions(), BLOCK_SIZE)
        self.layout = described.kv_layout
        self._num_answer_tokens = num_answer_tokens
        num_prompt_tokens = NUM_PREFIX_BLOCKS * BLOCK_SIZE + TAIL_TOKENS
        blocks_each = -(-(num_prompt_tokens + num_answer_tokens) // BLOCK_SIZE)
        self.pool = KVPoolMemory(self.layout, num_prompts * blocks_each)
        self.runner = TorchModelRunner.load(folder, described, self.pool)
        tokenizer = Tokenizer(folder)
        topics = sorted(pydoc_data.topics.topics.values(), key=len, reverse=True)
        self.prompts = []
        for number in range(num_prompts):
            ids = tokenizer.encode(topics[first + number], add_special_tokens=False)
            following = ids[num_prompt_tokens : num_prompt_tokens + num_answer_tokens]
            assert len(following) == num_answer_tokens, "too short a text"
            own = list(range(number * blocks_each, (number + 1) * blocks_each))
            self.prompts.append(Prompt(ids[:num_prompt_tokens], following, own))
        for prompt in self.prompts:
            self._run({"p": (prompt.token_ids, 0, len(prompt.token_ids), prompt.blocks, GREEDY)})
        self.exact = {block: bytes(self.pool.block(block)) for prompt in self.prompts for block in prompt.prefix_blocks}

    def restore(self, coding: BlockCoding) -> None:
        """Give every stored block what comes back from a store with this coding."""
        for block, payload in self.exact.items():
            sealed = coding.seal(bytes(16), memoryview(payload))
            assert sealed is not None
            check = coding.unseal(sealed[0], memoryview(sealed[1]), bytes(16), self.pool.block(block))
            assert check is BlockCheck.OK

    def answers(self) -> list[list[int]]:
        """Greedy answers to all prompts, from the stored blocks on."""
        prefix = NUM_PREFIX_BLOCKS * BLOCK_SIZE
        requests = {
            str(number): (prompt.token_ids, prefix, TAIL_TOKENS, prompt.blocks, GREEDY)
            for number, prompt in enumerate(self.prompts)
        }
        answers = [list(tokens) for tokens in self._run(requests, keep=True)[0]]
        for _ in range(self._num_answer_tokens - 1):
            plan = StepPlan(0, dict.fromkeys(requests, 1), len(requests), [], {}, [], [])
            for answer, tokens in zip(answers, self.runner.execute(plan).sampled_token_ids, strict=True):
                answer += tokens
        self.runner.execute(StepPlan(0, {}, 0, [], {}, list(requests), []))
        return answers

    def logprobs(self) -> list[float]:
        """Of each token of the texts that follow the prompts."""
        found = []
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
        prefix = NUM_PREFIX_BLOCKS * BLOCK_SIZE
        for prompt in self.prompts:
            ids = prompt.token_ids + prompt.following
            logprobs = self._run({"p": (ids, prefix, len(ids) - prefix, prompt.blocks, sampling)})[1]["p"]
            found += [entry.logprob for entry in logprobs[-len(prompt.following) :]]
        return found

    def _run(self, requests: dict[str, tuple[list[int], int, int, list[int], SamplingParams]], keep: bool = False) -> Any:
        new = [
            NewRequest(name, list(ids), len(ids), computed, list(blocks), sampling)
            for name, (ids, computed, _, blocks, sampling) in requests.items()
        ]
        scheduled = {name: num_tokens for name, (_, _, num_tokens, _, _) in requests.items()}
        result = self.runner.execute(StepPlan(0, scheduled, sum(scheduled.values()), new, {}, [], []))
        if not keep:
            self.runner.execute(StepPlan(0, {}, 0, [], {}, list(requests), []))
        return result.sampled_token_ids, result.prompt_logprobs


def speed(bench: Bench, coding: BlockCoding) -> dict[str, float]:
    """Ratio of bytes in the pool to bytes at rest, and GB/s of the pool's bytes on one thread, checksums included."""
    blocks = list(bench.exact.values())[:: max(1, len(bench.exact) // NUM_TIMED_BLOCKS)]
    name, target = bytes(16), memoryview(bytearray(bench.layout.block_bytes))

    def seal_all() -> list[Any]:
        return [coding.seal(name, memoryview(payload)) for payload in blocks]

    sealed = seal_all()
    seal_s = _best_s(seal_all)
    unseal_s = _best_s(lambda: [coding.unseal(header, memoryview(at_rest), name, target) for header, at_rest in sealed])
    num_bytes = len(blocks) * bench.layout.block_bytes
    return {
        "ratio": round(num_bytes / sum(64 + len(at_rest) for _, at_rest in sealed), 3),
        "save_gbps": round(num_bytes / seal_s / 1e9, 2),
        "load_gbps": round(num_bytes / unseal_s / 1e9, 2),
    }


def effect(bench: Bench, coding: BlockCoding, exact: tuple[list[list[int]], list[float]]) -> dict[str, float]:
    """What differs from the exact answers, and from the exact perplexity."""
    bench.restore(coding)
    answers, logprobs = bench.answers(), bench.logprobs()
    first = [
        next((place for place, pair in enumerate(zip(*pair_of, strict=True)) if pair[0] != pair[1]), len(pair_of[0]))
        for pair_of in zip(answers, exact[0], strict=True)
    ]
    length = len(exact[0][0])
    return {
        "same_answers": round(sum(place == length for place in first) / len(first), 3),
        "median_first_difference": statistics.median(first),
        "same_next_token": round(sum(place > 0 for place in first) / len(first), 3),
        "perplexity": round(math.exp(-statistics.fmean(logprobs)), 4),
        "perplexity_exact": round(math.exp(-statistics.fmean(exact[1])), 4),
        "mean_abs_logprob_change": round(statistics.fmean(abs(a - b) for a, b in zip(logprobs, exact[1], strict=True)), 4),
    }


def _best_s(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - started_s)
    return min(times)


def main() -> None:
    """Print the figures, as one line of JSON with --json."""
    parser = argparse.ArgumentParser(prog="python -m bench.codecs", description=__doc__)
    parser.add_argument("--prompts", type=int, default=24, help="texts (default %(default)s)")
    parser.add_argument("--answer-tokens", type=int, default=32, help="greedy tokens per text (default %(default)s)")
    parser.add_argument("--speed-only", action="store_true", help="ratios and speeds; a few prompts are enough")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    bench = Bench(arguments.prompts, arguments.answer_tokens)
    by_name = codings(bench.layout)
    figures: dict[str, dict[str, float]] = {name: speed(bench, coding) for name, coding in by_name.items()}
    if not arguments.speed_only:
        bench.restore(by_name["none"])
        exact = (bench.answers(), bench.logprobs())
        for name in ("int8", "fp8"):
            figures[name] |= effect(bench, by_name[name], exact)
    if arguments.json:
        print(json.dumps(figures))
        return
    for name, row in figures.items():
        print(f"{name:>26}  " + "  ".join(f"{key} {value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
