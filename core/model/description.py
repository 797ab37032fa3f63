"""What a model folder holds, read without loading weights: architecture, KV layout, content identity, limits.

Every process that serves the model starts from this value. The weights themselves are read by weights.py.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import ModelOptions
from core.errors import ConfigError, ModelLoadError
from core.kv.layout import KVLayout
from core.model_files import CONFIG_FILE, check_model_folder, hash_weight_files, list_weight_files, read_eos_token_ids

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How RoPE's frequencies are stretched beyond the trained context; see rotary.py for the formulas.

    rope_type: default, linear, llama3 or yarn; fields that a type does not use keep their defaults. attention_factor None:
    derived from factor (and mscale, mscale_all_dim if both are set).
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A Llama's shape, in the names that Hugging Face configs use. Sizes are in elements."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int

    @property
    def is_plain_llama(self) -> bool:
        """Nothing but what the Llama papers describe."""
        return True


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Everything about a model that is known before its weights are loaded.

    model_fingerprint: 16 bytes that identify weights and architecture by content, wherever the folder lies. max_model_len:
    prompt + output tokens of one request. eos_token_ids: tokens that end a generation.
    """

    architecture: ModelArchitecture
    kv_layout: KVLayout
    model_fingerprint: bytes
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]


def describe_model(model_dir: Path, options: ModelOptions, block_size: int) -> ModelDescription:
    """Read the folder's description; block_size is in tokens. Reads the weights once, to hash them.

    Raises ModelLoadError for an incomplete folder or an unsupported model, ConfigError if options.max_model_len is more than
    the model was made for.
    """
    check_model_folder(model_dir)
    config = _read_json(model_dir / CONFIG_FILE)
    architecture = read_architecture(config, model_dir)
    max_model_len = options.max_model_len or architecture.max_position_embeddings
    if max_model_len > architecture.max_position_embeddings:
        raise ConfigError("model.max_model_len", max_model_len, f"up to the model's {architecture.max_position_embeddings}")
    return ModelDescription(
        architecture=architecture,
        kv_layout=KVLayout(
            num_layers=architecture.num_layers,
            block_size=block_size,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            dtype=options.dtype,
        ),
        model_fingerprint=_fingerprint(list_weight_files(model_dir), architecture),
        max_model_len=max_model_len,
        vocab_size=architecture.vocab_size,
        eos_token_ids=read_eos_token_ids(model_dir, config),
    )


def read_architecture(config: dict[str, Any], model_dir: Path) -> ModelArchitecture:
    """The architecture in a parsed config.json. Raises ModelLoadError naming what is missing or not supported."""
    names = config.get("architectures") or []
    if not names or names[0] not in SUPPORTED_ARCHITECTURES:
        raise ModelLoadError(
            f"{model_dir}: architecture {names[0] if names else 'unknown'} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if config.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"{model_dir}: hidden_act {config['hidden_act']!r} is not supported; supported: silu")
    if config.get("quantization_config"):
        raise ModelLoadError(f"{model_dir}: quantized weights are not supported; use a float folder or a GGUF file")
    try:
        num_heads = config["num_attention_heads"]
        num_kv_heads = config.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads:
            raise ModelLoadError(f"{model_dir}: {num_heads} heads cannot share {num_kv_heads} KV heads evenly")
        rope_theta, scaling = _read_rope(config, model_dir)
        return ModelArchitecture(
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=rope_theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            max_position_embeddings=config["max_position_embeddings"],
        )
    except KeyError as error:
        raise ModelLoadError(f"{model_dir / CONFIG_FILE}: missing the field {error.args[0]}") from error


def _read_rope(config: dict[str, Any], model_dir: Path) -> tuple[float, RotaryScaling]:
    """(theta, scaling) from either spelling: rope_theta with rope_scaling, or rope_parameters that hold both."""
    given: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rope_type = given.get("rope_type") or given.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise ModelLoadError(
            f"{model_dir}: RoPE type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
        )
    if given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelLoadError(f"{model_dir}: partial rotary embeddings are not supported")
    if rope_type == "default":
        return theta, RotaryScaling()
    original = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if original is None and rope_type == "llama3":
        raise KeyError("rope_scaling.original_max_position_embeddings")
    return theta, RotaryScaling(
        rope_type=rope_type,
        factor=float(given["factor"]),
        original_max_position_embeddings=original or config["max_position_embeddings"],
        low_freq_factor=float(given["low_freq_factor"] if rope_type == "llama3" else 1.0),
        high_freq_factor=float(given["high_freq_factor"] if rope_type == "llama3" else 4.0),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=None if given.get("attention_factor") is None else float(given["attention_factor"]),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        truncate=bool(given.get("truncate", True)),
    )


def _fingerprint(weight_files: list[Path], architecture: ModelArchitecture) -> bytes:
    """SHA-256 over the architecture and the digests of all weight bytes, piece by piece so that cores share the work."""
    digest = hashlib.sha256(f"kvrelay model 1|{architecture!r}".encode())
    for piece_digest in hash_weight_files(weight_files):
        digest.update(piece_digest)
    return digest.digest()[:FINGERPRINT_BYTES]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(loaded, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return loaded
