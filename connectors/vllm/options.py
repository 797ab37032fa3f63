"""What users of the vLLM plugin set, and the name of the model that they serve. Imports nothing of vLLM: see vllm_plugin.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from connectors.byte_sizes import with_parsed_sizes
from connectors.vllm.foreign_keys import fingerprint_of_model, fingerprint_of_name
from core.config import options_from_mapping
from core.errors import ConfigError

OPTIONS = "kv_connector_extra_config"


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """connector: a name of `connectors.registry`; options that are not listed here are that connector's own.

    staging_bytes: memory through which blocks pass, per worker. save_output_blocks: also store what is generated.
    model_fingerprint: a text that names the weights' content, where the model is no local folder or too large to be read once at
    start. lookup_timeout_s: after which an unanswered lookup is a miss.
    """

    connector: str
    staging_bytes: int = 256 * 1024 * 1024
    load_timeout_s: float = 10.0
    save_timeout_s: float = 30.0
    lookup_timeout_s: float = 1.0
    save_output_blocks: bool = True
    model_fingerprint: str = ""

    def __post_init__(self) -> None:
        for name in ("load_timeout_s", "save_timeout_s", "lookup_timeout_s"):
            if not 0.01 <= getattr(self, name) <= 600:
                raise ConfigError(f"{OPTIONS}.{name}", getattr(self, name), "0.01 to 600")


def read_options(given: Mapping[str, Any]) -> tuple[PluginOptions, dict[str, Any]]:
    """The plugin's own options, and the rest, which are the connector's. Raises ConfigError."""
    names = {option.name for option in fields(PluginOptions)}
    if not given.get("connector"):
        raise ConfigError(f"{OPTIONS}.connector", given.get("connector"), "the name of a connector, such as nvme or redis")
    own = with_parsed_sizes({name: value for name, value in given.items() if name in names}, ("staging_bytes",), OPTIONS)
    return options_from_mapping(PluginOptions, own, OPTIONS), {name: value for name, value in given.items() if name not in names}


def fingerprint_model(model_config: Any, load_config: Any, name: str) -> bytes:
    """Of the model in vLLM's configuration: by content, or by the name that the operator gave it. Raises ConfigError."""
    numerics = f"dtype={model_config.dtype}|quantization={model_config.quantization}"
    if name:
        return fingerprint_of_name(name, numerics)
    if load_config.load_format not in ("auto", "safetensors"):
        raise ConfigError("load_format", load_config.load_format, "auto or safetensors, or set model_fingerprint")
    return fingerprint_of_model(model_config.model, model_config.hf_config.to_dict(), numerics)
