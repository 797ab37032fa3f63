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
from core.model.architecture import ModelArchitecture
from core.model.checkpoint_formats import FLOAT_CHECKPOINT, CheckpointFormat, read_checkpoint_format
from core.model.families.supported import read_architecture
from core.model_files import CONFIG_FILE, check_model_folder, hash_weight_files, list_weight_files, read_eos_token_ids

FINGERPRINT_BYTES = 16


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Everything about a model that is known before its weights are loaded.

    model_fingerprint: 16 bytes that identify weights and architecture by content, wherever the folder lies. max_model_len:
    prompt + output tokens of one request. eos_token_ids: tokens that end a generation. dtype: what the model computes in; its KV
    may be stored in another. quantization: of projections at load, see ModelOptions.
    """

    architecture: ModelArchitecture
    kv_layout: KVLayout
    model_fingerprint: bytes
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    quantization: str = "none"


def describe_model(model_dir: Path, options: ModelOptions, block_size: int) -> ModelDescription:
    """Read the folder's description; block_size is in tokens. Reads the weights once, to hash them.

    Raises ModelLoadError for an incomplete folder or an unsupported model, ConfigError if options.max_model_len is more than
    the model was made for.
    """
    check_model_folder(model_dir)
    config = _read_json(model_dir / CONFIG_FILE)
    architecture = read_architecture(config, model_dir, options.max_model_len)
    checkpoint_format = read_checkpoint_format(config, model_dir)
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
            dtype=options.kv_dtype,
        ),
        dtype=options.dtype,
        quantization=options.quantization,
        model_fingerprint=_fingerprint(list_weight_files(model_dir), architecture, _numerics(options, checkpoint_format)),
        max_model_len=max_model_len,
        vocab_size=architecture.vocab_size,
        eos_token_ids=read_eos_token_ids(model_dir, config),
    )


def _numerics(options: ModelOptions, checkpoint_format: CheckpointFormat) -> str:
    """What else decides the KV that a model computes from these weights; empty where the layout's dtype says it all."""
    parts = []
    if checkpoint_format != FLOAT_CHECKPOINT:
        parts.append(f"checkpoint={checkpoint_format!r}")
    if options.quantization != "none":
        parts.append(f"quantization={options.quantization}")
    if options.kv_dtype != options.dtype:
        parts.append(f"dtype={options.dtype}")
    return "".join(f"|{part}" for part in parts)


def _fingerprint(weight_files: list[Path], architecture: ModelArchitecture, numerics: str) -> bytes:
    """SHA-256 over the architecture and the digests of all weight bytes, piece by piece so that cores share the work."""
    digest = hashlib.sha256(f"kvrelay model 1|{architecture!r}{numerics}".encode())
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
