"""Projections with weights of 8 or 4 bits, quantized at load, through torch's own CPU kernels.

Both give a row the same bits among any number of rows. The head is left as it is: its rounding would decide between tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.errors import ConfigError
from core.model.int8_rows import INT8_MAX, quantize_rows
from core.model.linear import Linear, MakeLinear

INT4_GROUP = 32  # inputs that share a scale and a zero point
KEPT = ("lm_head",)
# By the last part of a name: projections whose inputs have so great outliers that 8 bits leave too little for the rest. Measured
# with SmolLM2: two digits here bring three quarters of what they bring everywhere.
TWO_DIGITS = ("qkv_proj", "down_proj")
_DIGIT = 2 * INT8_MAX  # what the first digit leaves over is at most half of it: so many parts fill the second
_INNER_K_TILES = 1  # of CUDA's kernels; the CPU's takes any


class Int8Linear(Linear):
    """Weights as int8 with a scale per output; inputs as int8 with a scale per row, made anew in every call.

    Sums of whole numbers are exact, so a row's bits depend on nothing but the row; and processors multiply bytes faster than
    bfloat16. has_two_digits: inputs have a second digit of int8 for what the first leaves over, which takes as long again.
    weight: [num_outputs, num_inputs] of any floating dtype; bias: [num_outputs] or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, has_two_digits: bool = True) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        numbers, scale = quantize_rows(weight)
        self._numbers = numbers.t()  # as the kernel takes it fastest: a view of [num_outputs, num_inputs]
        self._scale = scale.view(1, -1)
        self._bias = None if bias is None else bias.float()
        self._has_two_digits = has_two_digits

    def __call__(self, inputs: Tensor) -> Tensor:
        numbers, scale = quantize_rows(inputs)
        if self._has_two_digits:
            rest = (inputs.float() / torch.where(scale == 0, 1.0, scale)).sub_(numbers).mul_(_DIGIT)
            rest = rest.round_().nan_to_num_(0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)
            output, of_rest = torch._int_mm(torch.cat((numbers, rest)), self._numbers).float().chunk(2)
            output += of_rest.div_(_DIGIT)
        else:
            output = torch._int_mm(numbers, self._numbers).float()
        output.mul_(self._scale).mul_(scale)
        if self._bias is not None:
            output += self._bias
        return output.to(inputs.dtype)


class Int4Linear(Linear):
    """Weights as numbers of 4 bits, with a scale and a zero point per output and INT4_GROUP inputs; inputs as they are, bfloat16.

    num_inputs must be a multiple of INT4_GROUP, num_outputs of 16. Reads a quarter of the bytes, which makes single rows
    faster; many rows are slower than in bfloat16.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.num_outputs, self.num_inputs = weight.shape
        numbers, self._scales_and_zeros = quantize_groups(weight)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers, _INNER_K_TILES)
        self._bias = bias

    def __call__(self, inputs: Tensor) -> Tensor:
        output: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(inputs, self._packed, INT4_GROUP, self._scales_and_zeros)
        return output if self._bias is None else output + self._bias


def quantize_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 numbers 0 to 15 [outputs, inputs], bfloat16 [groups, outputs, 2]) of weight [outputs, inputs].

    The pairs are (scale, zero): (number - 8) * scale + zero is near the weight.
    """
    num_outputs, num_inputs = weight.shape
    grouped = weight.float().view(num_outputs, num_inputs // INT4_GROUP, INT4_GROUP)
    lowest, highest = grouped.amin(-1), grouped.amax(-1)
    # Rounded as the kernel reads them before numbers are chosen: so these make up for that rounding.
    scale = ((highest - lowest) / 15.0).bfloat16()
    zero = (lowest + 8.0 * scale.float()).bfloat16()
    start, step = zero.float() - 8.0 * scale.float(), torch.where(scale == 0, 1.0, scale.float())
    numbers = ((grouped - start.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 15)
    return numbers.to(torch.int32).view(num_outputs, num_inputs), torch.stack((scale, zero), -1).transpose(0, 1).contiguous()


def quantizing_linears(quantization: str, dtype: torch.dtype, device: torch.device, others: MakeLinear) -> MakeLinear:
    """MakeLinear for model.quantization. others: makes what stays as it is.

    Raises ConfigError where torch has no kernel: for other devices, and for int4 in another dtype than bfloat16.
    """
    if quantization == "none":
        return others
    if device.type != "cpu":
        raise ConfigError("model.quantization", quantization, f"none on {device.type}: the kernels are for the CPU")
    if quantization == "int4" and dtype != torch.bfloat16:
        raise ConfigError("model.quantization", quantization, f"none or int8 with {dtype}: int4 needs model.dtype bfloat16")

    def make(name: str, weight: Tensor, bias: Tensor | None) -> Linear:
        if name in KEPT:
            return others(name, weight, bias)
        if quantization == "int8":
            return Int8Linear(weight, bias, name.rpartition(".")[2] in TWO_DIGITS)
        num_outputs, num_inputs = weight.shape
        if num_inputs % INT4_GROUP or num_outputs % 16:
            allowed = f"none or int8: {name} has {num_inputs} inputs and {num_outputs} outputs, not multiples of {INT4_GROUP}, 16"
            raise ConfigError("model.quantization", quantization, allowed)
        return Int4Linear(weight, bias)

    return make
