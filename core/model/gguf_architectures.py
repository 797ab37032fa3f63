"""What GGUF calls things and Hugging Face otherwise: hyperparameters and tensors, architecture by architecture.

convert_gguf.py reads and writes the files; here are names and the few places where numbers differ as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from core.errors import ModelLoadError

Floats = npt.NDArray[np.float32]
TENSOR_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ATTENTION = {f"attn_{part}": f"self_attn.{part}_proj" for part in ("q", "k", "v")} | {"attn_output": "self_attn.o_proj"}
_MLP = {f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_GEMMA_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class GgufFields:
    """Metadata of one file, read by the name below the architecture's own."""

    def __init__(self, fields: Mapping[str, Any], architecture: str) -> None:
        self._fields = fields
        self.architecture = architecture

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0. Raises ModelLoadError for anything else, and where there is neither it nor a default."""
        return int(self._number(name, default, is_whole=True))

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0, without the noise of having been stored as float32. Raises ModelLoadError likewise."""
        return float(f"{self._number(name, default, is_whole=False):.7g}")

    def text(self, name: str, default: str) -> object:
        """Whatever is stored there."""
        return self._fields.get(f"{self.architecture}.{name}", default)

    def has(self, name: str) -> bool:
        """Whether the file says anything of it."""
        return f"{self.architecture}.{name}" in self._fields

    def _number(self, name: str, default: float | None, is_whole: bool) -> float:
        key = f"{self.architecture}.{name}"
        value = self._fields.get(key, default)
        if value is None:
            raise ModelLoadError(f"GGUF file lacks the field {key}")
        if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float) or not 0 < value < 2**53:
            raise ModelLoadError(
                f"GGUF field {key} is {str(value)[:100]!r}; allowed: {'a whole' if is_whole else 'a'} number above 0"
            )
        return value


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture. class_name, model_type: Hugging Face's. modules: Hugging Face's name below model.layers.N by GGUF's below
    blk.N. with_bias: modules of these that have a bias. read_more: config fields of its own. norm_offset: what GGUF adds to the
    weights of norms. has_permuted_heads: rows of Q and K are in another order. scalings: allowed types of scaled RoPE.
    """

    class_name: str
    model_type: str
    modules: Mapping[str, str]
    with_bias: tuple[str, ...] = ()
    read_more: Callable[[GgufFields], dict[str, Any]] = field(default=lambda fields: {"hidden_act": "silu"})
    norm_offset: float = 0.0
    has_permuted_heads: bool = False
    scalings: tuple[str, ...] = ("none",)

    def tensor_name(self, gguf_name: str) -> str | None:
        """Hugging Face's name of a tensor; None for one that the architecture does not have."""
        if gguf_name in TENSOR_NAMES:
            return TENSOR_NAMES[gguf_name]
        match = re.fullmatch(r"blk\.(\d{1,6})\.([a-z_]+)\.(weight|bias)", gguf_name)
        if not match or match[2] not in self.modules or (match[3] == "bias" and match[2] not in self.with_bias):
            return None
        return f"model.layers.{match[1]}.{self.modules[match[2]]}.{match[3]}"

    def convert(self, name: str, values: Floats, config: Mapping[str, Any]) -> Floats:
        """Hugging Face's numbers of the tensor that it calls `name`. Raises ModelLoadError for a shape that cannot be."""
        if self.norm_offset and name.endswith("norm.weight"):
            return values - np.float32(self.norm_offset)
        for module, num_heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if self.has_permuted_heads and f".{module}." in name:
                return unpermute_rotary_rows(name, values, config[num_heads])
        return values


def unpermute_rotary_rows(name: str, weight: Floats, num_heads: int) -> Floats:
    """Undo GGUF's row order of Q and K, [num_heads * head_dim, hidden]: from RoPE on pairs (0, 1) to RoPE on pairs (0, d/2)."""
    if weight.ndim != 2 or weight.shape[0] % (2 * num_heads):
        raise ModelLoadError(f"GGUF tensor {name} has shape {list(weight.shape)}, which {num_heads} heads cannot share")
    rows, hidden = weight.shape
    paired = weight.reshape(num_heads, rows // num_heads // 2, 2, hidden)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, hidden))


def _qwen2(fields: GgufFields) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _phi3(fields: GgufFields) -> dict[str, Any]:
    head_dim = fields.size("embedding_length") // fields.size("attention.head_count")
    turned = fields.size("rope.dimension_count", head_dim)
    return {
        "hidden_act": "silu",
        "sliding_window": fields.size("attention.sliding_window") if fields.has("attention.sliding_window") else None,
        "partial_rotary_factor": turned / head_dim,
        "original_max_position_embeddings": fields.size("context_length"),
    }


def _gemma(fields: GgufFields, largest_num_layers: int) -> dict[str, Any]:
    """The scale of scores is not in the file: it is that of a head, but for the largest size, which is told by its layers."""
    per_head = fields.size("embedding_length") // fields.size("attention.head_count")
    is_largest = fields.size("block_count") == largest_num_layers
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": per_head if is_largest else fields.size("attention.key_length", per_head),
        "sliding_window": fields.size("attention.sliding_window"),
    }


