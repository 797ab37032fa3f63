"""The compiled kernels of a decoder layer beside torch's, and their bits: a row's never depend on other rows or on threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from core.model.llama import silu
from core.model.native.build import load_native
from core.model.native_linear import NATIVE_DTYPES, NativeLinear, native_linear_maker, pack

DTYPES = list(NATIVE_DTYPES)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def native() -> Any:
    found = load_native()
    assert found is not None, "these tests need a C++ compiler"
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(576, 960), (1536, 576), (96, 160), (100, 43), (2, 1)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_native_linear_any_rows_as_torch_and_same_bits(
    native: Any, num_inputs: int, num_outputs: int, has_bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(num_inputs)
    weight = (torch.randn(num_outputs, num_inputs) * 0.05).to(dtype)
    bias = torch.randn(num_outputs).to(dtype) if has_bias else None
    linear = NativeLinear(native, weight, bias)
    rows = torch.randn(230, num_inputs).to(dtype)
    found, exact = linear(rows), linear.in_float32(rows)
    expected = functional.linear(rows.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(found, exact.to(dtype))
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        for first, end in ((0, 1), (5, 7), (1, 14), (0, 33), (40, 229)):
            assert torch.equal(linear(rows[first:end]), found[first:end]), f"rows {first} to {end}, {num_threads} threads"


@pytest.mark.parametrize("dtype", DTYPES)
def test_native_norm_and_activation_as_torch(native: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for size in (576, 100, 7):
        rows, weight = torch.randn(9, size).to(dtype) * 3, torch.randn(size).to(dtype)
        normed = torch.empty_like(rows)
        norm = getattr(native, f"norm_{NATIVE_DTYPES[dtype]}")
        norm(rows.data_ptr(), weight.data_ptr(), normed.data_ptr(), 9, size, 1e-5)
        exact = functional.rms_norm(rows.float(), (size,), weight.float(), 1e-5)
        torch.testing.assert_close(normed.float(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        gate_up = torch.randn(9, 2 * size).to(dtype) * 20
        activated = torch.empty(9, size, dtype=dtype)
        getattr(native, f"activate_{NATIVE_DTYPES[dtype]}")(gate_up.data_ptr(), activated.data_ptr(), 9, size)
        expected = silu(gate_up[:, :size]) * gate_up[:, size:]
        torch.testing.assert_close(activated, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_native_activation_extremes_are_those_of_silu(native: Any) -> None:
    gates = torch.tensor([-torch.inf, -1e30, -200.0, -89.0, -0.0, 0.0, 1e-30, 88.0, 1e30, torch.nan])
    gate_up = torch.cat((gates, torch.ones_like(gates)))[None]
    activated = torch.empty(1, len(gates))
    native.activate_float32(gate_up.data_ptr(), activated.data_ptr(), 1, len(gates))
    torch.testing.assert_close(activated[0], silu(gates), equal_nan=True, atol=1e-30, rtol=1e-5)


def test_pack_every_weight_is_where_the_kernel_reads_it() -> None:
    weight = torch.arange(40 * 6, dtype=torch.float32).view(40, 6)
    panels, pairs = pack(weight), pack(weight.bfloat16())
    assert panels.shape == (2, 6, 32) and pairs.shape == (2, 3, 32, 2)
    assert panels[1, 5, 7] == weight[39, 5] and pairs[1, 2, 7, 1] == weight[39, 5].bfloat16()
    assert not panels[1, :, 8:].any() and not pairs[1, :, 8:].any()


def test_native_linear_maker_leaves_to_torch_what_it_cannot(native: Any) -> None:
    make = native_linear_maker(native)
    assert isinstance(make("a", torch.ones(4, 8), None), NativeLinear)
    for weight in (torch.ones(4, 8, dtype=torch.float16), torch.ones(4, 7)):
        rows = torch.ones(8, weight.shape[1], dtype=weight.dtype)
        linear = make("a", weight, None)
        assert not isinstance(linear, NativeLinear)
        assert torch.equal(linear(rows), functional.linear(rows, weight))
