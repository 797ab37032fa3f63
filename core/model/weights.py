"""A Llama's weights, read from memory-mapped safetensors, sharded or not, and cast to the dtype that is served.

Projections that read the same input are stacked here, so that one multiplication does the work of three.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from core.errors import ModelLoadError
from core.model.description import ModelArchitecture
from core.model_files import list_weight_files

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs]; a bias is None where the model has none.

    qkv_proj: queries, keys, values stacked, [(num_heads + 2 * num_kv_heads) * head_dim, hidden]. gate_up_proj:
    [2 * intermediate, hidden].
    """

    input_norm: Tensor
    qkv_proj: Tensor
    qkv_bias: Tensor | None
    o_proj: Tensor
    o_bias: Tensor | None
    post_attention_norm: Tensor
    gate_up_proj: Tensor
    gate_up_bias: Tensor | None
    down_proj: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The whole model. lm_head is the same tensor as embed_tokens, [vocab, hidden], where the model ties them."""

    embed_tokens: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Tensor


class WeightReader:
    """Tensors by name over all weight files of a folder. Use as a context manager: files stay mapped until exit."""

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model_dir = model_dir
        self._dtype = dtype
        self._device = device
        self._files = ExitStack()
        self._file_by_name: dict[str, Any] = {}
        for path in list_weight_files(model_dir):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._files.close()
                raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error
            self._file_by_name.update(dict.fromkeys(file.keys(), file))

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._files.close()

    def read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`, cast, contiguous. Raises ModelLoadError if it is missing, or of another shape, or not floating."""
        file = self._file_by_name.get(name)
        if file is None:
            raise ModelLoadError(f"{self._model_dir}: missing tensor {name}")
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(f"{self._model_dir}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
        if not tensor.is_floating_point():
            raise ModelLoadError(f"{self._model_dir}: tensor {name} has dtype {tensor.dtype}, expected a floating one")
        return tensor.to(self._device, self._dtype).contiguous()

    def read_stacked(self, prefix: str, parts: list[tuple[str, int]], num_inputs: int, suffix: str = "weight") -> Tensor:
        """Tensors {prefix}.{part}.{suffix} stacked along their outputs. parts: (name, outputs)."""
        shapes: list[tuple[str, tuple[int, ...]]] = [
            (f"{prefix}.{name}.{suffix}", (outputs, num_inputs) if suffix == "weight" else (outputs,)) for name, outputs in parts
        ]
        return torch.cat([self.read(name, shape) for name, shape in shapes])


def load_llama_weights(
    model_dir: Path, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device = HOST
) -> LlamaWeights:
    """Read all weights, to `device`. Raises ModelLoadError naming the first tensor that is missing or misshaped."""
    vocab_shape = (architecture.vocab_size, architecture.hidden_size)
    with WeightReader(model_dir, dtype, device) as reader:
        embed_tokens = reader.read("model.embed_tokens.weight", vocab_shape)
        return LlamaWeights(
            embed_tokens=embed_tokens,
            layers=tuple(_read_layer(reader, architecture, f"model.layers.{i}") for i in range(architecture.num_layers)),
            norm=reader.read("model.norm.weight", (architecture.hidden_size,)),
            lm_head=embed_tokens if architecture.tie_word_embeddings else reader.read("lm_head.weight", vocab_shape),
        )


def _read_layer(reader: WeightReader, architecture: ModelArchitecture, layer: str) -> LayerWeights:
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    q_outputs = architecture.num_heads * architecture.head_dim
    kv_outputs = architecture.num_kv_heads * architecture.head_dim
    qkv = [("q_proj", q_outputs), ("k_proj", kv_outputs), ("v_proj", kv_outputs)]
    gate_up = [("gate_proj", intermediate), ("up_proj", intermediate)]
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    has_attention_bias, has_mlp_bias = architecture.attention_bias, architecture.mlp_bias
    return LayerWeights(
        input_norm=reader.read(f"{layer}.input_layernorm.weight", (hidden,)),
        qkv_proj=reader.read_stacked(attention, qkv, hidden),
        qkv_bias=reader.read_stacked(attention, qkv, hidden, "bias") if has_attention_bias else None,
        o_proj=reader.read(f"{attention}.o_proj.weight", (hidden, q_outputs)),
        o_bias=reader.read(f"{attention}.o_proj.bias", (hidden,)) if has_attention_bias else None,
        post_attention_norm=reader.read(f"{layer}.post_attention_layernorm.weight", (hidden,)),
        gate_up_proj=reader.read_stacked(mlp, gate_up, hidden),
        gate_up_bias=reader.read_stacked(mlp, gate_up, hidden, "bias") if has_mlp_bias else None,
        down_proj=reader.read(f"{mlp}.down_proj.weight", (hidden, intermediate)),
        down_bias=reader.read(f"{mlp}.down_proj.bias", (hidden,)) if has_mlp_bias else None,
    )
