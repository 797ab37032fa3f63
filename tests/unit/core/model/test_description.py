"""What a folder's description says, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelOptions
from core.errors import ConfigError, ModelLoadError
from core.model.description import ModelDescription, describe_model
from core.model.weights import load_llama_weights
from tests.unit.core.model.support import save_llama


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder, attention_bias=True)
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine, tmp_path / "llama"))


def describe(folder: Path, **options: Any) -> ModelDescription:
    return describe_model(folder, ModelOptions(**{"dtype": "float32", **options}), 16)


def edit_json(path: Path, **changes: Any) -> None:
    """Set fields; None removes one."""
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


def test_describe_model_reads_shape_layout_and_limits(folder: Path) -> None:
    description = describe(folder, dtype="bfloat16", max_model_len=100)
    architecture, layout = description.architecture, description.kv_layout
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim, architecture.num_layers) == (6, 2, 16, 2)
    assert (layout.num_layers, layout.block_size, layout.num_kv_heads, layout.head_dim, layout.dtype) == (
        2,
        16,
        2,
        16,
        "bfloat16",
    )
    assert architecture.attention_bias and not architecture.mlp_bias and not architecture.tie_word_embeddings
    assert (description.max_model_len, description.vocab_size, description.eos_token_ids) == (100, 320, (2,))
    assert describe(folder).max_model_len == 2048
    assert len(description.model_fingerprint) == 16


def test_describe_model_max_model_len_beyond_model_raises(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.max_model_len: got 2049.*2048"):
        describe(folder, max_model_len=2049)


def test_describe_model_eos_from_generation_config_else_config(folder: Path) -> None:
    edit_json(folder / "generation_config.json", eos_token_id=[2, 7])
    assert describe(folder).eos_token_ids == (2, 7)
    (folder / "generation_config.json").unlink()
    assert describe(folder).eos_token_ids == (2,)
    edit_json(folder / "config.json", eos_token_id=None)
    assert describe(folder).eos_token_ids == ()


def test_describe_model_both_rope_spellings_mean_the_same(folder: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    edit_json(folder / "config.json", rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    new = describe(folder).architecture
    edit_json(folder / "config.json", rope_parameters=None, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert describe(folder).architecture == new
    assert (new.rope_theta, new.rope_scaling.rope_type, new.rope_scaling.factor) == (5e5, "llama3", 8.0)


def test_describe_model_fingerprint_follows_content_not_path(folder: Path, tmp_path: Path) -> None:
    original = describe(folder).model_fingerprint
    moved = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert describe(moved).model_fingerprint == original
    edit_json(moved / "config.json", transformers_version="0")
    assert describe(moved, max_model_len=100).model_fingerprint == original  # neither changes what a block holds
    edit_json(moved / "config.json", rms_norm_eps=1e-3)
    assert describe(moved).model_fingerprint != original
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert describe(folder).model_fingerprint != original


def test_describe_model_fingerprint_differs_where_kv_would(folder: Path) -> None:
    choices: list[dict[str, Any]] = [
        *({"dtype": "bfloat16"}, {"dtype": "float32"}),  # differ in the layout's fingerprint
        *({"dtype": dtype, "kv_cache_dtype": kv} for dtype in ("bfloat16", "float32") for kv in ("fp8", "int8", "float16")),
        *({"dtype": "bfloat16", "quantization": quantization} for quantization in ("int8", "int4")),
    ]
    found = [describe(folder, **choice) for choice in choices]
    names = {(description.model_fingerprint, description.kv_layout.fingerprint) for description in found}
    assert len(names) == len(choices)
    same = describe(folder, dtype="bfloat16", kv_cache_dtype="bfloat16")
    assert (same.model_fingerprint, same.kv_layout) == (found[0].model_fingerprint, found[0].kv_layout)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
            "MambaForCausalLM is not supported: it keeps a recurrent",
        ),
        ({"architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration is not supported; supported: causal"),
        (
            {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},
            "FalconForCausalLM is not supported: its config gives no shape",
        ),
        (
            {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"},
            "StableLmForCausalLM .* computes attention itself",
        ),
        ({"architectures": ["XLMForCausalLM"]}, "architecture XLMForCausalLM is not supported"),
        ({"architectures": None}, "architecture unknown is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0}}, "RoPE type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0], "short_factor": [1.0]}}, "1 factors for 8 pairs"),
        ({"partial_rotary_factor": 0.5}, "partial rotary embeddings"),
        ({"architectures": ["Qwen3ForCausalLM"], "layer_types": ["chunked_attention"] * 2}, "chunked_attention"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok is 3"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 2}, "missing the field num_experts_per_tok"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quant_method 'bitsandbytes' .* supported: fp8",
        ),
        ({"num_key_value_heads": 4}, "evenly"),
        ({"vocab_size": None}, "missing the field vocab_size"),
    ],
)
def test_describe_model_unsupported_raises_saying_what(folder: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(folder / "config.json", **changes)
    with pytest.raises(ModelLoadError, match=message):
        describe(folder)


def test_describe_model_broken_json_raises(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: not readable as JSON"):
        describe(folder)


def test_load_weights_missing_or_misshaped_tensor_raises_naming_it(folder: Path) -> None:
    architecture = describe(folder).architecture
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    for tensor, message in (
        (None, f"missing tensor {name}"),
        (torch.zeros(3, 4), rf"tensor {name} has shape \[3, 4\], expected \[160, 96\]"),
        (weights[name].int(), f"tensor {name} has dtype torch.int32"),
    ):
        changed = {key: value for key, value in weights.items() if key != name}
        if tensor is not None:
            changed[name] = tensor
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(ModelLoadError, match=message):
            load_llama_weights(folder, architecture, torch.float32)
    (folder / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        load_llama_weights(folder, architecture, torch.float32)
