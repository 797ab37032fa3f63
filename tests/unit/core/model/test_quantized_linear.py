"""Projections of 8 and 4 bits: near the exact product, and bit for bit the same for a row among any others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from core.config import ModelOptions
from core.errors import ConfigError
from core.model.int8_rows import quantize_rows
from core.model.linear import Linear, TorchLinear, make_torch_linear
from core.model.quantized_linear import INT4_GROUP, Int4Linear, Int8Linear, quantize_groups, quantizing_linears
from tests.unit.core.model.support import Driver, random_prompt, save_llama

SIZES = [(960, 576), (576, 1536), (48, 96)]  # outputs, inputs
CPU = torch.device("cpu")


def make(kind: str, weight: Tensor, bias: Tensor | None = None) -> Linear:
    return {
        "int8": lambda: Int8Linear(weight, bias, has_two_digits=False),
        "int8 of two digits": lambda: Int8Linear(weight, bias),
        "int4": lambda: Int4Linear(weight, bias),
    }[kind]()


KINDS = ["int8", "int8 of two digits", "int4"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
def test_quantized_linear_any_rows_any_threads_same_bits(kind: str, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(0)
    linear = make(kind, (torch.randn(num_outputs, num_inputs) * 0.05).bfloat16(), torch.randn(num_outputs).bfloat16())
    rows = torch.randn(264, num_inputs).bfloat16()
    rows[::3] *= 50.0
    expected = linear(rows)
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        for first, count in ((0, 1), (5, 1), (3, 2), (8, 8), (1, 9), (100, 33), (0, 264)):
            assert torch.equal(linear(rows[first : first + count].clone()), expected[first : first + count]), (first, count)


@pytest.mark.parametrize(("kind", "bound"), [("int8", 0.02), ("int8 of two digits", 0.01), ("int4", 0.12)])
def test_quantized_linear_is_near_the_exact_product(kind: str, bound: float) -> None:
    torch.manual_seed(1)
    weight, bias, rows = torch.randn(128, 256).bfloat16(), torch.randn(128).bfloat16(), torch.randn(20, 256).bfloat16()
    linear = make(kind, weight, bias)
    assert (linear.num_inputs, linear.num_outputs) == (256, 128)
    exact = functional.linear(rows.double(), weight.double(), bias.double())
    found = linear(rows)
    assert found.dtype is torch.bfloat16
    assert (found.double() - exact).norm() / exact.norm() < bound


def test_int8_linear_two_digits_save_rows_with_outliers() -> None:
    torch.manual_seed(2)
    weight, rows = torch.randn(64, 128), torch.randn(16, 128)
    rows[:, 7] = 500.0  # with one digit, most of the others are rounded to zero
    weight[:, 7] = 0.0
    exact = functional.linear(rows, weight)
    errors = [
        float((Int8Linear(weight, None, has_two_digits)(rows) - exact).norm() / exact.norm()) for has_two_digits in (False, True)
    ]
    assert errors[0] > 0.5 and errors[1] < 0.05


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_linear_zeros_and_rows_that_are_not_finite_spoil_nothing_else(kind: str) -> None:
    torch.manual_seed(3)
    linear = make(kind, torch.randn(32, 64).bfloat16())
    rows = torch.randn(4, 64).bfloat16()
    expected = linear(rows)
    rows[1], rows[2, 5] = 0.0, torch.nan
    found = linear(rows)
    assert torch.equal(found[1], torch.zeros(32, dtype=torch.bfloat16)) and found[2].isnan().all()
    assert torch.equal(found[[0, 3]], expected[[0, 3]])
    assert torch.equal(make(kind, torch.zeros(32, 64).bfloat16())(torch.ones(2, 64).bfloat16()), torch.zeros(2, 32).bfloat16())


def test_quantize_rows_error_is_half_a_step() -> None:
    torch.manual_seed(4)
    values = torch.randn(50, 64) * torch.rand(50, 1) * 100
    numbers, scale = quantize_rows(values)
    assert numbers.dtype is torch.int8 and (numbers.abs().amax(-1) == 127).all()
    assert ((numbers.float() * scale - values).abs() <= scale * 0.5001).all()


def test_quantize_groups_error_is_bounded_by_the_groups_range() -> None:
    torch.manual_seed(5)
    weight = torch.randn(32, 128)
    weight[:, :INT4_GROUP] *= 100  # of another group: nobody else's range
    numbers, pairs = quantize_groups(weight)
    scale, zero = (part.float().t().repeat_interleave(INT4_GROUP, 1) for part in pairs.unbind(-1))
    assert (numbers >= 0).all() and (numbers <= 15).all()
    grouped = weight.view(32, -1, INT4_GROUP)
    ranges = (grouped.amax(-1) - grouped.amin(-1)).repeat_interleave(INT4_GROUP, 1)
    assert (((numbers - 8) * scale + zero - weight).abs() <= 0.06 * ranges).all()


def test_quantizing_linears_leaves_the_head_and_names_what_cannot_be() -> None:
    weight = torch.randn(64, 96).bfloat16()
    assert quantizing_linears("none", torch.bfloat16, CPU, make_torch_linear) is make_torch_linear
    for quantization, kind in (("int8", Int8Linear), ("int4", Int4Linear)):
        make_linear = quantizing_linears(quantization, torch.bfloat16, CPU, make_torch_linear)
        assert isinstance(make_linear("lm_head", weight, None), TorchLinear)
        assert isinstance(make_linear("model.layers.0.mlp.down_proj", weight, None), kind)
    with pytest.raises(ConfigError, match=r"model\.quantization: got 'int8'.*none on cuda"):
        quantizing_linears("int8", torch.bfloat16, torch.device("cuda"), make_torch_linear)
    with pytest.raises(ConfigError, match=r"model\.quantization: got 'int4'.*int4 needs model\.dtype bfloat16"):
        quantizing_linears("int4", torch.float32, CPU, make_torch_linear)
    make_linear = quantizing_linears("int4", torch.bfloat16, CPU, make_torch_linear)
    with pytest.raises(ConfigError, match=r"m\.o_proj has 96 inputs and 60 outputs"):
        make_linear("m.o_proj", weight[:60], None)


@pytest.mark.parametrize(("quantization", "dtype"), [("int8", "bfloat16"), ("int8", "float32"), ("int4", "bfloat16")])
def test_quantized_llama_same_kv_and_tokens_in_any_batch_and_chunks(tmp_path: Path, quantization: str, dtype: str) -> None:
    save_llama(tmp_path)

    options = ModelOptions(dtype=dtype, quantization=quantization)
    prompts = [random_prompt(length, seed=length) for length in (7, 40, 61)]
    alone = []
    for prompt in prompts:
        driver = Driver(tmp_path, options=options)
        request = driver.run_alone(driver.add("r", prompt), 6, chunk=100)
        alone.append((request.output, driver.kv(request)))
    driver = Driver(tmp_path, options=options)
    requests = [driver.add(f"r{index}", prompt) for index, prompt in enumerate(prompts)]
    while any(len(request.output) < 6 for request in requests):
        running = [request for request in requests if len(request.output) < 6]
        driver.step([(request, min(9, len(request.token_ids) - request.num_computed_tokens)) for request in running])
    for request, (output, kv) in zip(requests, alone, strict=True):
        assert request.output == output
        assert torch.equal(driver.kv(request)[:, :, : kv.shape[2]], kv)
    plain = Driver(tmp_path, dtype)
    exact = plain.add("r", prompts[1])
    plain.run_alone(exact, 1, chunk=100)
    difference = alone[1][1].float()[:, :, :40] - plain.kv(exact).float()[:, :, :40]
    relative = float(difference.norm() / plain.kv(exact).float().norm())
    assert 0 < relative < (0.3 if quantization == "int4" else 0.05)  # quantized it is, and not far away
