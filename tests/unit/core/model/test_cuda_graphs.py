"""Decode graphs on the CPU: sizes, padding, and a runner whose decode steps are recordings that are replayed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core.model.attention_cuda import CudaAttention, DecodeBuffers
from core.model.cuda_graphs import DecodeBatch, DecodeGraphs, Recorded, pad_batch, padded_batch_sizes
from core.model.linear import TorchLinear
from core.model.linear_fixed_rows import FIXED_ROWS, FixedRowsLinear
from core.model.runner import TorchModelRunner
from core.sampling_params import SamplingParams
from tests.unit.core.model.reference_library import make_reference_library
from tests.unit.core.model.support import BLOCK_SIZE, GREEDY, Driver, random_prompt, save_llama

CPU = torch.device("cpu")


class FakeRecorder:
    """A recording runs its work again and writes the result where the first one lies, as a graph does."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Recorded, Tensor]:
        self.num_recorded += 1
        result = work()
        recorder = self

        class _Again:
            def replay(self) -> None:
                recorder.num_replayed += 1
                result.copy_(work())

        return _Again(), result


@pytest.mark.parametrize(("max_num_seqs", "row_multiple"), [(1, 8), (8, 8), (9, 8), (128, 8), (1000, 8), (37, 1), (64, 16)])
def test_padded_batch_sizes_fit_every_batch_with_little_padding(max_num_seqs: int, row_multiple: int) -> None:
    sizes = padded_batch_sizes(max_num_seqs, row_multiple)
    assert sizes == sorted(set(sizes)) and len(sizes) <= 30
    assert all(size % row_multiple == 0 for size in sizes)
    assert max_num_seqs <= sizes[-1] < max_num_seqs + row_multiple
    for num_requests in range(4 * row_multiple + 1, max_num_seqs + 1):
        size = next(size for size in sizes if size >= num_requests)
        assert size - num_requests <= size / 3


def test_pad_batch_repeats_the_first_request() -> None:
    batch = DecodeBatch(np.array([5, 6]), np.array([9, 3]), np.array([41, 19]), np.array([[2, 7], [1, 0]]))
    padded = pad_batch(batch, 4)
    assert padded.token_ids.tolist() == [5, 6, 5, 5] and padded.positions.tolist() == [9, 3, 9, 9]
    assert padded.slot_mapping.tolist() == [41, 19, 41, 41]
    assert padded.block_tables.tolist() == [[2, 7], [1, 0], [2, 7], [2, 7]]


def _forward_sums(token_ids: Tensor, positions: Tensor, buffers: DecodeBuffers) -> Tensor:
    return torch.stack((token_ids + positions, buffers.seq_lens.long() + buffers.slot_mapping, buffers.block_tables.sum(1)), 1)


def test_decode_graphs_record_a_size_once_and_replay_what_is_in_the_buffers() -> None:
    recorder = FakeRecorder()
    graphs = DecodeGraphs(_forward_sums, recorder, [2, 4], max_blocks=3, device=CPU)
    for num_requests in (1, 2, 3, 4, 2):
        values = np.arange(num_requests) + num_requests
        found = graphs.try_run(DecodeBatch(values, values * 10, values * 100, np.tile(values[:, None], (1, 2))))
        assert found is not None
        expected = np.stack((values * 11, values * 110 + 1, values * 2), 1)
        assert found[:num_requests].tolist() == expected.tolist()
    assert (recorder.num_recorded, recorder.num_replayed) == (2, 5)


def test_decode_graphs_decline_what_does_not_fit() -> None:
    graphs = DecodeGraphs(_forward_sums, FakeRecorder(), [2], max_blocks=1, device=CPU)
    ones = np.ones(3, dtype=np.int64)
    assert graphs.try_run(DecodeBatch(ones, ones, ones, ones[:, None])) is None
    assert graphs.try_run(DecodeBatch(ones[:1], ones[:1], ones[:1], np.ones((1, 2), dtype=np.int64))) is None
    assert graphs.try_run(DecodeBatch(ones[:1], ones[:1], ones[:1], ones[:1, None])) is not None


def test_decode_graphs_failed_recording_leaves_steps_to_run_without(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(work: Callable[[], Tensor]) -> tuple[Recorded, Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(_forward_sums, refuse, [2], max_blocks=1, device=CPU)
    ones = np.ones(1, dtype=np.int64)
    assert [graphs.try_run(DecodeBatch(ones, ones, ones, ones[:, None])) for _ in range(3)] == [None] * 3
    assert caplog.text.count("without CUDA graphs") == 1


class CudaDriver(Driver):
    """The same model behind the CUDA backend with a reference library, its decodes recorded by a fake."""

    def __init__(self, folder: Path, *, is_paged: bool, seed: int = 0) -> None:
        super().__init__(folder, seed=seed, cpu_kernels="torch")
        self.recorder = FakeRecorder()
        description = self.description
        heads = (description.architecture.num_heads, description.architecture.num_kv_heads)
        attention = CudaAttention(make_reference_library(is_paged=is_paged), BLOCK_SIZE, *heads, CPU)
        loaded = TorchModelRunner.load(folder, description, self.pool, 0, cpu_kernels="torch")
        loaded._model._attention = attention
        self.runner = TorchModelRunner(loaded._model, attention, loaded._sampler, self.pool, loaded.adapters)
        self.runner.use_decode_graphs(self.recorder, 12, description.max_model_len)


@pytest.mark.parametrize("is_paged", [True, False])
def test_runner_with_decode_graphs_gives_the_tokens_of_the_plain_one(tmp_path: Path, is_paged: bool) -> None:
    save_llama(tmp_path)
    sampled = SamplingParams(seed=5, top_p=0.9, max_tokens=100, logprobs=2)
    outputs = []
    drivers = [Driver(tmp_path, seed=1, cpu_kernels="torch"), CudaDriver(tmp_path, is_paged=is_paged, seed=2)]
    for driver in drivers:
        rng = random.Random(7)
        requests = [driver.add(f"r{i}", random_prompt(20 + 9 * i, seed=i), sampled if i % 3 else GREEDY) for i in range(10)]
        for request in requests:
            driver.step([(request, len(request.token_ids))])
        for step in range(12):
            members = rng.sample(requests, 10 - step % 10)
            driver.step([(request, 1) for request in members])
        outputs.append([request.output for request in requests])
    assert outputs[0] == outputs[1]
    recorder = drivers[1].recorder  # type: ignore[attr-defined]
    assert (recorder.num_recorded, recorder.num_replayed) == ((2, 12) if is_paged else (0, 0))


def test_fixed_rows_linear_gives_a_row_the_same_bits_in_any_number_of_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(40, 96, generator=generator), torch.randn(40, generator=generator)
    inputs = torch.randn(2 * FIXED_ROWS + 5, 96, generator=generator)
    linear = FixedRowsLinear(weight, bias)
    whole = linear(inputs)
    torch.testing.assert_close(whole, TorchLinear(weight, bias)(inputs))
    for num_rows in (1, 2, 7, FIXED_ROWS - 1, FIXED_ROWS, FIXED_ROWS + 1):
        assert torch.equal(linear(inputs[:num_rows]), whole[:num_rows])
