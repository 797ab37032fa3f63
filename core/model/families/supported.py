"""Which architecture is read by whom: the list of families that the decoder of llama.py serves itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.errors import ModelLoadError
from core.model.architecture import ModelArchitecture
from core.model.families import dense, gemma, mixture
from core.model.families.base import Config, read_llama
from core.model.families.from_transformers import read_from_transformers
from core.model_files import CONFIG_FILE

READERS: dict[str, Callable[[Config, int], ModelArchitecture]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": dense.read_mistral,
    "Qwen2ForCausalLM": dense.read_qwen2,
    "Qwen3ForCausalLM": dense.read_qwen3,
    "SmolLM3ForCausalLM": dense.read_smollm3,
    "Phi3ForCausalLM": dense.read_phi3,
    "Gemma2ForCausalLM": gemma.read_gemma2,
    "Gemma3ForCausalLM": gemma.read_gemma3,
    "Gemma3ForConditionalGeneration": gemma.read_gemma3_text_of_images,
    "MixtralForCausalLM": mixture.read_mixtral,
    "Qwen2MoeForCausalLM": mixture.read_qwen2_moe,
    "Qwen3MoeForCausalLM": mixture.read_qwen3_moe,
}


def read_architecture(config: Config, model_dir: Path, max_model_len: int = 0) -> ModelArchitecture:
    """The architecture in a parsed config.json. max_model_len: of a request (0: what the model was made for).

    Raises ModelLoadError naming what is missing or not supported.
    """
    names = config.get("architectures") or []
    name = names[0] if names else "unknown"
    if config.get("quantization_config"):
        raise ModelLoadError(f"{model_dir}: quantized weights are not supported; use a float folder or a GGUF file")
    reader = READERS.get(name)
    try:
        return reader(config, max_model_len) if reader else read_from_transformers(config, model_dir)
    except KeyError as error:
        raise ModelLoadError(f"{model_dir / CONFIG_FILE}: missing the field {error.args[0]}") from error
    except ModelLoadError as error:
        raise ModelLoadError(f"{model_dir}: {error}") from error
