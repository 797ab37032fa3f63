"""Gemma 2 and the text part of Gemma 3: windows and full attention in turn, norms around everything, soft caps.

https://arxiv.org/abs/2408.00118, https://arxiv.org/abs/2503.19786.
"""

from __future__ import annotations

from dataclasses import replace

from core.errors import ModelLoadError
from core.model.architecture import LayerKind, ModelArchitecture, RotaryScaling
from core.model.families.base import Config, is_sliding_by_layer, layers_of, read_llama, read_rope_scaling, read_rope_theta

GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window_pattern": 2}
GEMMA3_DEFAULTS = {"sliding_window_pattern": 6}
GEMMA3_TEXT_SIZES = {"vocab_size": 262208, "max_position_embeddings": 131072}


def read_gemma2(config: Config, max_model_len: int) -> ModelArchitecture:
    """Every second layer, from the first on, has the window."""
    config = _with_defaults(config, GEMMA2_DEFAULTS)
    return _read_gemma(config, read_llama(config, max_model_len), "global")


def read_gemma3(config: Config, max_model_len: int) -> ModelArchitecture:
    """Every sixth layer attends to all positions. Those with a window have a RoPE of their own; heads are normed."""
    config = _with_defaults(config, GEMMA3_DEFAULTS)
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention") or {**(config.get("rope_scaling") or {}), "rope_theta": config.get("rope_theta")}
    local = rope.get("sliding_attention") or {"rope_theta": config.get("rope_local_base_freq")}
    if read_rope_scaling(config, local, max_model_len) != RotaryScaling():
        raise ModelLoadError(f"RoPE {local} for layers with a window is not supported; supported: the default type")
    architecture = read_llama({**config, "rope_parameters": full, "rope_scaling": None}, max_model_len)
    architecture = replace(
        architecture,
        has_qk_norm=True,
        rope_theta=read_rope_theta({}, full, 1_000_000.0),
        local_rope_theta=read_rope_theta({}, local, 10_000.0),
    )
    return _read_gemma(config, architecture, "local")


def read_gemma3_text_of_images(config: Config, max_model_len: int) -> ModelArchitecture:
    """The language model of one that also reads images, which are not served."""
    text = {**GEMMA3_TEXT_SIZES, **config["text_config"]}
    return replace(read_gemma3(text, max_model_len), weights_prefix="language_model.model")


def _read_gemma(config: Config, architecture: ModelArchitecture, windows_rotary: str) -> ModelArchitecture:
    if config.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention is not supported: a token may attend only to those before it")
    period = config["sliding_window_pattern"]
    is_sliding = is_sliding_by_layer(config, [(index + 1) % period != 0 for index in range(architecture.num_layers)])
    # The rotary embedding of a windowed layer stays its own also where no sequence outgrows the window.
    windowed = LayerKind(sliding_window=config["sliding_window"] or 0, rotary=windows_rotary)
    kinds = [windowed if sliding else LayerKind() for sliding in is_sliding]
    return replace(
        architecture,
        family="gemma",
        tie_word_embeddings=bool(config.get("tie_word_embeddings", True)),
        layers=layers_of(kinds, architecture.max_position_embeddings),
        norm_offset=1.0,
        embedding_scale=architecture.hidden_size**0.5,
        attention_scale=config["query_pre_attn_scalar"] ** -0.5,
        attention_soft_cap=config.get("attn_logit_softcapping") or 0.0,
        logit_soft_cap=config.get("final_logit_softcapping") or 0.0,
        has_output_norms=True,
    )


def _with_defaults(config: Config, defaults: Config) -> Config:
    """Gemma configs on the hub leave out what transformers has as a default. Null in the config is a value: no soft cap."""
    shared = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096}
    sizes = {"rms_norm_eps": 1e-6, "num_attention_heads": 8, "num_key_value_heads": 4}
    merged = {**shared, **sizes, **defaults, **config}
    merged["sliding_window_pattern"] = config.get("_sliding_window_pattern") or merged["sliding_window_pattern"]
    return merged
