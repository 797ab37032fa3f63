"""The CUDA backend on the CPU, with a reference library in the kernels' place, beside the plain one; and the library's choice."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from torch import Tensor

from core.errors import ConfigError
from core.model.attention_cuda import CudaAttention, DecodeBuffers
from core.model.attention_library import AttentionLibrary, Lengths, choose_library, cuda_candidates
from core.model.attention_torch import TorchAttention
from tests.unit.core.model.attention_steps import Pool, Shape
from tests.unit.core.model.reference_library import make_reference_library

CPU = torch.device("cpu")
SHAPES = [
    Shape(9, 3, 64),
    Shape(5, 5, 20, block_size=8),
    Shape(4, 2, 32, sliding_window=30),
    Shape(4, 2, 32, soft_cap=3.0),
    Shape(6, 2, 64, sliding_window=100, soft_cap=5.0),
]


@pytest.mark.parametrize("has_soft_cap", [True, False])
@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_cuda_attention_mixed_batches_equal_the_plain_backend(shape: Shape, is_paged: bool, has_soft_cap: bool) -> None:
    rng = random.Random(1)
    library = make_reference_library(is_paged=is_paged, has_soft_cap=has_soft_cap)
    lengths = [1, 40, 64, 65, 130]
    pools = [Pool(shape, torch.float32, seed=seed) for seed in (1, 2)]
    backends = [
        CudaAttention(library, shape.block_size, shape.num_heads, shape.num_kv_heads, CPU),
        TorchAttention(shape.block_size, shape.num_heads, shape.num_kv_heads),
    ]
    sequences = [[pool.add(length, seed=2) for length in lengths] for pool in pools]
    while running := [i for i, rows in enumerate(sequences[0]) if rows.num_left]:
        members = rng.sample(running, rng.randint(1, len(running)))
        counts = [min(sequences[0][i].num_left, rng.choice((1, 1, 7, 50))) for i in members]
        found, expected = (
            pool.step(backend, [(own[i], count) for i, count in zip(members, counts, strict=True)], num_padding_rows=3)
            for pool, backend, own in zip(pools, backends, sequences, strict=True)
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_cuda_attention_decodes_from_buffers_equal_a_planned_step() -> None:
    shape = Shape(6, 2, 32)
    library = make_reference_library(is_paged=True)
    outputs = []
    for is_static in (False, True):
        pool = Pool(shape, torch.float32, seed=4)
        attention = CudaAttention(library, shape.block_size, shape.num_heads, shape.num_kv_heads, CPU)
        sequences = [pool.add(length, seed=5) for length in (20, 33, 1)]
        for rows in sequences[:2]:
            pool.step(attention, [(rows, rows.num_left - 1)])
        if not is_static:
            outputs.append(torch.cat(pool.step(attention, [(rows, 1) for rows in sequences])))
            continue
        buffers = DecodeBuffers.allocate(3, 8, CPU)
        for i, rows in enumerate(sequences):
            position = rows.num_computed
            buffers.slot_mapping[i] = rows.block_ids[position // 16] * 16 + position % 16
            buffers.block_tables[i, : len(rows.block_ids)] = torch.tensor(rows.block_ids)
            buffers.seq_lens[i] = position + 1
        attention.begin_decodes(buffers)
        query, key, value = (torch.stack([getattr(rows, name)[-1] for rows in sequences]) for name in ("query", "key", "value"))
        outputs.append(attention.attend(query, key, value, pool.key_cache, pool.value_cache, shape.scale))
    torch.testing.assert_close(outputs[0], outputs[1])


def _broken() -> AttentionLibrary:
    raise ImportError("no module named broken")


def _wrong() -> AttentionLibrary:
    right = make_reference_library(is_paged=True)

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        return right.attend(query, keys, values, lengths, scale, 0, soft_cap)  # deaf to windows

    return dataclasses.replace(right, name="wrong", attend=attend)


def _refusing() -> AttentionLibrary:
    def attend(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        raise RuntimeError("blocks of 256 only\nand a stack trace")

    return AttentionLibrary("refusing", True, True, attend)


@pytest.mark.parametrize("is_paged", [True, False])
@pytest.mark.parametrize("block_size", [8, 16, 64])
def test_choose_library_takes_the_first_that_attends_right(is_paged: bool, block_size: int) -> None:
    def right() -> AttentionLibrary:
        return make_reference_library(is_paged=is_paged)

    chosen = choose_library([_broken, _refusing, _wrong, right], CPU, torch.bfloat16, block_size, 6, 2, 64)
    assert (chosen.name, chosen.is_paged) == ("reference", is_paged)


def test_choose_library_none_right_says_of_each_why() -> None:
    with pytest.raises(ConfigError) as raised:
        choose_library([_broken, _refusing, _wrong], CPU, torch.float16, 16, 6, 2, 64)
    text = str(raised.value)
    assert "_broken: not installed (no module named broken)" in text
    assert "refusing: blocks of 256 only;" in text and "stack trace" not in text
    assert "wrong: wrong by" in text and "torch.float16 with 6 heads of 64 over 2 and blocks of 16" in text


def test_cuda_candidates_batch_invariant_ones_do_not_split_by_batch() -> None:
    names = [candidate.__name__ for candidate in cuda_candidates(is_batch_invariant=True)]
    assert "flash_attn_paged" not in names and "torch_paged" in names
    assert "flash_attn_paged" in [candidate.__name__ for candidate in cuda_candidates(is_batch_invariant=False)]
