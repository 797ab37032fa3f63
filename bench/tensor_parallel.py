"""The same requests on nodes of one rank and of several: tokens per second, and whether the tokens are the same.

python -m bench.tensor_parallel --model smollm2 --ranks 1,2 --dtypes float32,bfloat16 --batches 1,8,32 --prefill 512 --json

Every rank has one thread, so that a number of ranks is also a number of cores; `threads` beside it says what one process with
that many threads does. Decode: the median step of a batch that has a prompt of --context tokens each. Prefill: one prompt.
equal: how many of the batch's requests have the tokens of the first number of ranks, over --steps greedy tokens. In float32 all
should; in bfloat16 the ranks' sums round differently, so that near-ties may fall otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from core.config import EngineOptions, ModelOptions
from core.kv.pool_memory import KVPoolMemory
from core.model.description import ModelDescription, describe_model
from core.model.parallel import ParallelRunner
from core.model.parallel_loading import load_parallel
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan

BLOCK_SIZE = 16
Runner = TorchModelRunner | ParallelRunner


@dataclass(frozen=True, slots=True)
class Result:
    """One way to run one batch."""

    dtype: str
    num_ranks: int
    threads: int
    batch: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    equal: int = 0


class Steps:
    """Runs whole prompts and decode steps over a runner, with blocks in order."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._step_id = 0

    def run(self, new: list[NewRequest], scheduled: dict[str, int], removed: list[str]) -> tuple[list[list[int]], float]:
        """Sampled tokens by request, and the step's seconds."""
        self._step_id += 1
        plan = StepPlan(self._step_id, scheduled, sum(scheduled.values()), new, {}, removed, [])
        started_s = time.perf_counter()
        result = self._runner.execute(plan)
        return result.sampled_token_ids, time.perf_counter() - started_s


def open_runner(
    folder: Path, description: ModelDescription, num_blocks: int, num_ranks: int, threads: int, timeout_s: float = 60.0
) -> Runner:
    """A runner with a pool of its own."""
    if num_ranks == 1:
        return TorchModelRunner.load(folder, description, KVPoolMemory(description.kv_layout, num_blocks), threads)
    engine = EngineOptions(tensor_parallel_size=num_ranks, num_threads=threads, rank_timeout_s=timeout_s)
    return load_parallel(folder, description, engine, num_blocks).runner


def prompts_of(description: ModelDescription, batch: int, num_tokens: int) -> list[list[int]]:
    """Random tokens, the same for every way to run them."""
    return [random.Random(index).choices(range(3, description.vocab_size), k=num_tokens) for index in range(batch)]


def decode(runner: Runner, prompts: list[list[int]], num_steps: int) -> tuple[list[list[int]], float]:
    """Greedy tokens by request, and the median seconds of a decode step."""
    steps = Steps(runner)
    blocks_each = (len(prompts[0]) + num_steps) // BLOCK_SIZE + 1
    sampling = SamplingParams(temperature=0.0, max_tokens=num_steps + 1)
    outputs = []
    for index, prompt in enumerate(prompts):
        blocks = list(range(index * blocks_each, (index + 1) * blocks_each))
        request = NewRequest(f"r{index}", prompt, len(prompt), 0, blocks, sampling)
        sampled, _ = steps.run([request], {request.request_id: len(prompt)}, [])
        outputs.append(sampled[0])
    durations_s = []
    scheduled = {f"r{index}": 1 for index in range(len(prompts))}
    for _ in range(num_steps):
        sampled, duration_s = steps.run([], scheduled, [])
        durations_s.append(duration_s)
        outputs = [output + tokens for output, tokens in zip(outputs, sampled, strict=True)]
    steps.run([], {}, list(scheduled))
    return outputs, statistics.median(durations_s)


def prefill(runner: Runner, prompt: list[int], num_repeats: int = 3) -> float:
    """The median seconds of one whole prompt in one step."""
    steps = Steps(runner)
    blocks = list(range(len(prompt) // BLOCK_SIZE + 1))
    durations_s = []
    for index in range(num_repeats):
        request = NewRequest(f"p{index}", prompt, len(prompt), 0, blocks, SamplingParams(temperature=0.0))
        durations_s.append(steps.run([request], {request.request_id: len(prompt)}, [])[1])
        steps.run([], {}, [request.request_id])
    return statistics.median(durations_s)


def measure(options: argparse.Namespace) -> list[Result]:
    """Every dtype, number of ranks and batch."""
    folder = resolve_model(options.model)
    ways = [(num_ranks, 1) for num_ranks in options.ranks] + [(1, threads) for threads in options.ranks if threads > 1]
    results = []
    for dtype in options.dtypes:
        description = describe_model(folder, ModelOptions(dtype=dtype), BLOCK_SIZE)
        longest = max(options.context + options.steps, options.prefill)
        num_blocks = max(options.batches) * (longest // BLOCK_SIZE + 2)
        references: dict[int, list[list[int]]] = {}
        for num_ranks, threads in ways:
            runner = open_runner(folder, description, num_blocks, num_ranks, threads)
            try:
                prefill_s = prefill(runner, prompts_of(description, 1, options.prefill)[0])
                for batch in options.batches:
                    outputs, step_s = decode(runner, prompts_of(description, batch, options.context), options.steps)
                    reference = references.setdefault(batch, outputs)
                    equal = sum(ours == theirs for ours, theirs in zip(outputs, reference, strict=True))
                    rates = (round(batch / step_s, 1), round(options.prefill / prefill_s, 1))
                    results.append(Result(dtype, num_ranks, threads, batch, *rates, equal))
                    if not options.json:
                        print(results[-1])
            finally:
                if isinstance(runner, ParallelRunner):
                    runner.close()
    return results


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--ranks", type=numbers, default=[1, 2])
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--batches", type=numbers, default=[1, 8])
    parser.add_argument("--context", type=int, default=64, help="tokens of each request's prompt")
    parser.add_argument("--steps", type=int, default=16, help="decode steps")
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--json", action="store_true", help="one line at the end")
    results = measure(options := parser.parse_args())
    if options.json:
        print(json.dumps([asdict(result) for result in results]))


if __name__ == "__main__":
    main()
