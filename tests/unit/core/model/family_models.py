"""Small random models of every family, made from transformers' config classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.5],
    "long_factor": [1.0, 1.7, 2.5, 5.0],
}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3}
# By test name: the class, and what is not as in SIZES.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": 31}),
    "phi3_longrope": (
        "Phi3ForCausalLM",
        {"rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.5}, "original_max_position_embeddings": 64},
    ),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 24, "tie_word_embeddings": False},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        {"head_dim": 16, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"num_hidden_layers": 3, "query_pre_attn_scalar": 16, "initializer_range": 0.2, "tie_word_embeddings": False},
    ),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 80, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
}
# Families that transformers' own classes compute.
FROM_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 1024, "num_key_value_heads": None}),
    "gpt_neox": ("GPTNeoXForCausalLM", {"num_key_value_heads": None}),
    "cohere": ("CohereForCausalLM", {"logit_scale": 0.25}),
    "olmo2": ("Olmo2ForCausalLM", {}),
}


def save_model(folder: Path, class_name: str, overrides: dict[str, Any], seed: int = 0) -> Any:
    """Write a random model with a stub tokenizer.json into `folder`; returns the float32 transformers model."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, class_name)
    model = model_class(model_class.config_class(**{**SIZES, **overrides})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model
