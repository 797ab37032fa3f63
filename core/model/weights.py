"""A Llama's weights, read from memory-mapped safetensors, sharded or not, and cast to the dtype that is served.

Projections that read the same input are stacked here, so that one multiplication does the work of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from core.model.description import ModelArchitecture
from core.model.linear import Linear, MakeLinear, make_torch_linear
from core.model.weight_reader import WeightReader

HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    qkv_proj: queries, keys, values stacked, hidden -> (num_heads + 2 * num_kv_heads) * head_dim. gate_up_proj: gate and up
    stacked, hidden -> 2 * intermediate.
    """

    input_norm: Tensor
    qkv_proj: Linear
    o_proj: Linear
    post_attention_norm: Tensor
    gate_up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The whole model. embed_tokens: [vocab, hidden]. lm_head multiplies by the same tensor where the model ties them."""

    embed_tokens: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear


def load_llama_weights(
    model_dir: Path,
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    device: torch.device = HOST,
    make_linear: MakeLinear = make_torch_linear,
) -> LlamaWeights:
    """Read all weights, to `device`. Raises ModelLoadError naming the first tensor that is missing or misshaped."""
    vocab_shape = (architecture.vocab_size, architecture.hidden_size)
    with WeightReader(model_dir, dtype, device) as reader:
        embed_tokens = reader.read("model.embed_tokens.weight", vocab_shape)
        lm_head = embed_tokens if architecture.tie_word_embeddings else reader.read("lm_head.weight", vocab_shape)
        return LlamaWeights(
            embed_tokens=embed_tokens,
            layers=tuple(
                _read_layer(reader, architecture, f"model.layers.{i}", make_linear) for i in range(architecture.num_layers)
            ),
            norm=reader.read("model.norm.weight", (architecture.hidden_size,)),
            lm_head=make_linear("lm_head", lm_head, None),
        )


def _read_layer(reader: WeightReader, architecture: ModelArchitecture, layer: str, make_linear: MakeLinear) -> LayerWeights:
    hidden, intermediate = architecture.hidden_size, architecture.intermediate_size
    q_outputs = architecture.num_heads * architecture.head_dim
    kv_outputs = architecture.num_kv_heads * architecture.head_dim

    def projection(module: str, name: str, parts: list[tuple[str, int]], num_inputs: int, has_bias: bool) -> Linear:
        prefix = f"{layer}.{module}"
        weight = reader.read_stacked(prefix, parts, num_inputs)
        bias = reader.read_stacked(prefix, parts, num_inputs, "bias") if has_bias else None
        return make_linear(f"{prefix}.{name}", weight, bias)

    qkv = [("q_proj", q_outputs), ("k_proj", kv_outputs), ("v_proj", kv_outputs)]
    gate_up = [("gate_proj", intermediate), ("up_proj", intermediate)]
    has_attention_bias, has_mlp_bias = architecture.attention_bias, architecture.mlp_bias
    return LayerWeights(
        input_norm=reader.read(f"{layer}.input_layernorm.weight", (hidden,)),
        qkv_proj=projection("self_attn", "qkv_proj", qkv, hidden, has_attention_bias),
        o_proj=projection("self_attn", "o_proj", [("o_proj", hidden)], q_outputs, has_attention_bias),
        post_attention_norm=reader.read(f"{layer}.post_attention_layernorm.weight", (hidden,)),
        gate_up_proj=projection("mlp", "gate_up_proj", gate_up, hidden, has_mlp_bias),
        down_proj=projection("mlp", "down_proj", [("down_proj", hidden)], intermediate, has_mlp_bias),
    )
