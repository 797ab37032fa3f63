"""The model runner alone: decode and prefill tokens per second, by part of a step, beside the machine's limits and vLLM.

python -m bench.executor --model smollm2 --json [--vllm VENV]

Decoding: prompts of 256 tokens, 128 greedy tokens each, from the first sampled token on. Prefill: one prompt. Ours and vLLM's
(offline, in a process of the virtual environment VENV, with the same threads) take turns; figures are medians over the rounds.
Limits are measured in the same run: memory read by a dot product of two arrays, bf16 products by torch's GEMM, both with
all threads. limit: tokens per second if weights and KV moved at the one rate and products ran at the other, at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.vllm_process import VllmProcess
from core.config import EngineOptions, ModelOptions
from core.kv.pool_memory import KVPoolMemory
from core.model.description import ModelArchitecture, ModelDescription, describe_model
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan

BLOCK_SIZE = 16
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine can do. read_bytes_per_s: memory. flops_per_s: bfloat16 products."""

    read_bytes_per_s: float
    flops_per_s: float

    @classmethod
    def measure(cls) -> Limits:
        """The best of several tries of each."""
        floats = torch.ones(2**26)
        read_s = min(_seconds(lambda: torch.dot(floats[: 2**25], floats[2**25 :])) for _ in range(8))
        left, right = (torch.ones(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
        product_s = min(_seconds(lambda: left @ right) for _ in range(8))
        return cls(floats.numel() * 4 / read_s, 2 * 2048**3 / product_s)


@dataclass(frozen=True, slots=True)
class Work:
    """What the model needs. linear_parameters: of all layers; head_parameters; kv_bytes: of one token."""

    linear_parameters: int
    head_parameters: int
    kv_bytes: int
    attention_width: int  # num_layers * num_heads * head_dim
    dtype_bytes: int

    @classmethod
    def of(cls, architecture: ModelArchitecture, dtype_bytes: int) -> Work:
        """Of a dense Llama."""
        heads, dim = architecture.num_heads, architecture.head_dim
        hidden = architecture.hidden_size
        attention = hidden * dim * (2 * heads + 2 * architecture.num_kv_heads)
        return cls(
            linear_parameters=architecture.num_layers * (attention + 3 * hidden * architecture.intermediate_size),
            head_parameters=hidden * architecture.vocab_size,
            kv_bytes=architecture.num_layers * 2 * architecture.num_kv_heads * dim * dtype_bytes,
            attention_width=architecture.num_layers * heads * dim,
            dtype_bytes=dtype_bytes,
        )

    def decode_limit(self, batch: int, context: float, limits: Limits) -> float:
        """Tokens per second of `batch` requests at `context` tokens each."""
        parameters = self.linear_parameters + self.head_parameters
        read_s = (parameters * self.dtype_bytes + batch * context * self.kv_bytes) / limits.read_bytes_per_s
        flops = batch * (2 * parameters + 4 * context * self.attention_width)
        return batch / max(read_s, flops / limits.flops_per_s)

    def prefill_limit(self, num_tokens: int, limits: Limits) -> float:
        """Prompt tokens per second; each attends to half the prompt on average, and one row goes through the head."""
        per_token = 2 * self.linear_parameters + 2 * num_tokens * self.attention_width
        flops = num_tokens * per_token + 2 * self.head_parameters
        return num_tokens / (flops / limits.flops_per_s)


class Executor:
    """Our runner over a pool of its own, fed with step plans as the scheduler would make them."""

    def __init__(self, model: ModelOptions, num_tokens: int, num_threads: int, engine: EngineOptions) -> None:
        folder = resolve_model(model.path)
        self.description: ModelDescription = describe_model(folder, model, BLOCK_SIZE)
        pool = KVPoolMemory(self.description.kv_layout, num_tokens // BLOCK_SIZE)
        self._runner = TorchModelRunner.load(folder, self.description, pool, num_threads, cpu_kernels=engine.cpu_kernels)
        self._num_steps = 0

    def prefill(self, num_tokens: int) -> float:
        """Seconds of one prompt in one step."""
        started = time.perf_counter()
        self._start(1, num_tokens)
        seconds = time.perf_counter() - started
        self._drop(1)
        return seconds

    def decode(self, batch: int) -> float:
        """Seconds from the first sampled tokens to the last, of OUTPUT_TOKENS - 1 steps."""
        self._start(batch, PROMPT_TOKENS)
        names = [f"r{index}" for index in range(batch)]
        started = time.perf_counter()
        for _ in range(OUTPUT_TOKENS - 1):
            self._execute(StepPlan(self._num_steps, dict.fromkeys(names, 1), batch, [], {}, [], []))
        seconds = time.perf_counter() - started
        self._drop(batch)
        return seconds

    def part_seconds(self) -> dict[str, float]:
        """Seconds by part since the last call; empty where the runner does not know them."""
        return self._runner.take_part_seconds()

    def _start(self, batch: int, num_tokens: int) -> None:
        per_request = -(-(num_tokens + OUTPUT_TOKENS) // BLOCK_SIZE)
        rng = random.Random(num_tokens)
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        for index in range(batch):
            tokens = [rng.randrange(100, 40000) for _ in range(num_tokens)]
            table = list(range(index * per_request, (index + 1) * per_request))
            request = NewRequest(f"r{index}", tokens, num_tokens, 0, table, sampling)
            self._execute(StepPlan(self._num_steps, {f"r{index}": num_tokens}, num_tokens, [request], {}, [], []))

    def _drop(self, batch: int) -> None:
        self._execute(StepPlan(self._num_steps, {}, 0, [], {}, [f"r{index}" for index in range(batch)], []))

    def _execute(self, plan: StepPlan) -> None:
        self._num_steps += 1
        self._runner.execute(plan)


def measure(ours: Executor, theirs: VllmProcess | None, batches: list[int], prompts: list[int], rounds: int) -> dict[str, Any]:
    """tokens/s of both by kind and size, medians, and where our time goes."""
    found: dict[str, dict[str, Any]] = {}
    kinds = [("decode", size) for size in batches] + [("prefill", size) for size in prompts]
    for kind, size in kinds:
        num_tokens = size * (OUTPUT_TOKENS - 1) if kind == "decode" else size
        seconds: list[float] = []
        vllm_seconds: list[float] = []
        getattr(ours, kind)(size)  # warm
        ours.part_seconds()
        for _ in range(rounds):
            seconds.append(getattr(ours, kind)(size))
            if theirs is not None:
                vllm_seconds.append(theirs.measure(kind, size))
        parts = ours.part_seconds()
        row: dict[str, Any] = {"tokens_per_s": round(num_tokens / statistics.median(seconds), 1)}
        if parts:
            # The prompts of a decoding batch are in it, too: shares are of all that ran.
            total = sum(parts.values())
            row["parts"] = {name: round(value / total, 3) for name, value in parts.items()}
        if vllm_seconds:
            row["vllm_tokens_per_s"] = round(num_tokens / statistics.median(vllm_seconds), 1)
            row["ratio"] = round(statistics.median(b / a for a, b in zip(seconds, vllm_seconds, strict=True)), 2)
        found[f"{kind} {size}"] = row
        print(f"{kind} {size}:", *(f"{name} {value}" for name, value in row.items()), flush=True)
    return found


def _seconds(work: Any) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main() -> None:
    """Command line; see the module's docstring."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="python -m bench.executor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--cpu-kernels", default=EngineOptions().cpu_kernels, help="auto, native or torch")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=numbers, default="1,8,32")
    parser.add_argument("--prompts", type=numbers, default="512,2048")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", type=Path, help="virtual environment with vLLM for CPUs, to measure in turns")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    limits = Limits.measure()
    print(f"memory {limits.read_bytes_per_s / 1e9:.1f} GB/s, bf16 products {limits.flops_per_s / 1e9:.0f} GFLOP/s", flush=True)
    num_tokens = max(max(arguments.batches) * (PROMPT_TOKENS + OUTPUT_TOKENS), max(arguments.prompts) + OUTPUT_TOKENS)
    ours = Executor(
        ModelOptions(path=arguments.model, dtype=arguments.dtype),
        num_tokens + BLOCK_SIZE,
        arguments.threads,
        EngineOptions(cpu_kernels=arguments.cpu_kernels),
    )
    theirs = None
    if arguments.vllm is not None:
        theirs = VllmProcess(arguments.vllm, resolve_model(arguments.model), arguments.dtype, arguments.threads)
    try:
        rows = measure(ours, theirs, arguments.batches, arguments.prompts, arguments.rounds)
    finally:
        if theirs is not None:
            theirs.close()
    work = Work.of(ours.description.architecture, {"bfloat16": 2, "float16": 2, "float32": 4}[arguments.dtype])
    for name, row in rows.items():
        kind, size = name.split()
        context = PROMPT_TOKENS + OUTPUT_TOKENS / 2
        limit = work.decode_limit(int(size), context, limits) if kind == "decode" else work.prefill_limit(int(size), limits)
        row["share_of_limit"] = round(row["tokens_per_s"] / limit, 3)
        print(f"{name}: {row['tokens_per_s']} of {limit:.0f} tokens/s, {row['share_of_limit']:.0%}")
    if arguments.json:
        print(
            json.dumps(
                {
                    "decode_tokens_per_s": {str(size): rows[f"decode {size}"]["tokens_per_s"] for size in arguments.batches},
                    "prefill_tokens_per_s": {str(size): rows[f"prefill {size}"]["tokens_per_s"] for size in arguments.prompts},
                    "read_bytes_per_s": limits.read_bytes_per_s,
                    "bf16_flops_per_s": limits.flops_per_s,
                    "rows": rows,
                }
            )
        )


if __name__ == "__main__":
    main()
