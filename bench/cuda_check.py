"""Whether the CUDA backend computes right, and how fast: for a machine with a GPU, in three minutes at most.

python -m bench.cuda_check --model MODEL

Serves the same requests with the backend that CUDA gets (a library's attention, CUDA graphs for decode) and with the plain one on
the same device: log-probabilities of greedy tokens must agree within --tolerance up to where the sequences part, which rounding
may make them do. Then decode tokens/s at batch 1, 8 and 32, with graphs and without, and prefill tokens/s. With
--batch-invariant it also checks that a request alone gives the bits that it gives in the batch. Exit code 0: right; 1: wrong; 2:
no CUDA.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import sys
import time
from pathlib import Path

import torch

from core.config import ModelOptions
from core.model.attention_torch import TorchAttention
from core.model.cuda_graphs import CudaRecorder
from core.model.description import ModelDescription, describe_model
from core.model.device_pool import DevicePool, find_device
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan, TokenLogprob

BLOCK_SIZE = 16
NUM_BLOCKS = 4096
MAX_SECONDS = 170.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=4096, ignore_eos=True)


@dataclasses.dataclass
class Served:
    """What a request gave."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprob] = dataclasses.field(default_factory=list)


class Steps:
    """Runs requests through a runner: prompts in one step each, then all decode together. Blocks in random order."""

    def __init__(self, runner: TorchModelRunner) -> None:
        self._runner = runner
        self._ids = itertools.count()

    def serve(self, prompts: list[list[int]], num_output: int, sampling: SamplingParams) -> tuple[list[Served], float, float]:
        """Results, and the seconds of prefill and of decode."""
        blocks = random.Random(1).sample(range(NUM_BLOCKS), NUM_BLOCKS)
        served = {f"r{i}": Served() for i in range(len(prompts))}
        began_s = _now_s()
        for (request_id, result), prompt in zip(served.items(), prompts, strict=True):
            own = [blocks.pop() for _ in range(-(-(len(prompt) + num_output) // BLOCK_SIZE))]
            new = NewRequest(request_id, prompt, len(prompt), 0, own, sampling, None)
            self._step({request_id: len(prompt)}, [new], [], {request_id: result})
        decoding_s = _now_s()
        for _ in range(num_output - 1):
            self._step(dict.fromkeys(served, 1), [], [], served)
        ended_s = _now_s()
        self._step({}, [], list(served), {})
        return list(served.values()), decoding_s - began_s, ended_s - decoding_s

    def _step(self, scheduled: dict[str, int], new: list[NewRequest], removed: list[str], served: dict[str, Served]) -> None:
        plan = StepPlan(next(self._ids), scheduled, sum(scheduled.values()), new, {}, removed, [], 0, {})
        result = self._runner.execute(plan)
        for request_id, tokens in zip(scheduled, result.sampled_token_ids, strict=True):
            served[request_id].token_ids += tokens
            served[request_id].logprobs += result.logprobs.get(request_id, [])


def largest_difference(found: list[Served], expected: list[Served]) -> tuple[float, float]:
    """The largest difference of log-probabilities while the tokens before are the same, and the share of tokens that are."""
    worst, num_same, num_all = 0.0, 0, 0
    for one, other in zip(found, expected, strict=True):
        num_all += len(one.token_ids)
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            if mine.token_id != theirs.token_id:
                break  # from here on they are different texts
            num_same += 1
            worst = max(worst, abs(mine.logprob - theirs.logprob))
    return worst, num_same / num_all


def _load(folder: Path, description: ModelDescription, device: torch.device, is_batch_invariant: bool) -> TorchModelRunner:
    pool = DevicePool.allocate(description.kv_layout, NUM_BLOCKS, device)
    return TorchModelRunner.load(folder, description, pool, is_batch_invariant=is_batch_invariant)


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def check(arguments: argparse.Namespace) -> dict[str, object]:
    """Load twice (the plain backend and CUDA's), compare, measure."""
    began_s = time.perf_counter()
    device = find_device("cuda")
    folder = resolve_model(arguments.model)
    description = describe_model(folder, ModelOptions(path=arguments.model, dtype=arguments.dtype), BLOCK_SIZE)
    rng = random.Random(3)
    prompts = [[rng.randrange(100, description.vocab_size) for _ in range(rng.choice((5, 200, 700)))] for _ in range(12)]
    asking = dataclasses.replace(GREEDY, logprobs=0)
    runner = _load(folder, description, device, arguments.batch_invariant)
    attention = runner._attention
    heads = (description.architecture.num_heads, description.architecture.num_kv_heads)
    runner._attention = runner._model._attention = TorchAttention(BLOCK_SIZE, *heads, device)
    expected, _, _ = Steps(runner).serve(prompts, 32, asking)
    runner._attention = runner._model._attention = attention
    eager, _, _ = Steps(runner).serve(prompts, 32, asking)
    result: dict[str, object] = {"device": torch.cuda.get_device_name(device), "library": attention._library.name}  # type: ignore[attr-defined]
    rates: dict[str, object] = {}
    for name in ("eager", "graphs"):
        if name == "graphs":
            runner.use_decode_graphs(CudaRecorder(device), 32, description.max_model_len)
        for batch in (1, 8, 32):
            if time.perf_counter() - began_s > MAX_SECONDS:
                break
            some = [prompts[0][:64] or [5]] * batch
            Steps(runner).serve(some, 8, GREEDY)  # records, and lets kernels be chosen
            _, _, decode_s = Steps(runner).serve(some, arguments.output_tokens, GREEDY)
            rates[f"{name} {batch}"] = round(batch * (arguments.output_tokens - 1) / decode_s, 1)
    graphs, _, _ = Steps(runner).serve(prompts, 32, asking)
    long_prompt = [[rng.randrange(100, description.vocab_size) for _ in range(min(2048, description.max_model_len - 2))]]
    Steps(runner).serve(long_prompt, 1, GREEDY)
    _, prefill_s, _ = Steps(runner).serve(long_prompt, 1, GREEDY)
    result |= {"decode_tokens_per_s": rates, "prefill_tokens_per_s": round(len(long_prompt[0]) / prefill_s, 1)}
    for name, found in (("eager", eager), ("graphs", graphs)):
        worst, share = largest_difference(found, expected)
        result |= {f"{name}_largest_difference": round(worst, 5), f"{name}_same_tokens": round(share, 4)}
    if arguments.batch_invariant:
        alone = [Steps(runner).serve([prompt], 32, asking)[0][0] for prompt in prompts[:4]]
        result["is_batch_invariant"] = all(one == other for one, other in zip(alone, graphs, strict=False))
    worst = max(float(str(result[f"{name}_largest_difference"])) for name in ("eager", "graphs"))
    result["is_right"] = worst <= arguments.tolerance and result.get("is_batch_invariant", True)
    return result | {"seconds": round(time.perf_counter() - began_s, 1)}


def main(argv: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=ModelOptions().path)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--tolerance", type=float, default=0.1, help="of log-probabilities, in 16-bit floats")
    arguments = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench.cuda_check: torch finds no CUDA device, so there is nothing to check", file=sys.stderr)
        return 2
    result = check(arguments)
    print(json.dumps(result))
    return 0 if result["is_right"] else 1


if __name__ == "__main__":
    sys.exit(main())
