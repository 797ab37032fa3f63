"""Weights of quantized checkpoints as floats, tensor by tensor at load: FP8 and int8 with scales, AWQ, GPTQ.

checkpoint_formats.py says which format a folder has; weight_reader.py asks here. Everything is float32 on the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from core.errors import ModelLoadError
from core.model.checkpoint_formats import CheckpointFormat

SCALE_NAMES = ("weight_scale", "weight_scale_inv")  # the latter multiplies as well, whatever its name says
EIGHT_BIT_DTYPES = (torch.float8_e4m3fn, torch.int8)
WORD_BITS = 32
# AWQ's order in a word of 32 bits: what its nibble i holds, as the distance from the word's first output.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class TensorSource(ABC):
    """Tensors as they are stored."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    @abstractmethod
    def names(self) -> list[str]:
        """Of all tensors."""

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """A view of the file. Raises ModelLoadError if there is none of this name."""

    @abstractmethod
    def fail(self, message: str) -> ModelLoadError:
        """An exception that names the folder."""

    def check_shape(self, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
        """Raises ModelLoadError for another shape."""
        if tuple(tensor.shape) != shape:
            raise self.fail(f"tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")


class Dequantizer(ABC):
    """Weights of one checkpoint. A module is a name without its .weight, such as model.layers.0.mlp.up_proj."""

    marker: str  # what the names of a quantized module's tensors end with, one of them at least

    def __init__(self, source: TensorSource, form: CheckpointFormat) -> None:
        self._source = source
        self._form = form

    @abstractmethod
    def is_quantized(self, module: str) -> bool:
        """Whether this module's weight is; others, such as norms, are plain."""

    @abstractmethod
    def read(self, module: str, shape: tuple[int, ...]) -> Tensor:
        """The module's weight, float32, [outputs, inputs] = shape. Raises ModelLoadError for tensors that do not fit together."""

    def _tensor(self, name: str, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Tensor:
        tensor = self._source.stored(name)
        if tensor.dtype not in dtypes:
            raise self._source.fail(f"tensor {name} has dtype {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
        self._source.check_shape(name, tensor, shape)
        return tensor

    def _num_groups(self, module: str, num_inputs: int) -> int:
        size = self._form.group_size or num_inputs
        if num_inputs % size:
            raise self._source.fail(f"{module}: {num_inputs} inputs are not in groups of {size}")
        return num_inputs // size

    def _check_words(self, module: str, count: int, what: str) -> None:
        if count % (WORD_BITS // self._form.bits):
            raise self._source.fail(f"{module}: {count} {what} do not fill words of {WORD_BITS} bits")


class ScaledWeights(Dequantizer):
    """float8_e4m3fn or int8, [outputs, inputs], times a scale for all, for each output, each group of inputs, or each block."""

    marker = ".weight_scale or .weight_scale_inv"

    def is_quantized(self, module: str) -> bool:
        return any(self._source.has(f"{module}.{name}") for name in SCALE_NAMES)

    def read(self, module: str, shape: tuple[int, ...]) -> Tensor:
        weight = self._tensor(f"{module}.weight", shape, EIGHT_BIT_DTYPES)
        if self._source.has(f"{module}.weight_zero_point"):
            zero_point = self._source.stored(f"{module}.weight_zero_point")
            if torch.count_nonzero(zero_point.float()):
                raise self._source.fail(f"{module}: weights with zero points are not supported; supported: symmetric ones")
        name = next(f"{module}.{name}" for name in SCALE_NAMES if self._source.has(f"{module}.{name}"))
        scale = self._source.stored(name).float()
        return weight.float() * self._expand(name, scale, shape)

    def _expand(self, name: str, scale: Tensor, shape: tuple[int, ...]) -> Tensor:
        """What multiplies the weight, broadcastable to its shape."""
        num_outputs, num_inputs = shape
        if scale.numel() == 1:
            return scale.reshape(1, 1)
        if self._form.block != (0, 0):
            rows, columns = self._form.block
            self._source.check_shape(name, scale, (-(-num_outputs // rows), -(-num_inputs // columns)))
            by_output = scale.repeat_interleave(rows, 0)[:num_outputs]
            return by_output.repeat_interleave(columns, 1)[:, :num_inputs]
        if self._form.group_size and scale.dim() == 2 and scale.shape[1] > 1:
            self._source.check_shape(name, scale, (num_outputs, self._num_groups(name, num_inputs)))
            return scale.repeat_interleave(self._form.group_size, 1)
        if scale.numel() != num_outputs:
            raise self._source.fail(f"tensor {name} has shape {list(scale.shape)}, expected [], [1] or [{num_outputs}, 1]")
        return scale.reshape(num_outputs, 1)


class AwqWeights(Dequantizer):
    """(number - zero point) * scale, https://arxiv.org/abs/2306.00978: words along the outputs, in AWQ_ORDER.

    qweight: [inputs, outputs / 8], qzeros: [groups, outputs / 8], both int32; scales: [groups, outputs].
    """

    marker = ".qweight"

    def is_quantized(self, module: str) -> bool:
        return self._source.has(f"{module}.qweight")

    def read(self, module: str, shape: tuple[int, ...]) -> Tensor:
        num_outputs, num_inputs = shape
        num_groups, words = self._num_groups(module, num_inputs), num_outputs // len(AWQ_ORDER)
        self._check_words(module, num_outputs, "outputs")
        weight = self._tensor(f"{module}.qweight", (num_inputs, words), (torch.int32,))
        scales = self._tensor(f"{module}.scales", (num_groups, num_outputs), (torch.float16, torch.bfloat16, torch.float32))
        numbers = _unpack_awq(weight).view(num_groups, -1, num_outputs).float()
        zeros = _unpack_awq(self._tensor(f"{module}.qzeros", (num_groups, words), (torch.int32,))).float()
        floats = (numbers - zeros[:, None]).mul_(scales.float()[:, None])
        return floats.view(num_inputs, num_outputs).t().contiguous()


class GptqWeights(Dequantizer):
    """(number - zero point) * scale, https://arxiv.org/abs/2210.17323: words along the inputs, lowest bits first.

    qweight: [inputs * bits / 32, outputs], qzeros: [groups, outputs * bits / 32], both int32; scales: [groups, outputs]; g_idx:
    [inputs], the group of each input, where inputs were quantized in another order (desc_act).
    """

    marker = ".qweight"

    def is_quantized(self, module: str) -> bool:
        return self._source.has(f"{module}.qweight")

    def read(self, module: str, shape: tuple[int, ...]) -> Tensor:
        num_outputs, num_inputs = shape
        bits, num_groups = self._form.bits, self._num_groups(module, num_inputs)
        per_word = WORD_BITS // bits
        self._check_words(module, num_inputs, "inputs")
        self._check_words(module, num_outputs, "outputs")
        weight = self._tensor(f"{module}.qweight", (num_inputs // per_word, num_outputs), (torch.int32,))
        zeros = self._tensor(f"{module}.qzeros", (num_groups, num_outputs // per_word), (torch.int32,))
        scales = self._tensor(f"{module}.scales", (num_groups, num_outputs), (torch.float16, torch.bfloat16, torch.float32))
        numbers = _unpack(weight.t(), bits).t()
        zero_points = (_unpack(zeros, bits) + self._form.zero_offset) & (2**bits - 1)
        group = self._group_of_input(module, num_inputs, num_groups)
        weights: Tensor = (numbers - zero_points[group]).float() * scales.float()[group]
        return weights.t().contiguous()

    def _group_of_input(self, module: str, num_inputs: int, num_groups: int) -> Tensor:
        name = f"{module}.g_idx"
        if not self._source.has(name):
            return torch.arange(num_inputs) // (num_inputs // num_groups)
        group = self._tensor(name, (num_inputs,), (torch.int32, torch.int64)).long()
        if int(group.min()) < 0 or int(group.max()) >= num_groups:
            raise self._source.fail(f"tensor {name} names groups {int(group.min())} to {int(group.max())}, of {num_groups}")
        return group


def dequantizer_of(form: CheckpointFormat, source: TensorSource) -> Dequantizer | None:
    """None for a float checkpoint. Raises ModelLoadError where config.json says quantized and no tensor is."""
    kinds: dict[str, type[Dequantizer]] = {"scaled": ScaledWeights, "awq": AwqWeights, "gptq": GptqWeights}
    if form.kind not in kinds:
        return None
    dequantizer = kinds[form.kind](source, form)
    modules = {name.rpartition(".")[0] for name in source.names()}
    if not any(dequantizer.is_quantized(module) for module in modules):
        raise source.fail(
            f"config.json has a quantization_config of {form.method}, but no tensor's name ends in {dequantizer.marker}: "
            "the weights are plain, so take the quantization_config out, or get the quantized ones"
        )
    return dequantizer


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Numbers of `bits` bits, int32, [rows, columns * 32 / bits], from int32 words [rows, columns], lowest bits first."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    numbers: Tensor = (words.unsqueeze(-1) >> shifts) & (2**bits - 1)
    return numbers.flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """Nibbles of AWQ's words, in the order of outputs."""
    place = torch.tensor(AWQ_ORDER).argsort()
    return _unpack(words, 4).view(words.shape[0], -1, len(AWQ_ORDER))[:, :, place].flatten(1)
