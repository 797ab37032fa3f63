"""LoRA (https://arxiv.org/abs/2106.09685): an adapter's matrices, and their products added to the rows of its requests.

Rows are grouped by adapter: at each projection an adapter's rows are gathered, multiplied by two thin matrices, and the product
is added to them. Rows of other requests are not touched: they have the same bits whether or not an adapter is in the batch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional

from core.adapter_files import WEIGHTS_FILE, AdapterFiles
from core.errors import InvalidInputError
from core.model.architecture import ModelArchitecture

# Ranks are padded with zeros to a multiple of this: with 24 outputs and three threads MKL's float32 product of a row depends on
# the other rows, with multiples of 16 it does not (see linear.ROW_MULTIPLE).
RANK_MULTIPLE = 16

_TENSOR_NAME = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\."
    r"(?:self_attn\.(q_proj|k_proj|v_proj|o_proj)|mlp\.(gate_proj|up_proj|down_proj))\.lora_(A|B)\.weight"
)
_TENSOR_NAMES = "base_model.model.model.layers.N.{self_attn,mlp}.MODULE.lora_{A,B}.weight"


@dataclass(frozen=True, slots=True)
class LowRank:
    """What an adapter adds to one projection: inputs @ down.T @ up.T. down: [rank, inputs]; up: [outputs, rank], scaled."""

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """One decoder layer's share, for projections stacked as in weights.LayerWeights. None: the adapter leaves it alone."""

    qkv: LowRank | None
    o: LowRank | None
    gate_up: LowRank | None
    down: LowRank | None


@dataclass(frozen=True, slots=True, eq=False)
class AdapterLayers:
    """A whole adapter: one LayerAdapter per decoder layer. What requests of one adapter share, compared by identity."""

    layers: tuple[LayerAdapter, ...]


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """An adapter's rows of a step. rows: int64, on the model's device, padded by repetition to a multiple of linear.ROW_MULTIPLE;
    the first num_rows count.
    """

    layers: tuple[LayerAdapter, ...]
    rows: Tensor
    num_rows: int

    def add(self, outputs: Tensor, inputs: Tensor, adapter: LowRank | None) -> None:
        """Add the adapter's part to its rows of `outputs` [num_rows, outputs], in place."""
        if adapter is None:
            return
        thin = functional.linear(inputs.index_select(0, self.rows), adapter.down)
        added = functional.linear(thin, adapter.up)
        outputs.index_add_(0, self.rows[: self.num_rows], added[: self.num_rows])


def build_adapter(
    files: AdapterFiles, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device
) -> AdapterLayers:
    """The adapter's matrices by layer, of `dtype` on `device`.

    Raises InvalidInputError naming the first tensor that is unknown, missing or of another shape.
    """
    try:
        tensors = safetensors.torch.load(files.weights)
    except safetensors.SafetensorError as error:
        raise InvalidInputError("lora_path", WEIGHTS_FILE, f"a safetensors file ({error})") from error
    pairs = _pairs_by_module(tensors, files.rank, architecture)
    builder = _Builder(pairs, files.scaling, dtype, device)
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    q_outputs = architecture.num_heads * architecture.head_dim
    kv_outputs = architecture.num_kv_heads * architecture.head_dim
    layers = (
        LayerAdapter(
            qkv=builder.stack(index, [("q_proj", q_outputs), ("k_proj", kv_outputs), ("v_proj", kv_outputs)]),
            o=builder.stack(index, [("o_proj", hidden)]),
            gate_up=builder.stack(index, [("gate_proj", intermediate), ("up_proj", intermediate)]),
            down=builder.stack(index, [("down_proj", hidden)]),
        )
        for index in range(architecture.num_layers)
    )
    return AdapterLayers(tuple(layers))


def _module_shapes(architecture: ModelArchitecture) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) by module."""
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    q_outputs = architecture.num_heads * architecture.head_dim
    kv_outputs = architecture.num_kv_heads * architecture.head_dim
    return {
        "q_proj": (hidden, q_outputs),
        "k_proj": (hidden, kv_outputs),
        "v_proj": (hidden, kv_outputs),
        "o_proj": (q_outputs, hidden),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }


_Pairs = dict[tuple[int, str], tuple[Tensor, Tensor]]


def _pairs_by_module(tensors: Mapping[str, Tensor], rank: int, architecture: ModelArchitecture) -> _Pairs:
    """(A [rank, inputs], B [outputs, rank]) by layer and module, each checked."""
    shapes = _module_shapes(architecture)
    found: dict[tuple[int, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR_NAME.fullmatch(name)
        if match is None or int(match[1]) >= architecture.num_layers:
            allowed = f"{_TENSOR_NAMES} with N below {architecture.num_layers} and MODULE one of {', '.join(shapes)}"
            raise InvalidInputError(f"tensor in {WEIGHTS_FILE}", name, allowed)
        module, side = match[2] or match[3], match[4]
        inputs, outputs = shapes[module]
        wanted = [rank, inputs] if side == "A" else [outputs, rank]
        if list(tensor.shape) != wanted or not tensor.is_floating_point():
            given = f"{list(tensor.shape)} of {tensor.dtype}"
            raise InvalidInputError(name, given, f"{wanted} of a floating type: rank {rank} and the model's sizes")
        found.setdefault((int(match[1]), module), {})[side] = tensor
    if not found:
        raise InvalidInputError(f"tensors in {WEIGHTS_FILE}", 0, "at least one module's lora_A and lora_B")
    for (layer, module), sides in found.items():
        if len(sides) < 2:
            raise InvalidInputError(f"layers.{layer}.{module}", f"lora_{next(iter(sides))} alone", "both lora_A and lora_B")
    return {key: (sides["A"], sides["B"]) for key, sides in found.items()}


@dataclass(frozen=True, slots=True)
class _Builder:
    """Puts modules that the model computes at once into one pair of matrices."""

    pairs: _Pairs
    scaling: float
    dtype: torch.dtype
    device: torch.device

    def stack(self, layer: int, parts: Sequence[tuple[str, int]]) -> LowRank | None:
        """parts: (module, outputs) in the order of the model's rows. Modules without a pair get zeros; None if none has one.

        `up` has the modules' matrices on its diagonal: zeros elsewhere cost a little arithmetic, and save a product per module.
        """
        present = [self.pairs[layer, module] for module, _outputs in parts if (layer, module) in self.pairs]
        if not present:
            return None
        total_rank = sum(down.shape[0] for down, _up in present)
        padded_rank = -(-total_rank // RANK_MULTIPLE) * RANK_MULTIPLE
        down = torch.zeros(padded_rank, present[0][0].shape[1])
        up = torch.zeros(sum(outputs for _module, outputs in parts), padded_rank)
        first_output = first_rank = 0
        for module, outputs in parts:
            if (layer, module) in self.pairs:
                module_down, module_up = self.pairs[layer, module]
                end_rank = first_rank + module_down.shape[0]
                down[first_rank:end_rank] = module_down
                up[first_output : first_output + outputs, first_rank:end_rank] = module_up.float() * self.scaling
                first_rank = end_rank
            first_output += outputs
        return LowRank(down.to(self.device, self.dtype), up.to(self.device, self.dtype))
