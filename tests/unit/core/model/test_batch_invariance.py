"""A token's KV and logits are bit-identical whatever shares its batch, however its sequence is cut, in whichever blocks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from core.sampling_params import SamplingParams
from tests.unit.core.model.support import Driver, Request, random_prompt, save_llama

CHUNKS = (1, 7, 37, 100, 512, 10_000)
DTYPES = ("float32", "bfloat16", "float16")
KERNELS = [("native", "float32"), ("native", "bfloat16"), *(("torch", dtype) for dtype in DTYPES)]
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=100, logprobs=5, prompt_logprobs=2)
# Head counts and widths with every kind of remainder: groups of 3, 1 and 8; widths that are no multiple of a vector.
SHAPES = {
    "tiny": {},
    "smollm2": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
    "odd": {"hidden_size": 100, "intermediate_size": 172, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 20},
    "wide_group": {"hidden_size": 256, "intermediate_size": 300, "num_attention_heads": 16, "num_key_value_heads": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, shape in SHAPES.items():
        made[name] = tmp_path_factory.mktemp(name)
        save_llama(made[name], **shape)
    return made


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.contiguous().view(integers), expected.contiguous().view(integers))


def _run(driver: Driver, prompt: list[int], chunk: int, num_output_tokens: int = 4) -> tuple[Request, torch.Tensor]:
    request = driver.run_alone(driver.add(f"r{chunk}", prompt, WITH_LOGPROBS), num_output_tokens, chunk)
    kv = driver.kv(request)
    driver.remove(request)
    return request, kv


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_runner_any_chunk_size_same_bits(folders: dict[str, Path], shape: str, kernels: str, dtype: str) -> None:
    driver = Driver(folders[shape], dtype, cpu_kernels=kernels)
    prompt = random_prompt(531, seed=1)
    expected, expected_kv = _run(driver, prompt, chunk=10_000)
    assert not expected_kv.isnan().any()
    for chunk in CHUNKS[1:] if shape != "tiny" else CHUNKS:
        found, kv = _run(driver, prompt, chunk)
        assert _same_bits(kv, expected_kv), f"chunk {chunk}: KV differs"
        assert found.output == expected.output
        assert found.logprobs == expected.logprobs, f"chunk {chunk}: logits differ"
        assert found.prompt_logprobs == expected.prompt_logprobs, f"chunk {chunk}: prompt logits differ"


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize("shape", ["tiny", "smollm2"])
def test_runner_decode_recomputed_as_prefill_same_bits(folders: dict[str, Path], shape: str, kernels: str, dtype: str) -> None:
    driver = Driver(folders[shape], dtype, cpu_kernels=kernels)
    request = driver.run_alone(driver.add("a", random_prompt(250, seed=2), WITH_LOGPROBS), 20, chunk=64)
    decoded_kv, decoded_logprobs = driver.kv(request), list(request.logprobs)
    output = list(request.output)
    driver.remove(request)  # preempted: comes back with its output tokens, which are now prefilled
    request.token_ids.pop()
    driver.step([(request, len(request.token_ids))])
    assert _same_bits(driver.kv(request), decoded_kv)
    assert request.output == output
    assert request.logprobs[-1] == decoded_logprobs[-1]


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
@pytest.mark.parametrize(("shape", "seed"), [("tiny", 0), ("smollm2", 2), ("odd", 3), ("wide_group", 4)])
def test_runner_random_batches_same_bits_as_alone(
    folders: dict[str, Path], shape: str, seed: int, kernels: str, dtype: str
) -> None:
    rng = random.Random(seed)
    num_requests = 6 if shape == "smollm2" else 8
    prompts = [random_prompt(rng.choice((1, 5, 16, 33, 120, 255, 256, 257, 300)), seed=100 + i) for i in range(num_requests)]
    alone = Driver(folders[shape], dtype, seed=1, cpu_kernels=kernels)
    together = Driver(folders[shape], dtype, num_blocks=400, seed=2, cpu_kernels=kernels)
    requests = [together.add(f"r{i}", prompt, WITH_LOGPROBS) for i, prompt in enumerate(prompts)]
    num_output_tokens = 6
    while running := [request for request in requests if len(request.output) < num_output_tokens]:
        batch = rng.sample(running, rng.randint(1, len(running)))
        if rng.random() < 0.1:
            together.remove(batch[0])
            batch[0].logprobs, batch[0].prompt_logprobs = batch[0].logprobs[: len(batch[0].output)], []
        shares = []
        for request in batch:
            remaining = len(request.token_ids) - request.num_computed_tokens
            shares.append((request, min(remaining, rng.choice((1, 2, 7, 60, 300)))))
        together.step(shares)
    for request, prompt in zip(requests, prompts, strict=True):
        expected, expected_kv = _run(alone, prompt, 10_000, num_output_tokens)
        assert request.output == expected.output
        assert request.logprobs == expected.logprobs
        assert request.prompt_logprobs == expected.prompt_logprobs
        assert _same_bits(together.kv(request), expected_kv)


@pytest.mark.parametrize(("kernels", "dtype"), KERNELS)
def test_runner_any_number_of_threads_same_bits(folders: dict[str, Path], kernels: str, dtype: str) -> None:
    driver = Driver(folders["smollm2"], dtype, cpu_kernels=kernels)
    prompt = random_prompt(300, seed=5)
    expected: torch.Tensor | None = None
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            _, kv = _run(driver, prompt, chunk=83)
            assert expected is None or _same_bits(kv, expected), f"{num_threads} threads"
            expected = kv
    finally:
        torch.set_num_threads(1)
