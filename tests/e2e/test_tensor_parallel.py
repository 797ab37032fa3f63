"""Several processes compute one model: the tokens are those of one process, and so are the blocks that others load."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from core.model.parallel import ParallelRunner
from core.model.parallel_loading import load_parallel
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.request import RequestStage
from core.sampling_params import SamplingParams
from tests.e2e.prompts import MODEL, token_prompts
from tests.unit.core.model.support import Driver, random_prompt, save_llama

SMOLLM2_SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "attention_bias": True,
    "mlp_bias": True,
}
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=100, logprobs=5, prompt_logprobs=2)
PROMPT = random_prompt(300, seed=4)
NUM_CACHED_TOKENS = 300 // 16 * 16
NUM_SLOTS = 40  # of staging memory: half of them hold all of PROMPT, so that no save is cut for want of room

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def open_driver() -> Iterator[Callable[..., Driver]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    opened: list[Driver] = []

    def make(*arguments: Any, **keywords: Any) -> Driver:
        opened.append(Driver(*arguments, **keywords))
        return opened[-1]

    yield make
    for driver in opened:
        driver.close()
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("num_ranks", "dtype", "cpu_kernels"), [(2, "float32", "auto"), (2, "bfloat16", "auto"), (3, "float32", "torch")]
)
def test_ranks_have_the_tokens_of_one_and_the_same_bits_in_any_batch(
    tmp_path: Path, open_driver: Callable[..., Driver], num_ranks: int, dtype: str, cpu_kernels: str
) -> None:
    """In bfloat16 the tokens need not be those of one rank: sums that are rounded elsewhere may decide a near-tie otherwise."""
    save_llama(tmp_path, **SMOLLM2_SHAPE)
    one = open_driver(tmp_path, dtype, cpu_kernels=cpu_kernels)
    several = open_driver(tmp_path, dtype, cpu_kernels=cpu_kernels, num_ranks=num_ranks)
    prompts = [random_prompt(length, seed=length) for length in (1, 17, 130, 260)]
    alone = []
    for index, prompt in enumerate(prompts):
        request = several.run_alone(several.add(f"alone {index}", prompt, WITH_LOGPROBS), 6, chunk=10_000)
        alone.append((request, several.kv(request)))
        several.remove(request)
        if dtype == "float32":
            expected = one.run_alone(one.add(f"one {index}", prompt, WITH_LOGPROBS), 6, chunk=10_000)
            assert request.output == expected.output
            assert torch.allclose(alone[-1][1], one.kv(expected), atol=1e-3)
    rng = random.Random(0)
    together = [several.add(f"together {index}", prompt, WITH_LOGPROBS) for index, prompt in enumerate(prompts)]
    while running := [request for request in together if len(request.output) < 6]:
        batch = rng.sample(running, rng.randint(1, len(running)))
        several.step([(r, min(len(r.token_ids) - r.num_computed_tokens, rng.choice((1, 7, 60, 300)))) for r in batch])
    for found, (expected, expected_kv) in zip(together, alone, strict=True):
        assert found.output == expected.output
        assert found.logprobs == expected.logprobs and found.prompt_logprobs == expected.prompt_logprobs
        assert torch.equal(several.kv(found).view(torch.int16), expected_kv.view(torch.int16))
    check_drafts(several, prompts[1], alone[1][0].output)


def check_drafts(driver: Driver, prompt: list[int], output: list[int]) -> None:
    """All ranks hear how many of a step's drafts were kept."""
    drafted = driver.add("drafted", prompt)
    driver.step([(drafted, len(prompt))])
    driver.step([(drafted, 3)], {"drafted": output[1:3]})
    assert drafted.output == output[:4]
    driver.step([(drafted, 2)], {"drafted": [(output[4] + 1) % 320]})
    assert drafted.output == output[:5]
    driver.step([(drafted, 1)])
    assert drafted.output == output


