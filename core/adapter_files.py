"""LoRA adapters as PEFT saves them: which folders can be served, and what identifies an adapter's content.

Router and nodes read folders through this file and so agree on both. Tensors are core/model/lora's business.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import InvalidInputError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
FINGERPRINT_BYTES = 16
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_CONFIG_BYTES = 1024 * 1024
MAX_WEIGHTS_BYTES = 8 * 1024**3
_CHUNK_BYTES = 16 * 1024**2  # hashed at a time, where the weights are not kept
MAX_SCALING = 1e6

# Fields that change nothing about the forward pass, or that the tensors' names say better.
_WITHOUT_EFFECT = frozenset(
    {
        *("base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version", "runtime_config"),
        *("lora_dropout", "layers_to_transform", "layers_pattern", "exclude_modules", "eva_config", "megatron_core"),
        *("qalora_group_size", "ensure_weight_tying"),
    }
)
_READ = frozenset({"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "init_lora_weights", "bias"})
# Other ways to initialize change the base model's weights too.
_INITIALIZATIONS = (True, False, None, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that has a name. fingerprint: of its content; path: the absolute path of its folder."""

    name: str
    fingerprint: bytes
    path: str


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder's content at one moment. scaling: what the product of both matrices is multiplied by. weights: b"" unless kept."""

    rank: int
    scaling: float
    fingerprint: bytes
    weights: bytes


def read_adapter(path: str, *, keeps_weights: bool = True) -> AdapterFiles:
    """Read and check a folder. Takes as long as reading and hashing its bytes, and without keeps_weights hardly any memory.

    Raises InvalidInputError that names what is missing or not supported, with its value and what is allowed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise InvalidInputError("lora_path", path, f"a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    config_bytes = b"".join(_chunks(folder / CONFIG_FILE, MAX_CONFIG_BYTES))
    kept: list[bytes] = []
    weights_digest = hashlib.sha256()
    for chunk in _chunks(folder / WEIGHTS_FILE, MAX_WEIGHTS_BYTES):
        weights_digest.update(chunk)
        if keeps_weights:
            kept.append(chunk)
    try:
        config = json.loads(config_bytes)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError("lora_path", str(folder / CONFIG_FILE), f"JSON ({error})") from error
    if not isinstance(config, dict):
        raise InvalidInputError("lora_path", str(folder / CONFIG_FILE), "a JSON object")
    rank, scaling = _check_config(config)
    return AdapterFiles(rank, scaling, _fingerprint(config_bytes, weights_digest.digest()), b"".join(kept))


def _fingerprint(config: bytes, weights_digest: bytes) -> bytes:
    """Identity of an adapter by what its two files hold, wherever they lie."""
    digest = hashlib.sha256(b"kvrelay lora adapter 1|%d:" % len(config))
    digest.update(config)
    digest.update(weights_digest)
    return digest.digest()[:FINGERPRINT_BYTES]


def _chunks(path: Path, max_bytes: int) -> Iterator[bytes]:
    """A file as long as it was when it was opened. Raises InvalidInputError."""
    # A device (/dev/zero) has size 0 and no end, and a FIFO without a writer blocks whoever opens it.
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInputError("lora_path", str(path), "a regular file")
            if status.st_size > max_bytes:
                raise InvalidInputError("lora_path", str(path), f"a file of at most {max_bytes} bytes")
            num_left = status.st_size
            while num_left and (chunk := file.read(min(num_left, _CHUNK_BYTES))):
                num_left -= len(chunk)
                yield chunk
    except OSError as error:
        raise InvalidInputError("lora_path", str(path), f"a file that can be read ({error.strerror})") from error


def _check_config(config: dict[str, Any]) -> tuple[int, float]:
    """(rank, scaling) of an adapter_config.json that asks for nothing but LoRA."""
    _expect(config, "peft_type", lambda value: value == "LORA", "LORA")
    _expect(config, "task_type", lambda value: value in (None, "CAUSAL_LM"), "CAUSAL_LM")
    _expect(config, "bias", lambda value: value in (None, "none"), "none")
    _expect(config, "use_rslora", lambda value: value in (None, True, False), "true or false")
    _expect(config, "init_lora_weights", lambda value: value in _INITIALIZATIONS, "true, false, gaussian, eva or orthogonal")
    _expect(config, "r", lambda value: type(value) is int and value >= 1, "a whole number of at least 1")
    _expect(config, "lora_alpha", _is_scale, f"a number above 0 and at most {MAX_SCALING:g}")
    targets = config.get("target_modules")
    for target in targets if isinstance(targets, list) else ():
        if not isinstance(target, str) or target.rpartition(".")[2] not in TARGET_MODULES:
            raise InvalidInputError("target_modules", target, f"any of {', '.join(TARGET_MODULES)}")
    for name, value in config.items():
        if name not in _READ and name not in _WITHOUT_EFFECT and value not in (None, False, "", [], {}):
            raise InvalidInputError(name, value, "absent or null: it is not supported")
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _is_scale(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MAX_SCALING


def _expect(config: dict[str, Any], name: str, is_allowed: Callable[[Any], bool], allowed: str) -> None:
    if not is_allowed(value := config.get(name)):
        raise InvalidInputError(name, value, allowed)
