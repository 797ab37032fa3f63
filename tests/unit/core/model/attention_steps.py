"""Random sequences of queries, keys and values that attention backends compute in any chunks, blocks and batches; and the plain
formula."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch


@dataclass(frozen=True)
class Shape:
    """Of one layer. sliding_window, soft_cap: see AttentionBackend.attend."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    sliding_window: int = 0
    soft_cap: float = 0.0

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


@dataclass
class Rows:
    """One sequence's rows, and where its KV lies."""

    query: Tensor
    key: Tensor
    value: Tensor
    block_ids: list[int]
    num_computed: int = 0

    @property
    def num_left(self) -> int:
        return len(self.query) - self.num_computed


class Pool:
    """A pool of NaN, strided by block as a layer of a block-major pool is, and sequences in random blocks of it."""

    def __init__(self, shape: Shape, dtype: torch.dtype, num_blocks: int = 256, seed: int = 0) -> None:
        self.shape, self.dtype = shape, dtype
        size = (num_blocks, 3, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        layers = torch.full(size, torch.nan, dtype=dtype)
        self.key_cache, self.value_cache = layers[:, 1, 0], layers[:, 1, 1]
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def add(self, length: int, seed: int) -> Rows:
        """The same rows for the same length and seed, in whichever blocks."""
        generator = torch.Generator().manual_seed(1000 * seed + length)
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        query = 3 * torch.randn(length, heads, head_dim, generator=generator)
        key, value = torch.randn(2, length, kv_heads, head_dim, generator=generator)
        blocks = [self._free.pop() for _ in range(-(-length // self.shape.block_size))]
        return Rows(query.to(self.dtype), key.to(self.dtype), value.to(self.dtype), blocks)

    def step(self, backend: AttentionBackend, shares: Sequence[tuple[Rows, int]], num_padding_rows: int = 0) -> list[Tensor]:
        """The next so many rows of each sequence, in one batch. Returns each one's output."""
        block_size = self.shape.block_size
        columns = max(len(sequence.block_ids) for sequence, _ in shares)
        slots, starts, ends, tables, rows = [], [0], [], [], []
        for sequence, num_tokens in shares:
            first = sequence.num_computed
            sequence.num_computed += num_tokens
            slots += [
                sequence.block_ids[position // block_size] * block_size + position % block_size
                for position in range(first, sequence.num_computed)
            ]
            starts.append(starts[-1] + num_tokens)
            ends.append(sequence.num_computed)
            tables.append(sequence.block_ids + [0] * (columns - len(sequence.block_ids)))
            part = slice(first, sequence.num_computed)
            rows.append((sequence.query[part], sequence.key[part], sequence.value[part]))
        batch = AttentionBatch(torch.tensor(slots), torch.tensor(tables), torch.tensor(starts), torch.tensor(ends))
        padding = [torch.full((num_padding_rows, *part.shape[1:]), torch.nan, dtype=self.dtype) for part in rows[0]]
        query, key, value = (torch.cat((*parts, end)) for *parts, end in zip(*rows, padding, strict=True))
        backend.begin_step(batch)
        shape = self.shape
        output = backend.attend(
            query, key, value, self.key_cache, self.value_cache, shape.scale, shape.sliding_window, shape.soft_cap
        )
        assert not output[starts[-1] :].any(), "padding rows are zero"
        return [output[start:end] for start, end in itertools.pairwise(starts)]

    def compute_alone(self, backend: AttentionBackend, sequence: Rows, chunk: int) -> Tensor:
        """All of a sequence's rows, in chunks."""
        outputs = []
        while sequence.num_left:
            outputs += self.step(backend, [(sequence, min(chunk, sequence.num_left))])
        return torch.cat(outputs)


def exact_attention(sequence: Rows, shape: Shape) -> Tensor:
    """The formula in float64."""
    length, group = len(sequence.query), shape.num_heads // shape.num_kv_heads
    query, key, value = (part.double().transpose(0, 1) for part in (sequence.query, sequence.key, sequence.value))
    scores = query @ key.repeat_interleave(group, 0).transpose(1, 2) * shape.scale
    if shape.soft_cap:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    is_seen = (distance >= 0) & (distance < (shape.sliding_window or length))
    weights = scores.masked_fill(~is_seen, -torch.inf).softmax(-1)
    return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    integers = torch.int32 if found.dtype == torch.float32 else torch.int16
    return torch.equal(found.contiguous().view(integers), expected.contiguous().view(integers))
