"""Which part of a model each rank of a node has: whole KV heads with their query heads, and ranges of the rest.

Splits need not be even: a model with 3 KV heads runs on 2 ranks. After Megatron-LM (https://arxiv.org/abs/1909.08053): the
projections before attention and activation are cut by outputs, those behind them by inputs.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ConfigError, ModelLoadError
from core.model.architecture import ModelArchitecture

FEED_FORWARD_MULTIPLE = 32  # a rank's intermediate size, where the model's allows it: what kernels multiply at a time
VOCABULARY_MULTIPLE = 32


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part. All ranges are of the whole model's indices; ranges of successive ranks follow one another."""

    rank: int
    num_ranks: int
    heads: range
    kv_heads: range
    intermediate: range
    vocabulary: range

    @property
    def kv_slice(self) -> slice:
        """kv_heads, to index tensors by."""
        return slice(self.kv_heads.start, self.kv_heads.stop)

    def narrow(self, architecture: ModelArchitecture) -> ModelArchitecture:
        """The architecture as this rank computes it. head_dim and hidden_size are the model's."""
        return dataclasses.replace(
            architecture,
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
        )


def split_model(architecture: ModelArchitecture, num_ranks: int) -> list[Shard]:
    """Shards by rank. Raises ConfigError where a rank would be without a KV head, or the architecture is not a plain Llama's."""
    if not architecture.is_plain_llama:
        raise ConfigError("engine.tensor_parallel_size", num_ranks, f"1 for {architecture.family}: only plain Llamas are split")
    num_kv_heads, intermediate_size = architecture.num_kv_heads, architecture.intermediate_size
    if num_ranks > min(num_kv_heads, intermediate_size):
        allowed = f"1 to {num_kv_heads}: a rank has at least one of the model's KV heads"
        raise ConfigError("engine.tensor_parallel_size", num_ranks, allowed)
    group = architecture.num_heads // num_kv_heads
    kv_heads = _even_ranges(num_kv_heads, num_ranks, 1)
    intermediate = _balanced_ranges(architecture, kv_heads)
    vocabulary = _even_ranges(architecture.vocab_size, num_ranks, VOCABULARY_MULTIPLE)
    return [
        Shard(
            rank=rank,
            num_ranks=num_ranks,
            heads=range(kv_heads[rank].start * group, kv_heads[rank].stop * group),
            kv_heads=kv_heads[rank],
            intermediate=intermediate[rank],
            vocabulary=vocabulary[rank],
        )
        for rank in range(num_ranks)
    ]


def _even_ranges(total: int, num_ranks: int, multiple: int) -> list[range]:
    """Cut range(total) into ranges of a multiple of `multiple`, the first ones larger; the last has what is left."""
    multiple = _fitting_multiple(total, num_ranks, multiple)
    num_units = -(-total // multiple)
    bounds = [min(-(-num_units * rank // num_ranks) * multiple, total) for rank in range(num_ranks + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _balanced_ranges(architecture: ModelArchitecture, kv_heads: list[range]) -> list[range]:
    """Cut the intermediate size so that ranks have the same number of weights per layer: fewer for those with more heads."""
    num_ranks, size = len(kv_heads), architecture.intermediate_size
    group = architecture.num_heads // architecture.num_kv_heads
    # Of one KV head: its queries' and its own projections, and the output's, in units of hidden_size.
    attention = (2 * group + 2) * architecture.head_dim
    total = attention * architecture.num_kv_heads + 3 * size
    multiple = _fitting_multiple(size, num_ranks, FEED_FORWARD_MULTIPLE)
    num_units = -(-size // multiple)
    bounds = [0]
    for rank in range(num_ranks - 1):
        wanted = (total / num_ranks * (rank + 1) - attention * kv_heads[rank].stop) / (3 * multiple)
        first, last = bounds[-1] + 1, num_units - (num_ranks - 1 - rank)  # every rank has something
        bounds.append(min(max(round(wanted), first), last))
    bounds.append(num_units)
    return [range(start * multiple, min(stop * multiple, size)) for start, stop in itertools.pairwise(bounds)]


def _fitting_multiple(total: int, num_ranks: int, multiple: int) -> int:
    """`multiple`, or so much less that every rank gets something."""
    while multiple > 1 and -(-total // multiple) < num_ranks:
        multiple //= 2
    return multiple


def slice_projection(
    shard: Shard, architecture: ModelArchitecture, name: str, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """A rank's part of a projection of the whole model (see MakeLinear), contiguous. Raises ModelLoadError for an unknown one.

    A bias that is added once, behind the sum, is rank 0's.
    """
    kind = name.rpartition(".")[2]
    if kind in ("qkv_proj", "gate_up_proj", "lm_head"):
        ranges = _output_ranges(shard, architecture, kind)
        return _take_rows(weight, ranges), None if bias is None else _take_rows(bias, ranges)
    if kind not in ("o_proj", "down_proj"):
        raise ModelLoadError(f"{name}: a node of several ranks does not know how to split this projection")
    inputs = _scaled(shard.heads, architecture.head_dim) if kind == "o_proj" else shard.intermediate
    return weight[:, inputs.start : inputs.stop].contiguous(), bias if shard.rank == 0 else None


def _output_ranges(shard: Shard, architecture: ModelArchitecture, kind: str) -> list[range]:
    if kind == "lm_head":
        return [shard.vocabulary]
    if kind == "gate_up_proj":
        up = architecture.intermediate_size
        return [shard.intermediate, range(shard.intermediate.start + up, shard.intermediate.stop + up)]
    keys = architecture.num_heads
    values = keys + architecture.num_kv_heads
    parts = (
        shard.heads,
        range(shard.kv_heads.start + keys, shard.kv_heads.stop + keys),
        range(shard.kv_heads.start + values, shard.kv_heads.stop + values),
    )
    return [_scaled(part, architecture.head_dim) for part in parts]


def _scaled(part: range, factor: int) -> range:
    return range(part.start * factor, part.stop * factor)


def _take_rows(tensor: Tensor, ranges: list[range]) -> Tensor:
    parts = [tensor[part.start : part.stop] for part in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
