"""Small random Llamas on disk, and a driver that runs requests through a TorchModelRunner in any chunks, blocks and batches."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.adapter_files import read_adapter
from core.config import EngineOptions, ModelOptions
from core.kv.pool_memory import KVPoolMemory
from core.model.description import ModelDescription, describe_model
from core.model.parallel import ParallelRunner
from core.model.parallel_loading import load_parallel
from core.model.runner import TorchModelRunner, kv_cache_views
from core.sampling_params import SamplingParams
from core.step import AdapterLoad, NewRequest, StepPlan, StepResult, TokenLogprob

BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=100)
TINY = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def save_llama(folder: Path, max_shard_size: str = "1GB", seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Write a random Llama with a stub tokenizer.json into `folder`; returns the float32 transformers model."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TINY, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    (folder / "tokenizer.json").write_text("{}")
    return model


@dataclass
class Request:
    """A request being driven, with its blocks and everything that the runner returned for it."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    is_known: bool = False
    adapter: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class Driver:
    """A scheduler's stand-in: blocks in random order, any number of tokens per request and step."""

    def __init__(
        self,
        folder: Path,
        dtype: str = "float32",
        num_blocks: int = 256,
        seed: int = 0,
        options: ModelOptions | None = None,
        cpu_kernels: str = "auto",
        num_ranks: int = 1,
        **engine_options: Any,
    ) -> None:
        """options: others than the defaults, instead of dtype. num_ranks: with more than one, close() ends the other processes.
        engine_options: of the engine and load_parallel.
        """
        self.description: ModelDescription = describe_model(folder, options or ModelOptions(dtype=dtype), BLOCK_SIZE)
        self.runner: TorchModelRunner | ParallelRunner
        if num_ranks == 1:
            self.pool = KVPoolMemory(self.description.kv_layout, num_blocks)
            self.runner = TorchModelRunner.load(folder, self.description, self.pool, 0, cpu_kernels=cpu_kernels)
        else:
            on_lost = engine_options.pop("on_lost", pytest.fail)
            engine = EngineOptions(tensor_parallel_size=num_ranks, num_threads=1, cpu_kernels=cpu_kernels, **engine_options)
            parallel = load_parallel(folder, self.description, engine, num_blocks, on_lost=on_lost)
            self.pool, self.runner = parallel.connector_memory, parallel.runner
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)
        self._step_id = 0
        self._removed: list[str] = []
        self._poison()

    def _poison(self) -> None:
        """Fill the pool with NaN: whoever reads what was not written, shows."""
        for caches in kv_cache_views(self.pool):
            for cache in caches:
                cache.fill_(0xFF if cache.dtype is torch.uint8 else float("nan"))  # NaN in fp8, and as int8's scale

    def close(self) -> None:
        """End what other processes there are."""
        if isinstance(self.runner, ParallelRunner):
            self.runner.close()

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams = GREEDY, adapter: str = "") -> Request:
        return Request(request_id, list(prompt), len(prompt), sampling, adapter=adapter)

    def load_adapter(self, folder: Path) -> str:
        """Bring an adapter into the runner's memory; what requests call it."""
        adapter = read_adapter(str(folder)).fingerprint.hex()
        self.runner.adapters.start_load(adapter, str(folder))
        while not (loads := self.runner.adapters.poll_loads()):
            time.sleep(0.001)
        assert loads == [AdapterLoad(adapter)], loads
        return adapter

    def remove(self, request: Request) -> None:
        """Finish or preempt: its blocks are free, and its tokens must be computed again if it returns."""
        self._free = request.block_ids + self._free
        request.block_ids, request.num_computed_tokens, request.is_known = [], 0, False
        self._removed.append(request.request_id)

    def step(self, shares: list[tuple[Request, int]], drafts: dict[str, list[int]] | None = None) -> StepResult:
        """Compute some tokens of some requests; sampled tokens are appended to them. drafts: the last of a request's tokens."""
        new, more = [], {}
        drafts = drafts or {}
        for request, num_tokens in shares:
            lacking = -(-(request.num_computed_tokens + num_tokens) // BLOCK_SIZE) - len(request.block_ids)
            blocks = [self._free.pop() for _ in range(max(lacking, 0))]
            request.block_ids = request.block_ids + blocks
            if not request.is_known:
                new.append(
                    NewRequest(
                        request.request_id,
                        list(request.token_ids),
                        request.num_prompt_tokens,
                        request.num_computed_tokens,
                        list(request.block_ids),
                        request.sampling,
                        self.runner.adapters.find(request.adapter) if request.adapter else None,
                    )
                )
                request.is_known = True
            elif blocks:
                more[request.request_id] = blocks
        scheduled = {request.request_id: num_tokens for request, num_tokens in shares}
        plan = StepPlan(self._step_id, scheduled, sum(scheduled.values()), new, more, self._removed, [], 0, drafts)
        self._removed = []
        self._step_id += 1
        result = self.runner.execute(plan)
        for (request, num_tokens), sampled in zip(shares, result.sampled_token_ids, strict=True):
            guessed = drafts.get(request.request_id, [])
            request.num_computed_tokens += num_tokens
            assert bool(sampled) == (request.num_computed_tokens - len(guessed) == len(request.token_ids))
            assert not sampled or sampled[:-1] == guessed[: len(sampled) - 1]
            request.token_ids += sampled
            request.num_computed_tokens -= len(guessed) + 1 - len(sampled) if sampled else 0
            request.logprobs += result.logprobs.get(request.request_id, [])
            request.prompt_logprobs += result.prompt_logprobs.get(request.request_id, [])
        return result

    def run_alone(self, request: Request, num_output_tokens: int, chunk: int) -> Request:
        """Compute the known tokens in chunks, then decode."""
        while len(request.output) < num_output_tokens:
            remaining = len(request.token_ids) - request.num_computed_tokens
            self.step([(request, min(chunk, remaining))])
        return request

    def kv(self, request: Request) -> torch.Tensor:
        """A copy of the request's KV, [layers, 2, num_computed_tokens, kv_heads, head_dim]."""
        blocks = torch.tensor(request.block_ids)
        layers = [
            torch.stack([cache[blocks].flatten(0, 1)[: request.num_computed_tokens] for cache in caches])
            for caches in kv_cache_views(self.pool)
        ]
        return torch.stack(layers)


def random_prompt(num_tokens: int, seed: int, vocab_size: int = 320) -> list[int]:
    """Tokens that are not special."""
    return random.Random(seed).choices(range(3, vocab_size), k=num_tokens)
