"""Families with a mixture of experts: Mixtral, Qwen2-MoE, Qwen3-MoE. The forward pass of all of them is mixture.py's."""

from __future__ import annotations

from dataclasses import replace

from core.errors import ModelLoadError
from core.model.architecture import ExpertsShape, LayerKind, ModelArchitecture
from core.model.families.base import Config, is_sliding_by_layer, layers_of, read_llama, read_rope_theta, rope_fields


def read_mixtral(config: Config, max_model_len: int) -> ModelArchitecture:
    """https://arxiv.org/abs/2401.04088: every layer, with experts of intermediate_size."""
    architecture = read_llama(config, max_model_len)
    kind = LayerKind(sliding_window=config.get("sliding_window") or 0, has_experts=True)
    experts = _read_experts(config, architecture.intermediate_size, is_normalized=True)
    return replace(
        architecture,
        family="mixtral",
        rope_theta=read_rope_theta(config, rope_fields(config), 1_000_000.0),
        layers=layers_of([kind] * architecture.num_layers, architecture.max_position_embeddings),
        experts=experts,
    )


def read_qwen2_moe(config: Config, max_model_len: int) -> ModelArchitecture:
    """Qwen2's attention; an expert that every token goes through beside the chosen ones."""
    architecture = replace(
        read_llama(config, max_model_len), attention_bias=bool(config.get("qkv_bias", True)), attention_output_bias=False
    )
    first_full = config.get("max_window_layers", architecture.num_layers)
    default = [index % 2 == 0 and index < first_full for index in range(architecture.num_layers)]
    return _with_qwen_experts(architecture, config, default, config["shared_expert_intermediate_size"])


def read_qwen3_moe(config: Config, max_model_len: int) -> ModelArchitecture:
    """Qwen3's attention, with the window in all layers, if at all."""
    architecture = replace(read_llama(config, max_model_len), has_qk_norm=True)
    return _with_qwen_experts(architecture, config, [True] * architecture.num_layers, 0)


def _with_qwen_experts(
    architecture: ModelArchitecture, config: Config, is_sliding_by_default: list[bool], shared_intermediate_size: int
) -> ModelArchitecture:
    """Some layers may have a dense feed-forward: those in mlp_only_layers, and all but every decoder_sparse_step-th."""
    window = (config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    is_sliding = is_sliding_by_layer(config, is_sliding_by_default)
    dense = set(config.get("mlp_only_layers") or [])
    step = config.get("decoder_sparse_step", 1)
    kinds = [
        LayerKind(sliding_window=window if sliding else 0, has_experts=index not in dense and (index + 1) % step == 0)
        for index, sliding in enumerate(is_sliding)
    ]
    experts = _read_experts(config, config["moe_intermediate_size"], bool(config.get("norm_topk_prob", False)))
    return replace(
        architecture,
        family="qwen_moe",
        layers=layers_of(kinds, architecture.max_position_embeddings),
        experts=replace(experts, shared_intermediate_size=shared_intermediate_size),
    )


def _read_experts(config: Config, intermediate_size: int, is_normalized: bool) -> ExpertsShape:
    num_experts = config.get("num_experts") or config["num_local_experts"]
    per_token = config["num_experts_per_tok"]
    if not 0 < per_token <= num_experts:
        raise ModelLoadError(f"num_experts_per_tok is {per_token}; allowed: 1 to the model's {num_experts} experts")
    return ExpertsShape(num_experts, per_token, intermediate_size, is_normalized)
