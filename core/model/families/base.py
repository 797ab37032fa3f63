"""The part of a config.json that all families have in common: a Llama's.

A family's reader starts from read_llama and replaces what differs. Readers raise KeyError for a missing field and ModelLoadError
for what is not supported; supported.py adds the folder's name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from core.errors import ModelLoadError
from core.model.architecture import LayerKind, ModelArchitecture, RotaryScaling

SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "longrope")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # by the name in configs

Config = dict[str, Any]


def read_llama(config: Config, max_model_len: int) -> ModelArchitecture:
    """Every field that a Llama has. max_model_len: of a request (0: what the model was made for); longrope depends on it."""
    if partial_rotary_factor(config) != 1.0:
        raise ModelLoadError("partial rotary embeddings are not supported in this family")
    return read_llama_with_partial_rotary(config, max_model_len)


def read_llama_with_partial_rotary(config: Config, max_model_len: int) -> ModelArchitecture:
    """The same for families that may turn only the first elements of a head."""
    num_heads = config["num_attention_heads"]
    num_kv_heads = config.get("num_key_value_heads") or num_heads
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads} heads cannot share {num_kv_heads} KV heads evenly")
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = rope_fields(config)
    rotary_dim = _read_rotary_dim(config, head_dim)
    scaling = read_rope_scaling(config, rope, max_model_len)
    if scaling.factors and len(scaling.factors) != (rotary_dim or head_dim) // 2:
        raise ModelLoadError(f"longrope has {len(scaling.factors)} factors for {(rotary_dim or head_dim) // 2} pairs")
    has_attention_bias = bool(config.get("attention_bias", False))
    return ModelArchitecture(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=config["vocab_size"],
        rms_norm_eps=float(config["rms_norm_eps"]),
        rope_theta=read_rope_theta(config, rope),
        rope_scaling=scaling,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=has_attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        max_position_embeddings=config["max_position_embeddings"],
        attention_output_bias=has_attention_bias,
        rotary_dim=rotary_dim,
        activation=read_activation(config),
    )


def read_activation(config: Config) -> str:
    """The name that ModelArchitecture uses."""
    key = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    given = config.get(key, "silu")
    if given not in ACTIVATIONS:
        raise ModelLoadError(f"{key} {given!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]


def rope_fields(config: Config) -> Config:
    """What a config says of RoPE, in either spelling: rope_theta with rope_scaling, or rope_parameters that hold both."""
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def read_rope_theta(config: Config, rope: Config, default: float = 10000.0) -> float:
    return float(rope.get("rope_theta") or config.get("rope_theta") or default)


def read_rope_scaling(config: Config, rope: Config, max_model_len: int) -> RotaryScaling:
    """rope: rope_fields, or those of some of the layers."""
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelLoadError(f"RoPE type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    if rope_type == "default":
        return RotaryScaling()
    if rope_type == "longrope":
        return _read_longrope(config, rope, max_model_len)
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original is None and rope_type == "llama3":
        raise KeyError("rope_scaling.original_max_position_embeddings")
    return RotaryScaling(
        rope_type=rope_type,
        factor=float(rope["factor"]),
        original_max_position_embeddings=original or config["max_position_embeddings"],
        low_freq_factor=float(rope["low_freq_factor"] if rope_type == "llama3" else 1.0),
        high_freq_factor=float(rope["high_freq_factor"] if rope_type == "llama3" else 4.0),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=None if rope.get("attention_factor") is None else float(rope["attention_factor"]),
        mscale=float(rope.get("mscale") or 0.0),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        truncate=bool(rope.get("truncate", True)),
    )


def _read_longrope(config: Config, rope: Config, max_model_len: int) -> RotaryScaling:
    """LongRoPE has frequencies for short and for long sequences. Which are used is decided once, by what a request may have, not
    for each request by what it has: its KV would otherwise change as it grows, and no two requests could share a block.
    """
    longest = config["max_position_embeddings"]
    original = rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest
    is_long = (max_model_len or longest) > original
    return RotaryScaling(
        rope_type="longrope",
        factor=float(rope.get("factor") or longest / original),
        original_max_position_embeddings=original,
        attention_factor=None if rope.get("attention_factor") is None else float(rope["attention_factor"]),
        factors=tuple(float(factor) for factor in rope["long_factor" if is_long else "short_factor"]),
    )


def partial_rotary_factor(config: Config) -> float:
    """The part of a head that RoPE turns."""
    return float(rope_fields(config).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0)


def _read_rotary_dim(config: Config, head_dim: int) -> int:
    factor = partial_rotary_factor(config)
    rotary_dim = int(head_dim * factor)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ModelLoadError(f"partial_rotary_factor {factor} turns {rotary_dim} of {head_dim} elements; allowed: an even number")
    return 0 if rotary_dim == head_dim else rotary_dim


def layers_of(kinds: Sequence[LayerKind], max_position_embeddings: int) -> tuple[LayerKind, ...]:
    """kinds as ModelArchitecture.layers has them. A window that no sequence outgrows is none."""
    layers = tuple(
        dataclasses.replace(kind, sliding_window=0) if kind.sliding_window >= max_position_embeddings else kind for kind in kinds
    )
    return () if all(layer == LayerKind() for layer in layers) else layers


def is_sliding_by_layer(config: Config, default: Sequence[bool]) -> list[bool]:
    """Which layers have a window: layer_types, else what the family does without it."""
    types = config.get("layer_types")
    if types is None:
        return list(default)
    unknown = set(types) - {"full_attention", "sliding_attention"}
    if unknown or len(types) != config["num_hidden_layers"]:
        given = ", ".join(sorted(unknown)) or f"{len(types)} entries for {config['num_hidden_layers']} layers"
        raise ModelLoadError(
            f"layer_types with {given} are not supported; supported: full_attention and sliding_attention, per layer"
        )
    return [layer_type == "sliding_attention" for layer_type in types]
