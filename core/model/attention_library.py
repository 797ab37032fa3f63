"""Compiled attention kernels of other projects behind one signature, and the choice of one that computes right on this device.

attention_cuda.py calls them. Each is tried on a small problem before it is taken: what a build supports (pages of any size,
splits, head sizes) depends on its version and on the device, and only running it tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from core.errors import ConfigError

_logger = logging.getLogger(__name__)
_TRIAL_LENGTHS = ((1, 37), (1, 1), (5, 21), (9, 9))  # query rows and positions of each trial sequence
_TRIAL_TOLERANCE = 0.05  # of outputs that are averages of normal values, in 16-bit floats


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where the rows and positions of each sequence are; tensors are int32 on the device.

    query_start: [num_requests + 1]. seq_lens: [num_requests]. block_tables: [num_requests, max_blocks], of libraries that read
    pages. key_start: [num_requests + 1], of the others. max_query_len, max_seq_len: nothing is longer.
    """

    query_start: Tensor
    seq_lens: Tensor
    max_query_len: int
    max_seq_len: int
    block_tables: Tensor | None = None
    key_start: Tensor | None = None


class LibraryCall(Protocol):
    """Causal grouped-query attention; the query rows are the last of their sequences."""

    def __call__(
        self, query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        """[num_tokens, num_heads, head_dim] of query's shape and dtype.

        keys, values: [num_blocks, block_size, num_kv_heads, head_dim] strided by block, where the library reads pages; else
        [positions of all sequences, num_kv_heads, head_dim]. sliding_window, soft_cap: as in AttentionBackend.attend.
        """


@dataclass(frozen=True, slots=True)
class AttentionLibrary:
    """is_paged: it reads the pool by block table. has_soft_cap: others are not called with one. attend: see LibraryCall."""

    name: str
    is_paged: bool
    has_soft_cap: bool
    attend: LibraryCall


def choose_library(
    candidates: Iterable[Callable[[], AttentionLibrary]],
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> AttentionLibrary:
    """The first that can be imported and attends right. A candidate makes its library, or raises ImportError.

    Raises ConfigError, which says of each why not.
    """
    reasons = []
    for candidate in candidates:
        name = candidate.__name__
        try:
            library = candidate()
            name = library.name
            difference = _try(library, device, dtype, block_size, num_heads, num_kv_heads, head_dim)
        except ImportError as error:
            reasons.append(f"{name}: not installed ({error})")
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reasons.append(f"{name}: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}")
        else:
            if difference <= _TRIAL_TOLERANCE:
                _logger.info("attention by %s (%s)", library.name, "by block table" if library.is_paged else "KV gathered")
                return library
            reasons.append(f"{name}: wrong by {difference:.3g}")
    shape = f"{dtype} with {num_heads} heads of {head_dim} over {num_kv_heads} and blocks of {block_size}"
    raise ConfigError("engine.device", str(device), f"a device with an attention library for {shape}; {'; '.join(reasons)}")


def cuda_candidates(is_batch_invariant: bool) -> list[Callable[[], AttentionLibrary]]:
    """What there is, best first. is_batch_invariant: a row's reduction is not split by what else is in the batch."""

    def torch_paged() -> AttentionLibrary:
        return _torch_varlen(is_paged=True, is_batch_invariant=is_batch_invariant)

    def torch_gathered() -> AttentionLibrary:
        return _torch_varlen(is_paged=False, is_batch_invariant=is_batch_invariant)

    # flash-attn splits only where it reads pages, by what else is in the batch.
    paged = [torch_paged] if is_batch_invariant else [torch_paged, flash_attn_paged]
    return [*paged, flash_attn_gathered, torch_gathered]


def _torch_varlen(*, is_paged: bool, is_batch_invariant: bool) -> AttentionLibrary:
    from torch.nn.attention.varlen import varlen_attn

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        assert not soft_cap
        output = varlen_attn(
            query,
            keys,
            values,
            lengths.query_start,
            lengths.key_start,
            lengths.max_query_len,
            lengths.max_seq_len,
            scale=scale,
            window_size=(sliding_window - 1 if sliding_window else -1, 0),
            enable_gqa=query.shape[1] != keys.shape[-2],
            seqused_k=lengths.seq_lens if is_paged else None,
            block_table=lengths.block_tables,
            num_splits=1 if is_batch_invariant and is_paged else None,
        )
        assert isinstance(output, Tensor)
        return output

    return AttentionLibrary(f"torch.nn.attention.varlen{' with pages' if is_paged else ''}", is_paged, False, attend)


def flash_attn_paged() -> AttentionLibrary:
    """https://github.com/Dao-AILab/flash-attention over pages; released versions want blocks of 256 positions."""
    return _flash_attn(is_paged=True)


def flash_attn_gathered() -> AttentionLibrary:
    """The same over gathered keys and values."""
    return _flash_attn(is_paged=False)


def _flash_attn(*, is_paged: bool) -> AttentionLibrary:
    from flash_attn import flash_attn_varlen_func

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        if is_paged:  # it reads how long sequences are from their starts
            starts = torch.nn.functional.pad(lengths.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        else:
            assert lengths.key_start is not None
            starts = lengths.key_start
        output: Tensor = flash_attn_varlen_func(
            query,
            keys,
            values,
            cu_seqlens_q=lengths.query_start,
            cu_seqlens_k=starts,
            max_seqlen_q=lengths.max_query_len,
            max_seqlen_k=lengths.max_seq_len,
            softmax_scale=scale,
            causal=True,
            window_size=(sliding_window - 1, 0) if sliding_window else (-1, -1),
            softcap=soft_cap,
            block_table=lengths.block_tables,
        )
        return output

    return AttentionLibrary(f"flash-attn{' with pages' if is_paged else ''}", is_paged, True, attend)


def _try(
    library: AttentionLibrary,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> float:
    """The largest difference from the formula over the trial sequences, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    num_rows = sum(rows for rows, _ in _TRIAL_LENGTHS)
    seq_lens = [length for _, length in _TRIAL_LENGTHS]
    blocks = [-(-length // block_size) for length in seq_lens]
    first_blocks = [sum(blocks[i:]) - blocks[i] for i in range(len(blocks))]  # the last sequence lies first
    query = torch.randn(num_rows, num_heads, head_dim, generator=generator).to(device, dtype)
    # Keys and values are interleaved, as they are in the pool: each is a view strided by block.
    pool = torch.randn(sum(blocks), 2, block_size, num_kv_heads, head_dim, generator=generator).to(device, dtype)
    tables = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
    for i, first in enumerate(first_blocks):
        tables[i, : blocks[i]] = torch.arange(first, first + blocks[i])
    flat = pool.transpose(1, 2).flatten(0, 1)  # [positions, 2, num_kv_heads, head_dim]
    sequences = [flat[first * block_size :][:length] for first, length in zip(first_blocks, seq_lens, strict=True)]
    gathered = torch.cat(sequences)
    starts = torch.tensor([0, *(rows for rows, _ in _TRIAL_LENGTHS)]).cumsum(0, dtype=torch.int32).to(device)
    lengths = Lengths(
        query_start=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        max_query_len=max(rows for rows, _ in _TRIAL_LENGTHS),
        max_seq_len=max(seq_lens),
        block_tables=tables.to(device) if library.is_paged else None,
        key_start=None if library.is_paged else torch.tensor([0, *seq_lens]).cumsum(0, dtype=torch.int32).to(device),
    )
    keys, values = (pool[:, 0], pool[:, 1]) if library.is_paged else (gathered[:, 0].contiguous(), gathered[:, 1].contiguous())
    worst = 0.0
    for window in (0, 4):
        found = library.attend(query, keys, values, lengths, head_dim**-0.5, window, 0.0).float()
        row = 0
        for (rows, length), sequence in zip(_TRIAL_LENGTHS, sequences, strict=True):
            expected = _formula(query[row : row + rows].float(), sequence[:, 0].float(), sequence[:, 1].float(), window or length)
            difference = (found[row : row + rows] - expected).abs().max().item()
            worst = max(worst, difference if difference == difference else float("inf"))
            row += rows
    return worst


def _formula(query: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """[rows, num_heads, head_dim] of the last rows of one sequence."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * query.shape[-1] ** -0.5
    positions = torch.arange(keys.shape[0], device=query.device)
    distance = positions[-query.shape[0] :, None] - positions
    weights = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