def _gemma2(fields: GgufFields) -> dict[str, Any]:
    return {
        **_gemma(fields, 46),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
    }


def _gemma3(fields: GgufFields) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 1e6)}
    if fields.text("rope.scaling.type", "none") == "linear":
        rope = {**rope, "rope_type": "linear", "factor": fields.number("rope.scaling.factor")}
    return {
        **_gemma(fields, 62),
        "rope_parameters": {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 6,
    }


ARCHITECTURES = {
    "llama": GgufArchitecture("LlamaForCausalLM", "llama", _ATTENTION | _MLP | _NORMS, has_permuted_heads=True),
    "qwen2": GgufArchitecture(
        "Qwen2ForCausalLM", "qwen2", _ATTENTION | _MLP | _NORMS, with_bias=("attn_q", "attn_k", "attn_v"), read_more=_qwen2
    ),
    "qwen3": GgufArchitecture("Qwen3ForCausalLM", "qwen3", _ATTENTION | _MLP | _NORMS | _HEAD_NORMS, read_more=_qwen2),
    "gemma2": GgufArchitecture(
        "Gemma2ForCausalLM", "gemma2", _ATTENTION | _MLP | _GEMMA_NORMS, read_more=_gemma2, norm_offset=1.0
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _ATTENTION | _MLP | _GEMMA_NORMS | _HEAD_NORMS,
        read_more=_gemma3,
        norm_offset=1.0,
        scalings=("none", "linear"),
    ),
    "phi3": GgufArchitecture(
        "Phi3ForCausalLM",
        "phi3",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }
        | _NORMS,
        read_more=_phi3,
    ),
}


def find_architecture(fields: Mapping[str, Any]) -> GgufArchitecture:
    """By general.architecture. Raises ModelLoadError naming those that there are."""
    name = fields.get("general.architecture")
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ModelLoadError(f"GGUF architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    return found


def read_config(fields: Mapping[str, Any], has_output_head: bool) -> dict[str, Any]:
    """A config.json from GGUF metadata. Raises ModelLoadError for what is missing, malformed or not supported."""
    architecture = find_architecture(fields)
    own = GgufFields(fields, str(fields["general.architecture"]))
    scaling = own.text("rope.scaling.type", "none")
    if scaling not in architecture.scalings:
        raise ModelLoadError(f"GGUF with RoPE scaling {scaling!r} is not supported; use the model's Hugging Face folder")
    num_heads, hidden = own.size("attention.head_count"), own.size("embedding_length")
    vocab = fields.get("tokenizer.ggml.tokens")
    if not isinstance(vocab, list) or not vocab:
        raise ModelLoadError("GGUF file lacks the field tokenizer.ggml.tokens")
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": own.size("feed_forward_length"),
        "num_hidden_layers": own.size("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": own.size("attention.head_count_kv", num_heads),
        "head_dim": own.size("attention.key_length", hidden // num_heads),
        "vocab_size": len(vocab),
        "max_position_embeddings": own.size("context_length"),
        "rms_norm_eps": own.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": own.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": not has_output_head,
        "attention_bias": False,
        "mlp_bias": False,
        **{
            f"{role}_token_id": token_id_of(fields, key, len(vocab))
            for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        },
        "dtype": "float32",
        **architecture.read_more(own),
    }


def token_id_of(fields: Mapping[str, Any], role: str, vocab_size: int) -> int | None:
    """tokenizer.ggml.{role}_token_id, or None. Raises ModelLoadError for one that is no token."""
    key = f"tokenizer.ggml.{role}_token_id"
    value = fields.get(key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < vocab_size):
        raise ModelLoadError(f"GGUF field {key} is {value!r}; allowed: 0 to {vocab_size - 1}")
    return value
