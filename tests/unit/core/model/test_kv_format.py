"""KV of 8 bits: how near it is, that bits do not depend on company, and what the layout says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import ModelOptions
from core.errors import ConfigError
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.kv_format import Fp8Format, Int8Format, KVFormat, kv_format_of
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from tests.unit.core.model.support import BLOCK_SIZE, Driver, Request, random_prompt, save_llama

KV_DTYPES = ["fp8", "int8"]


def kv_driver(folder: Path, kv_dtype: str, dtype: str = "float32", seed: int = 0) -> Driver:
    return Driver(folder, seed=seed, options=ModelOptions(dtype=dtype, kv_cache_dtype=kv_dtype))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


def layout(dtype: str) -> KVLayout:
    return KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=16, dtype=dtype)


def roundtrip(form: KVFormat, values: torch.Tensor) -> torch.Tensor:
    stored = form.encode(values)
    target = torch.empty(values.shape)
    form.decode(stored, target)
    assert form.head_dim(stored.shape[-1]) == values.shape[-1]
    return target


def test_layout_eight_bits_sizes_and_fingerprints_are_their_own() -> None:
    assert [layout(dtype).block_bytes for dtype in ("bfloat16", "fp8", "int8")] == [1024, 512, 640]
    fingerprints = {layout(dtype).fingerprint for dtype in ("float32", "bfloat16", "float16", "fp8", "int8")}
    assert len(fingerprints) == 5
    assert layout("bfloat16").fingerprint.hex() == "235a1a3d49384ca295a8a1e50ab66770"  # stores hold blocks under it


def test_fp8_format_rounds_to_e4m3_and_saturates() -> None:
    values = torch.tensor([[[0.0, 1.0, -1.0625, 1.15, 447.0, 500.0, -1e9, 2.0**-9]]])
    expected = torch.tensor([[[0.0, 1.0, -1.0, 1.125, 448.0, 448.0, -448.0, 2.0**-9]]])
    assert torch.equal(roundtrip(Fp8Format(), values), expected)
    assert torch.equal(roundtrip(Fp8Format(), values.bfloat16())[..., 4:7], expected[..., 4:7])


def test_int8_format_is_near_within_half_a_step_of_each_head_alone() -> None:
    torch.manual_seed(0)
    values = torch.randn(5, 3, 16) * torch.logspace(-3, 3, 15).view(5, 3, 1)
    found = roundtrip(Int8Format(), values)
    steps = values.abs().amax(-1, keepdim=True) / 127
    assert ((found - values).abs() <= 0.501 * steps).all()
    values[2, 1, 3] = torch.inf
    spoiled = roundtrip(Int8Format(), values)
    assert spoiled[2, 1].isnan().all()
    spoiled[2, 1] = found[2, 1]
    assert torch.equal(spoiled, found)
    assert torch.equal(roundtrip(Int8Format(), torch.zeros(1, 1, 16)), torch.zeros(1, 1, 16))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bit_kv_same_bits_alone_in_batches_in_chunks_and_decoded(folder: Path, kv_dtype: str, dtype: str) -> None:
    system = random_prompt(300, seed=9)
    prompts = [random_prompt(35, seed=1), system + random_prompt(11, seed=2), system + random_prompt(30, seed=3)]
    alone: list[tuple[list[int], torch.Tensor]] = []
    for prompt in prompts:
        driver = kv_driver(folder, kv_dtype, dtype)
        request = driver.run_alone(driver.add("r", prompt), 5, chunk=1000)
        alone.append((request.output, driver.kv(request)))
    driver = kv_driver(folder, kv_dtype, dtype, seed=1)
    requests: list[Request] = [driver.add(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    while running := [request for request in requests if len(request.output) < 5]:
        shares = [(request, min(53, len(request.token_ids) - request.num_computed_tokens)) for request in running]
        driver.step(shares)
    for request, (output, kv) in zip(requests, alone, strict=True):
        assert request.output == output
        assert torch.equal(driver.kv(request), kv)


@pytest.mark.parametrize(("kv_dtype", "bound"), [("fp8", 0.06), ("int8", 0.02)])
def test_eight_bit_kv_is_near_that_of_the_models_dtype(folder: Path, kv_dtype: str, bound: float) -> None:
    prompt = random_prompt(50, seed=4)
    plain, driver = Driver(folder), kv_driver(folder, kv_dtype)
    requests = [one.run_alone(one.add("r", prompt), 1, chunk=100) for one in (plain, driver)]
    exact, stored = plain.kv(requests[0]), driver.kv(requests[1])
    found = torch.empty(exact.shape)
    kv_format_of(driver.description.kv_layout).decode(stored, found)
    assert 0 < float((found[0] - exact[0]).norm() / exact[0].norm()) < bound  # of the first layer: nothing but its own rounding


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "float16")])
def test_kv_of_another_float_than_the_models_serves_nearly_the_same(folder: Path, dtype: str, kv_dtype: str) -> None:
    driver = kv_driver(folder, kv_dtype, dtype)
    assert driver.description.kv_layout.dtype == kv_dtype
    plain = Driver(folder, dtype)
    prompt = random_prompt(50, seed=4)
    requests = [one.run_alone(one.add("r", prompt), 1, chunk=100) for one in (plain, driver)]
    exact, found = plain.kv(requests[0]).float(), driver.kv(requests[1]).float()
    assert float((found - exact).norm() / exact.norm()) < 0.02


def test_runner_pool_of_another_layout_raises(folder: Path) -> None:
    description = describe_model(folder, ModelOptions(kv_cache_dtype="fp8"), BLOCK_SIZE)
    other = describe_model(folder, ModelOptions(), BLOCK_SIZE).kv_layout
    with pytest.raises(ConfigError, match=r"pool\.layout"):
        TorchModelRunner.load(folder, description, KVPoolMemory(other, 2), 0)


def test_smollm2_with_eight_bit_kv_predicts_most_of_the_same_tokens() -> None:
    """Of SmolLM2's own greedy continuation: how often the next token is still the likeliest."""
    model_dir = resolve_model("smollm2")
    plain = Driver(model_dir, "bfloat16", num_blocks=32)
    request = plain.run_alone(plain.add("r", [504, 3575, 282, 4649, 314]), 32, chunk=100)
    ranks = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    shares = {}
    for kv_dtype in KV_DTYPES:
        driver = kv_driver(model_dir, kv_dtype, "bfloat16")
        read = driver.run_alone(driver.add("r", request.token_ids, ranks), 1, chunk=100)
        answered = read.prompt_logprobs[-len(request.output) :]
        shares[kv_dtype] = sum(token.rank == 1 for token in answered) / len(answered)
    assert min(shares.values()) > 0.8, shares
