"""The shape of a model that only transformers' own class can compute (transformers_model.py), or why it cannot be served.

What can be told without weights is told here; what shows only when the model runs, when it is loaded.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.model.architecture import TRANSFORMERS_FAMILY, LayerKind, ModelArchitecture, RotaryScaling
from core.model.families.base import Config

# Of these nothing depends that a block holds.
IGNORED_FIELDS = frozenset({"_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"})
SERVED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def read_from_transformers(config: Config, model_dir: Path) -> ModelArchitecture:
    """Raises ModelLoadError saying what stands against it. Never runs code that came with the model."""
    # Not at the top: importing transformers takes seconds, which the families of our own need not wait for.
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = config.get("architectures") or []
    name = str(names[0]) if names else "unknown"
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelLoadError(
            f"architecture {name} is not supported; supported: causal language models that transformers "
            f"{transformers.__version__} knows (code that comes with a model is never run)"
        )
    try:
        loaded = transformers.AutoConfig.from_pretrained(model_dir, trust_remote_code=False, local_files_only=True)
        return _read_shape(name, getattr(transformers, name), loaded, _digest(config))
    # RuntimeError: sizes that differ from layer to layer.
    except (ValueError, KeyError, OSError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelLoadError(f"{name} is not supported: its config gives no shape that all layers have ({error})") from error


def _read_shape(name: str, model_class: Any, loaded: Any, digest: str) -> ModelArchitecture:
    """loaded: transformers' config. Fields that only our own decoder reads keep values without meaning."""
    text = loaded.get_text_config()
    _check_shape(name, model_class, loaded, text)
    num_heads = text.num_attention_heads
    return ModelArchitecture(
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 0,
        num_layers=text.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(text),
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // num_heads,
        vocab_size=text.vocab_size,
        rms_norm_eps=0.0,
        rope_theta=0.0,
        rope_scaling=RotaryScaling(),
        tie_word_embeddings=bool(getattr(loaded, "tie_word_embeddings", False)),
        attention_bias=False,
        mlp_bias=False,
        max_position_embeddings=text.max_position_embeddings,
        family=TRANSFORMERS_FAMILY,
        layers=_layers(text),
        class_name=name,
        config_digest=digest,
    )


def _check_shape(name: str, model_class: Any, loaded: Any, text: Any) -> None:
    if getattr(loaded, "is_encoder_decoder", False):
        raise ModelLoadError(f"{name} is not supported: an encoder's states are no KV of tokens")
    if getattr(model_class, "_is_stateful", False):
        raise ModelLoadError(f"{name} is not supported: it keeps a recurrent state, which cannot be stored by blocks of tokens")
    for field in ("num_attention_heads", "hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"):
        if not isinstance(getattr(text, field, None), int):
            raise ModelLoadError(f"{name} is not supported: its config has no {field}")
    types = set(getattr(text, "layer_types", None) or ()) - SERVED_LAYER_TYPES
    if types:
        allowed = " and ".join(sorted(SERVED_LAYER_TYPES))
        raise ModelLoadError(f"{name} with layers of {', '.join(sorted(types))} is not supported; supported: {allowed}")
    if not getattr(model_class, "_supports_attention_backend", False):
        raise ModelLoadError(f"{name} is not supported: its class in transformers computes attention itself")


def _num_kv_heads(text: Any) -> int:
    if getattr(text, "multi_query", False):
        return 1
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _layers(text: Any) -> tuple[LayerKind, ...]:
    """What the config says of windows. The class gives each layer's to attention itself: this is to be compared with it."""
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    types = getattr(text, "layer_types", None) or ["sliding_attention"] * text.num_hidden_layers
    if not window:
        return ()
    return tuple(LayerKind(sliding_window=window if kind == "sliding_attention" else 0) for kind in types)


def _digest(config: Config) -> str:
    """Over all fields that may change what the model computes."""
    fields = {key: value for key, value in config.items() if key not in IGNORED_FIELDS}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
