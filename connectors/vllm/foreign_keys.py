"""Names of the KV blocks of another engine: what decides their content, and what their bytes mean.

Such an engine keeps KV in a form of its own, so its blocks never meet ours, nor those of another version or rank of it, even
where they have the same size. Knows nothing of the engine itself; see vllm_plugin.py.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.kv.hashing import Namespace
from core.kv.layout import KVLayout
from core.model_files import hash_weight_files, list_weight_files

FINGERPRINT_BYTES = 16
# Fields of a model's configuration that say where it came from, not what it computes.
_ORIGIN_FIELDS = ("_name_or_path", "name_or_path", "transformers_version")
_MAX_ADAPTERS = 1024


@dataclass(frozen=True, slots=True)
class RankLayout:
    """The KV of one tensor-parallel rank: block size and shape as ours, and in `details` all that its bytes depend on besides:
    engine, version, attention backend, order of dimensions, layer names, rank."""

    layout: KVLayout
    details: str

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever the meaning of a block's bytes differs."""
        text = f"kvrelay foreign layout 1|{self.layout.fingerprint.hex()}|{self.details}"
        return hashlib.sha256(text.encode()).digest()[:FINGERPRINT_BYTES]

    def namespace(self, model_fingerprint: bytes) -> Namespace:
        """Under which this rank's blocks are named."""
        return Namespace(model_fingerprint, self.fingerprint, self.layout.block_size)


def fingerprint_of_model(folder: str, model_config: Mapping[str, Any], numerics: str) -> bytes:
    """Identity by content: the weights' bytes, the configuration as the engine reads it, and how it computes (dtype, ...).

    Reads all weights once. Raises ConfigError unless `folder` is a local one with safetensors.
    """
    weight_files = list_weight_files(Path(folder)) if Path(folder).is_dir() else []
    if not weight_files:
        raise ConfigError(
            "model", folder, "a local folder with *.safetensors, or the option model_fingerprint: any text that names its content"
        )
    described = {name: value for name, value in model_config.items() if name not in _ORIGIN_FIELDS}
    text = f"kvrelay foreign model 1|{json.dumps(described, sort_keys=True, default=str)}|{numerics}"
    digest = hashlib.sha256(text.encode())
    for piece_digest in hash_weight_files(weight_files):
        digest.update(piece_digest)
    return digest.digest()[:FINGERPRINT_BYTES]


def fingerprint_of_name(name: str, numerics: str) -> bytes:
    """Identity by a name that the operator vouches for."""
    return hashlib.sha256(f"kvrelay named model 1|{name}|{numerics}".encode()).digest()[:FINGERPRINT_BYTES]


class AdapterFingerprints:
    """Identity of adapters (LoRA) by the content of their folders, each read once."""

    def __init__(self) -> None:
        self._by_adapter: dict[tuple[str, str], bytes | None] = {}

    def find(self, name: str, path: str) -> bytes | None:
        """None: it cannot be told what the adapter holds, so that nothing computed with it may be shared."""
        key = (name, path)
        if key not in self._by_adapter:
            if len(self._by_adapter) >= _MAX_ADAPTERS:
                del self._by_adapter[next(iter(self._by_adapter))]
            self._by_adapter[key] = _fingerprint_of_adapter(Path(path))
        return self._by_adapter[key]


def _fingerprint_of_adapter(folder: Path) -> bytes | None:
    try:
        config = (folder / "adapter_config.json").read_bytes()
        weight_files = sorted(folder.glob("*.safetensors"))
        if not weight_files:
            return None
        digest = hashlib.sha256(b"kvrelay adapter 1|%d:" % len(config) + config)
        for piece_digest in hash_weight_files(weight_files):
            digest.update(piece_digest)
    except OSError:
        return None
    return digest.digest()[:FINGERPRINT_BYTES]
