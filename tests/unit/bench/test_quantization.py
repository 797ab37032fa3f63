"""The quantization bench on a tiny model: its numbers must say what they are named after."""

from __future__ import annotations

import math

import pytest
import torch

from bench.quantization import ModeRunner, num_same, quality, speed
from tests.unit.core.model.support import random_prompt, save_llama


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModeRunner]:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return {mode: ModeRunner(str(folder), mode, 1) for mode in ("float32", "int8", "kv-fp8")}


def test_num_same_counts_leading_tokens() -> None:
    assert [num_same([1, 2, 3], others) for others in ([1, 2, 3], [1, 2, 4], [0, 2, 3])] == [3, 2, 0]


def test_quality_first_mode_agrees_with_itself_and_others_less(runners: dict[str, ModeRunner]) -> None:
    texts = [random_prompt(60, seed=seed) for seed in range(3)]
    found = quality(runners, texts, prompt_tokens=40, output_tokens=12)
    first = found["float32"]
    assert (first["same_answers"], first["answers"], first["mean_same_tokens"], first["likeliest"]) == (3, 3, 12.0, 1.0)
    logprobs = [logprob for text in texts for logprob in runners["float32"].read(text)[0]]
    assert len(logprobs) == 3 * 59
    assert first["perplexity"] == pytest.approx(math.exp(-sum(logprobs) / len(logprobs)), abs=1e-3)
    for mode in ("int8", "kv-fp8"):
        assert found[mode]["perplexity"] == pytest.approx(first["perplexity"], rel=0.2)
        assert found[mode]["mean_same_tokens"] <= 12 and 0.3 < found[mode]["likeliest"] <= 1.0


def test_generate_in_a_batch_equals_alone(runners: dict[str, ModeRunner]) -> None:
    prompts = [random_prompt(length, seed=length) for length in (9, 30, 17)]
    together, prefill_s, decode_s = runners["int8"].generate(prompts, 6)
    assert together == [runners["int8"].generate([prompt], 6)[0][0] for prompt in prompts]
    assert prefill_s > 0 and decode_s > 0


def test_speed_reports_every_mode_and_batch_with_ratios_to_the_first(runners: dict[str, ModeRunner]) -> None:
    torch.set_num_threads(1)
    found = speed(runners, [random_prompt(40, seed=1)], [1, 3], output_tokens=3, rounds=1)
    names = {"decode_1", "decode_3", "prefill_40"}
    for mode, values in found.items():
        assert set(values) == {f"{name}_{what}" for name in names for what in ("tokens_per_s", "ratio")}
        assert all(value > 0 for value in values.values())
        assert mode != "float32" or all(values[f"{name}_ratio"] == 1.0 for name in names)