def test_ranks_of_smollm2_with_uneven_heads_have_the_tokens_of_one(open_driver: Callable[..., Driver]) -> None:
    folder = resolve_model(MODEL)
    outputs = []
    for num_ranks in (1, 2):  # 9 heads and 3 KV heads: 6 and 3, 2 and 1
        driver = open_driver(folder, num_blocks=32, num_ranks=num_ranks)
        requests = [driver.add(f"r{index}", prompt) for index, prompt in enumerate(token_prompts()[7:12:2])]
        driver.step([(request, len(request.token_ids)) for request in requests])
        for _ in range(5):
            driver.step([(request, 1) for request in requests])
        outputs.append([request.output for request in requests])
        driver.close()
    assert outputs[0] == outputs[1] and all(len(output) == 6 for output in outputs[0])


class RankEngine:
    """An engine of some ranks over a shm store. num_slots: of staging memory, as if each rank had a device of its own."""

    def __init__(self, folder: Path, store: str, num_ranks: int, num_slots: int = 0) -> None:
        options = EngineOptions(
            kv_load_policy="always",
            lookup_timeout_s=30.0,
            kv_load_timeout_s=60.0,
            kv_save_timeout_s=60.0,
            max_num_batched_tokens=128,
            tensor_parallel_size=num_ranks,
            num_threads=1,
            num_blocks=160,
        )
        description = describe_model(folder, ModelOptions(dtype="float32"), options.block_size)
        layout, clock = description.kv_layout, MonotonicClock()
        self._runner: TorchModelRunner | ParallelRunner
        open_copies = None
        if num_ranks == 1:
            memory = KVPoolMemory(layout, options.num_blocks)
            self._runner = TorchModelRunner.load(folder, description, memory, 1)
        else:
            loaded = load_parallel(folder, description, options, options.num_blocks, num_slots, on_lost=pytest.fail)
            self._runner, memory, open_copies = loaded.runner, loaded.connector_memory, loaded.open_copies
        connector = create_connector("shm", {"name": store, "capacity_bytes": "16MiB"}, clock, open_copies)
        connector.register_kv_cache(memory)
        model = EngineModel(
            namespace=Namespace(description.model_fingerprint, layout.fingerprint, options.block_size),
            layout=layout,
            max_model_len=description.max_model_len,
            vocab_size=description.vocab_size,
            eos_token_ids=(),
        )
        has_thread = num_slots > 0  # as with a device: steps overlap
        self.engine = EngineCore(options, model, options.num_blocks, self._runner, connector, clock, has_model_thread=has_thread)
        self.num_cached_tokens = 0

    def run(self, salt: str, output: list[int], stage: RequestStage) -> list[int]:
        """The tokens that follow PROMPT and output, when all that the request saves is stored."""
        tokens: list[int] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=12)
        self.engine.add_request("request", PROMPT, output, sampling, stage=stage, cache_salt=salt)
        deadline_s = time.monotonic() + 120.0
        while self.engine.has_work():
            assert time.monotonic() < deadline_s, self.engine.audit()
            news = self.engine.step()
            tokens += news.new_token_ids.get("request", [])
            self.num_cached_tokens += sum(news.num_cached_tokens.values())
        return tokens

    def close(self) -> None:
        self.engine.close()
        if isinstance(self._runner, ParallelRunner):
            self._runner.close()


@pytest.mark.parametrize("num_slots", [0, NUM_SLOTS], ids=["in_shared_memory", "each_on_a_device_of_its_own"])
def test_blocks_of_two_ranks_are_read_by_one_and_of_one_by_two(tmp_path: Path, num_slots: int) -> None:
    save_llama(tmp_path, **SMOLLM2_SHAPE)
    store = f"ranks-{os.getpid()}-{num_slots}"
    one, two = RankEngine(tmp_path, store, 1), RankEngine(tmp_path, store, 2, num_slots)
    try:
        expected = one.run("alone", [], RequestStage.DECODE)
        for salt, prefill, decode in (("two to one", two, one), ("one to two", one, two)):
            before = decode.num_cached_tokens
            first = prefill.run(salt, [], RequestStage.PREFILL)
            assert first + decode.run(salt, first, RequestStage.DECODE) == expected
            assert decode.num_cached_tokens - before == NUM_CACHED_TOKENS
        for each in (one, two):
            audit = each.engine.audit()
            assert audit.problems == () and not any(audit.counts.values()), audit
    finally:
        one.close()
        two.close()
