"""Engines whose KV is in a device's memory, over a store that others share: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import EngineOptions, ModelOptions
from core.engine import EngineCore
from core.engine_model import EngineModel
from core.kv.hashing import Namespace
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.device_pool import DevicePool
from core.model.runner import TorchModelRunner
from core.request import RequestStage
from core.sampling_params import SamplingParams
from tests.unit.core.model.support import random_prompt, save_llama

OPTIONS = EngineOptions(kv_load_policy="always", max_num_batched_tokens=128)
NUM_BLOCKS = 160
NUM_SLOTS = 6  # fewer than a chunk fills
PROMPT = random_prompt(300, seed=4)
NUM_FULL_BLOCKS = 300 // OPTIONS.block_size


class DeviceEngine:
    """One engine on a device, with a staging pool of NUM_SLOTS and a store of its cluster's."""

    def __init__(self, folder: Path, device: torch.device, store: str) -> None:
        description = describe_model(folder, ModelOptions(dtype="float32"), OPTIONS.block_size)
        layout, clock = description.kv_layout, MonotonicClock()
        pool = DevicePool.allocate(layout, NUM_BLOCKS, device)
        connector = create_connector("shm", {"name": store, "capacity_bytes": "16MiB"}, clock, pool.open_copies)
        connector.register_kv_cache(KVPoolMemory(layout, NUM_SLOTS))
        model = EngineModel(
            namespace=Namespace(description.model_fingerprint, layout.fingerprint, OPTIONS.block_size),
            layout=layout,
            max_model_len=description.max_model_len,
            vocab_size=description.vocab_size,
            eos_token_ids=(),
        )
        runner = TorchModelRunner.load(folder, description, pool)
        self.engine = EngineCore(OPTIONS, model, NUM_BLOCKS, runner, connector, clock)
        self.num_cached_tokens = 0

    def run(self, prompt: list[int], output: list[int], stage: RequestStage) -> list[int]:
        """The tokens that follow, when all that the request saves is stored."""
        tokens: list[int] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        self.engine.add_request("request", prompt, output, sampling, stage=stage)
        deadline_s = time.monotonic() + 60.0
        while self.engine.has_work():
            assert time.monotonic() < deadline_s, self.engine.audit()
            news = self.engine.step()
            tokens += news.new_token_ids.get("request", [])
            self.num_cached_tokens += sum(news.num_cached_tokens.values())
        return tokens


@pytest.fixture(params=["cpu", "cuda"], ids=["on_the_cpu", "where_there_is_a_gpu"])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    return torch.device(request.param)


@pytest.fixture
def engines(tmp_path: Path, device: torch.device) -> Iterator[list[DeviceEngine]]:
    save_llama(tmp_path)
    opened = [DeviceEngine(tmp_path, device, f"staged-{os.getpid()}-{device.type}") for _ in range(2)]
    yield opened
    for one in opened:
        one.engine.close()


def test_handoff_between_engines_on_a_device_is_a_prefix_hit_and_exact(engines: list[DeviceEngine]) -> None:
    prefill, decode = engines
    first = prefill.run(PROMPT, [], RequestStage.PREFILL)
    handed_over = decode.run(PROMPT, first, RequestStage.DECODE)
    assert decode.num_cached_tokens == NUM_FULL_BLOCKS * OPTIONS.block_size
    assert prefill.engine.try_reset_prefix_cache()
    again = prefill.run(PROMPT, [], RequestStage.DECODE)  # loads what it saved, and computes the rest
    assert first + handed_over == again and len(again) == 12
    for one in engines:
        audit = one.engine.audit()
        assert audit.problems == () and not any(audit.counts.values())
