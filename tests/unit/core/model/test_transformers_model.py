"""Models of other families through transformers' classes: the results of their own attention, and refusals that say why."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.config import ModelOptions
from core.errors import ModelLoadError
from core.model.description import describe_model
from tests.unit.core.model.family_models import FAMILIES, FROM_TRANSFORMERS, save_model
from tests.unit.core.model.support import Driver, random_prompt
from tests.unit.core.model.test_batch_invariance import WITH_LOGPROBS, _same_bits
from tests.unit.core.model.test_runner import ASKING, assert_logprobs_match, reference_greedy


@pytest.mark.parametrize("family", FROM_TRANSFORMERS)
def test_runner_class_of_transformers_in_chunks_and_decoding_equals_it(tmp_path: Path, family: str) -> None:
    model = save_model(tmp_path, *FROM_TRANSFORMERS[family])
    prompt = random_prompt(110, seed=3, vocab_size=128)
    expected, expected_logprobs = reference_greedy(model, prompt, 6)
    driver = Driver(tmp_path, num_blocks=32)
    request = driver.run_alone(driver.add("a", prompt, ASKING), 6, chunk=45)
    assert request.output == expected
    assert_logprobs_match(request.logprobs, expected_logprobs[len(prompt) - 1 :], expected)
    assert_logprobs_match(request.prompt_logprobs, expected_logprobs[: len(prompt) - 1], prompt[1:])


@pytest.mark.parametrize(("family", "dtype"), [("gpt2", "float32"), ("olmo2", "float32"), ("olmo2", "bfloat16")])
def test_runner_class_of_transformers_in_a_batch_same_bits_as_alone(
    tmp_path: Path, family: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_model(tmp_path, *FROM_TRANSFORMERS[family])
    with caplog.at_level(logging.WARNING):
        driver = Driver(tmp_path, dtype, num_blocks=64)
    assert "batch-invariant" not in caplog.text
    prompts = [random_prompt(count, seed=count, vocab_size=128) for count in (41, 5, 90)]
    alone = [driver.run_alone(driver.add(f"alone{i}", prompt, WITH_LOGPROBS), 5, chunk=200) for i, prompt in enumerate(prompts)]
    together = [driver.add(f"together{i}", prompt, WITH_LOGPROBS) for i, prompt in enumerate(prompts)]
    while running := [request for request in together if len(request.output) < 5]:
        driver.step([(r, min(23, len(r.token_ids) - r.num_computed_tokens)) for r in running])
    for found, expected in zip(together, alone, strict=True):
        assert found.logprobs == expected.logprobs
        assert found.prompt_logprobs == expected.prompt_logprobs
        assert _same_bits(driver.kv(found), driver.kv(expected))


def test_load_class_whose_rows_depend_on_the_batch_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers.models.gpt2 import modeling_gpt2

    def forward_by_all_rows(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.act(self.c_fc(hidden))) * (1 + 1e-6 * hidden.shape[1])

    save_model(tmp_path, *FROM_TRANSFORMERS["gpt2"])
    monkeypatch.setattr(modeling_gpt2.GPT2MLP, "forward", forward_by_all_rows)
    with caplog.at_level(logging.WARNING):
        Driver(tmp_path, num_blocks=8)
    assert "GPT2LMHeadModel: its class in transformers is not batch-invariant" in caplog.text


def test_load_class_that_biases_scores_by_itself_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing tells that attention did not see it but the comparison."""
    from core.model import transformers_model

    paged = transformers_model._attend_paged

    def attend_with_another_scale(*inputs: Any, **options: Any) -> Any:
        return paged(*inputs, **{**options, "scaling": 0.9})

    save_model(tmp_path, *FROM_TRANSFORMERS["olmo2"])
    monkeypatch.setattr(transformers_model, "_attend_paged", attend_with_another_scale)
    with pytest.raises(ModelLoadError, match="Olmo2ForCausalLM is not supported: with paged attention its hidden states differ"):
        Driver(tmp_path, num_blocks=8)


@pytest.mark.parametrize(
    ("class_name", "overrides", "message"),
    [
        ("GptOssForCausalLM", {"num_local_experts": 2, "head_dim": 16, "layer_types": ["full_attention"] * 2}, "adds s_aux to"),
        ("OPTForCausalLM", {"word_embed_proj_dim": 64, "ffn_dim": 96}, "4 heads of 16 in its keys; .* here 2 of 16"),
        ("BertLMHeadModel", {"num_key_value_heads": None}, "not causal"),
        ("DiffLlamaForCausalLM", {}, "2 layers attend 4 times"),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}, "supported: full_attention"),
    ],
)
def test_load_class_with_attention_of_its_own_kind_raises(
    tmp_path: Path, class_name: str, overrides: dict[str, Any], message: str
) -> None:
    save_model(tmp_path, class_name, overrides)
    with pytest.raises(ModelLoadError, match=f"{class_name}.* is not supported.*{message}"):
        Driver(tmp_path, num_blocks=8)


def test_describe_model_of_transformers_fingerprint_follows_every_field(tmp_path: Path) -> None:
    save_model(tmp_path, *FROM_TRANSFORMERS["cohere"])
    path = tmp_path / "config.json"
    fingerprints = []
    for changes in ({}, {"logit_scale": 0.5}, {"logit_scale": 0.25, "transformers_version": "0"}):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
        fingerprints.append(describe_model(tmp_path, ModelOptions(dtype="float32"), 16).model_fingerprint)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


def test_describe_model_with_code_of_its_own_raises_and_runs_none(tmp_path: Path) -> None:
    save_model(tmp_path, *FROM_TRANSFORMERS["olmo2"])
    path = tmp_path / "config.json"
    own = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ModelLoadError, match=r"OwnForCausalLM is not supported.*never run"):
        describe_model(tmp_path, ModelOptions(dtype="float32"), 16)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["cohere", "mixtral", "phi3"])
def test_adapter_of_a_family_that_takes_none_is_refused_saying_so(tmp_path: Path, family: str) -> None:
    save_model(tmp_path, *{**FAMILIES, **FROM_TRANSFORMERS}[family])
    store = Driver(tmp_path, num_blocks=8).runner.adapters
    store.start_load("adapter", "/some/adapter")
    while not (loads := store.poll_loads()):
        time.sleep(0.001)
    assert [load.adapter for load in loads] == ["adapter"]
    assert "this model's family takes none" in loads[0].error
