"""Every family against transformers: logits and greedy tokens, prefill in chunks and decode; and bits alone and in a batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelOptions
from core.model.description import describe_model
from tests.support.lora_folders import save_adapter, save_merged
from tests.unit.core.model.family_models import FAMILIES, save_model
from tests.unit.core.model.support import Driver, random_prompt
from tests.unit.core.model.test_batch_invariance import WITH_LOGPROBS, _same_bits
from tests.unit.core.model.test_runner import ASKING, assert_logprobs_match, reference_greedy


# auto: the compiled kernels, where they can be built.
@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_runner_family_in_chunks_and_decoding_equals_transformers(tmp_path: Path, family: str, kernels: str) -> None:
    model = save_model(tmp_path, *FAMILIES[family])
    prompt = random_prompt(110, seed=3, vocab_size=128)
    expected, expected_logprobs = reference_greedy(model, prompt, 6)
    driver = Driver(tmp_path, num_blocks=32, cpu_kernels=kernels)
    request = driver.run_alone(driver.add("a", prompt, ASKING), 6, chunk=45)
    assert request.output == expected
    assert_logprobs_match(request.logprobs, expected_logprobs[len(prompt) - 1 :], expected)
    assert_logprobs_match(request.prompt_logprobs, expected_logprobs[: len(prompt) - 1], prompt[1:])
    assert len(set(request.output)) > 1  # a model that says one thing whatever it reads would prove little


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize(("window", "chunk"), [(24, 300), (24, 1000), (200, 77), (256, 512), (300, 1)])
def test_runner_windows_over_many_tiles_of_kv_equal_transformers(tmp_path: Path, window: int, chunk: int, kernels: str) -> None:
    """A tile is 256 positions: windows begin in later ones than the first, rows of a pass in different ones."""
    model = save_model(tmp_path, "MistralForCausalLM", {"sliding_window": window})
    prompt = random_prompt(260 if chunk == 1 else 700, seed=5, vocab_size=128)
    expected, expected_logprobs = reference_greedy(model, prompt, 4)
    driver = Driver(tmp_path, num_blocks=48, cpu_kernels=kernels)
    request = driver.run_alone(driver.add("a", prompt, ASKING), 4, chunk)
    assert request.output == expected
    assert_logprobs_match(request.prompt_logprobs, expected_logprobs[: len(prompt) - 1], prompt[1:])


@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "auto")])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "qwen2_moe", "mixtral"])
def test_runner_family_in_any_batch_same_bits_as_alone(tmp_path: Path, family: str, dtype: str, kernels: str) -> None:
    save_model(tmp_path, *FAMILIES[family])
    driver = Driver(tmp_path, dtype, num_blocks=160, cpu_kernels=kernels)
    prompts = [random_prompt(count, seed=count, vocab_size=128) for count in (41, 5, 560)]
    alone = [driver.run_alone(driver.add(f"alone{i}", prompt, WITH_LOGPROBS), 5, chunk=1000) for i, prompt in enumerate(prompts)]
    together = [driver.add(f"together{i}", prompt, WITH_LOGPROBS) for i, prompt in enumerate(prompts)]
    chunks = (70, 23, 7)
    while running := [request for request in together if len(request.output) < 5]:
        driver.step([(r, min(chunks[len(running) - 1], len(r.token_ids) - r.num_computed_tokens)) for r in running])
    for found, expected in zip(together, alone, strict=True):
        assert found.output == expected.output
        assert found.logprobs == expected.logprobs
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert _same_bits(driver.kv(found), driver.kv(expected))


def test_describe_model_longrope_follows_max_model_len_and_so_do_hashes(tmp_path: Path) -> None:
    save_model(tmp_path, *FAMILIES["phi3_longrope"])
    short = describe_model(tmp_path, ModelOptions(dtype="float32", max_model_len=64), 16)
    long = describe_model(tmp_path, ModelOptions(dtype="float32", max_model_len=65), 16)
    whole = describe_model(tmp_path, ModelOptions(dtype="float32"), 16)
    assert short.architecture.rope_scaling.factors == (1.0, 1.1, 1.2, 1.5)
    assert long.architecture.rope_scaling.factors == (1.0, 1.7, 2.5, 5.0)
    assert long.model_fingerprint == whole.model_fingerprint != short.model_fingerprint


@pytest.mark.parametrize(
    ("family", "is_plain"), [("qwen2", True), ("phi3_longrope", False), ("mistral", False), ("gemma3", False), ("mixtral", False)]
)
def test_architecture_is_plain_llama_only_without_extras(tmp_path: Path, family: str, is_plain: bool) -> None:
    save_model(tmp_path, *FAMILIES[family])
    assert describe_model(tmp_path, ModelOptions(dtype="float32"), 16).architecture.is_plain_llama == is_plain


def test_window_that_no_sequence_outgrows_is_none(tmp_path: Path) -> None:
    save_model(tmp_path, "MistralForCausalLM", {"sliding_window": 1024})
    assert describe_model(tmp_path, ModelOptions(dtype="float32"), 16).architecture.is_plain_llama


@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_adapter_of_a_dense_family_equals_weights_with_it_merged_in(tmp_path: Path, family: str) -> None:
    base = tmp_path / "base"
    save_model(base, *FAMILIES[family])
    folder = save_adapter(tmp_path / "adapter", base)
    merged, adapted = Driver(save_merged(tmp_path / "merged", base, folder)), Driver(base)
    adapter = adapted.load_adapter(folder)
    prompt = random_prompt(60, seed=1, vocab_size=128)
    expected = merged.run_alone(merged.add("a", prompt, WITH_LOGPROBS), 5, chunk=100)
    found = adapted.run_alone(adapted.add("a", prompt, WITH_LOGPROBS, adapter), 5, chunk=100)
    unadapted = adapted.run_alone(adapted.add("b", prompt, WITH_LOGPROBS), 5, chunk=100)
    assert found.output == expected.output
    assert found.logprobs != unadapted.logprobs
    torch.testing.assert_close(adapted.kv(found), merged.kv(expected), atol=1e-3, rtol=1e-3)


def test_runner_language_model_of_gemma3_with_images_equals_the_text_model(tmp_path: Path) -> None:
    """The same tensors under other names, below a config of its own."""
    save_model(tmp_path / "text", *FAMILIES["gemma3"])
    shutil.copytree(tmp_path / "text", tmp_path / "images")
    weights = load_file(tmp_path / "text" / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    save_file(renamed, tmp_path / "images" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "text" / "config.json").read_text())
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": config, "vision_config": {}}
    (tmp_path / "images" / "config.json").write_text(json.dumps(nested))
    outputs = []
    for name in ("text", "images"):
        driver = Driver(tmp_path / name, num_blocks=8)
        outputs.append(driver.run_alone(driver.add("a", random_prompt(40, seed=1, vocab_size=128), ASKING), 4, chunk=64))
    assert outputs[0].logprobs == outputs[1].logprobs
    assert outputs[0].prompt_logprobs == outputs[1].prompt_logprobs
