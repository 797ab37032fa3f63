"""bench.cuda_check without a GPU: it says so; its steps and its comparison work on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import cuda_check
from bench.cuda_check import GREEDY, Served, Steps, largest_difference, main
from core.config import ModelOptions
from core.model.description import describe_model
from core.model.device_pool import DevicePool
from core.model.runner import TorchModelRunner
from core.step import TokenLogprob
from tests.unit.core.model.support import random_prompt, save_llama


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_check_says_that_there_is_no_device_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "torch finds no CUDA device" in capsys.readouterr().err


def test_cuda_check_steps_give_each_request_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_check, "NUM_BLOCKS", 64)
    save_llama(tmp_path)
    description = describe_model(tmp_path, ModelOptions(dtype="float32"), cuda_check.BLOCK_SIZE)
    pool = DevicePool.allocate(description.kv_layout, 64, torch.device("cpu"))
    steps = Steps(TorchModelRunner.load(tmp_path, description, pool, cpu_kernels="torch"))
    prompts = [random_prompt(length, seed=length) for length in (5, 40)]
    together, prefill_s, decode_s = steps.serve(prompts, 6, GREEDY)
    assert [len(served.token_ids) for served in together] == [6, 6] and prefill_s > 0 and decode_s > 0
    assert together == [steps.serve([prompt], 6, GREEDY)[0][0] for prompt in prompts]


def test_largest_difference_counts_up_to_where_texts_part() -> None:
    def served(*pairs: tuple[int, float]) -> Served:
        return Served([token for token, _ in pairs], [TokenLogprob(token, value, 1, ()) for token, value in pairs])

    found = [served((5, -1.0), (6, -2.0), (7, -3.0)), served((1, -1.0), (2, -1.0), (3, -1.0))]
    expected = [served((5, -1.5), (8, -9.0), (7, -9.0)), served((1, -1.0), (2, -1.25), (3, -1.0))]
    assert largest_difference(found, expected) == (0.5, pytest.approx(4 / 6))
