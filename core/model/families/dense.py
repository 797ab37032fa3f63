"""Families that differ from Llama in a field or two: Mistral, Qwen2 and Qwen2.5, Qwen3, SmolLM3, Phi-3."""

from __future__ import annotations

from dataclasses import replace

from core.errors import ModelLoadError
from core.model.architecture import LayerKind, ModelArchitecture
from core.model.families.base import (
    Config,
    is_sliding_by_layer,
    layers_of,
    read_llama,
    read_llama_with_partial_rotary,
    read_rope_theta,
    rope_fields,
)


def read_mistral(config: Config, max_model_len: int) -> ModelArchitecture:
    """All layers have the window, if the model has one."""
    return _with_one_window(read_llama(config, max_model_len), config)


def read_qwen2(config: Config, max_model_len: int) -> ModelArchitecture:
    """Queries, keys and values have biases, whatever the config says."""
    architecture = replace(read_llama(config, max_model_len), attention_bias=True, attention_output_bias=False)
    return _with_upper_windows(architecture, config)


def read_qwen3(config: Config, max_model_len: int) -> ModelArchitecture:
    """Heads of queries and keys are normed."""
    return _with_upper_windows(replace(read_llama(config, max_model_len), has_qk_norm=True), config)


def read_smollm3(config: Config, max_model_len: int) -> ModelArchitecture:
    """Every few layers one has no positions (NoPE, https://arxiv.org/abs/2501.18795); only these may have a window."""
    num_layers = config["num_hidden_layers"]
    interval = config.get("no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(num_layers)]
    if len(has_rope) < num_layers:
        raise ModelLoadError(f"no_rope_layers has {len(has_rope)} entries for {num_layers} layers")
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    is_sliding = is_sliding_by_layer(config, [bool(window) and not rope for rope in has_rope[:num_layers]])
    kinds = [
        LayerKind(sliding_window=(window or 0) if sliding else 0, rotary="global" if rope else "none")
        for rope, sliding in zip(has_rope, is_sliding, strict=False)
    ]
    architecture = read_llama(config, max_model_len)
    return replace(
        architecture,
        rope_theta=read_rope_theta(config, rope_fields(config), 2_000_000.0),
        layers=layers_of(kinds, architecture.max_position_embeddings),
    )


def read_phi3(config: Config, max_model_len: int) -> ModelArchitecture:
    """Fused tensors, and in some models RoPE on a part of each head and LongRoPE, which older configs call su or yarn."""
    rope = rope_fields(config)
    if (rope.get("rope_type") or rope.get("type")) in ("su", "yarn"):
        rope = {**rope, "rope_type": "longrope"}
    architecture = read_llama_with_partial_rotary({**config, "rope_scaling": None, "rope_parameters": rope}, max_model_len)
    return replace(_with_one_window(architecture, config), family="phi3")


def _with_one_window(architecture: ModelArchitecture, config: Config) -> ModelArchitecture:
    kinds = [LayerKind(sliding_window=config.get("sliding_window") or 0)] * architecture.num_layers
    return replace(architecture, layers=layers_of(kinds, architecture.max_position_embeddings))


def _with_upper_windows(architecture: ModelArchitecture, config: Config) -> ModelArchitecture:
    """Layers from max_window_layers on have the window, where the config turns it on."""
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    first = config.get("max_window_layers", architecture.num_layers)
    is_sliding = is_sliding_by_layer(config, [index >= first for index in range(architecture.num_layers)])
    kinds = [LayerKind(sliding_window=window if sliding else 0) for sliding in is_sliding]
    return replace(architecture, layers=layers_of(kinds, architecture.max_position_embeddings))
