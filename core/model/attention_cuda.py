"""Paged attention on CUDA by a library's kernels: plans a step's lengths once, then one call per layer.

Which library is attention_library.py's choice. Runs on the CPU as well with a library that does: so it is tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch
from core.model.attention_library import AttentionLibrary, Lengths, choose_library, cuda_candidates
from core.model.attention_torch import TorchAttention


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Where decoding requests read and write, one token each: tensors that keep their place, so that a CUDA graph can use them.

    slot_mapping: [size] int64. block_tables: [size, max_blocks] int32. seq_lens: [size] int32. query_start: [size + 1] int32.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_start: Tensor

    @classmethod
    def allocate(cls, size: int, max_blocks: int, device: torch.device) -> DecodeBuffers:
        """Of one position each, all in block 0."""
        return cls(
            slot_mapping=torch.zeros(size, dtype=torch.int64, device=device),
            block_tables=torch.zeros(size, max_blocks, dtype=torch.int32, device=device),
            seq_lens=torch.ones(size, dtype=torch.int32, device=device),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
        )


class CudaAttention(AttentionBackend):
    """By a library. Differences from the interface: whether bits depend on the batch is the library's matter (cuda_candidates),
    and layers with a soft cap, where the library has none, are computed in plain torch.
    """

    def __init__(
        self, library: AttentionLibrary, block_size: int, num_heads: int, num_kv_heads: int, device: torch.device | str
    ) -> None:
        self._library = library
        self._block_size = block_size
        self._device = torch.device(device)
        self._plain = TorchAttention(block_size, num_heads, num_kv_heads, device)
        self._plain_batch: AttentionBatch | None = None  # that it does not know yet
        self._slot_blocks = self._slot_offsets = torch.empty(0, dtype=torch.int64)
        self._key_blocks = self._key_offsets = torch.empty(0, dtype=torch.int64)
        self._lengths = Lengths(torch.empty(0), torch.empty(0), 0, 0)

    @property
    def has_static_decodes(self) -> bool:
        """Whether a step of decodes can be described by DecodeBuffers alone, without host work that depends on the batch."""
        return self._library.is_paged

    def begin_step(self, batch: AttentionBatch) -> None:
        self._plain_batch = batch
        self._slot_blocks = batch.slot_mapping // self._block_size
        self._slot_offsets = batch.slot_mapping % self._block_size
        query_lens = batch.query_start.diff()
        paged = self._library.is_paged
        self._lengths = Lengths(
            query_start=self._on_device(batch.query_start),
            seq_lens=self._on_device(batch.seq_lens),
            max_query_len=int(query_lens.max()),
            max_seq_len=int(batch.seq_lens.max()),
            block_tables=self._on_device(batch.block_tables) if paged else None,
            key_start=None if paged else self._on_device(torch.nn.functional.pad(batch.seq_lens.cumsum(0), (1, 0))),
        )
        if not paged:
            self._plan_gather(batch)

    def begin_decodes(self, buffers: DecodeBuffers) -> None:
        """As begin_step, for one token of each request; nothing is read from the device, and nothing copied to it."""
        assert self.has_static_decodes
        self._plain_batch = None
        self._slot_blocks = buffers.slot_mapping // self._block_size
        self._slot_offsets = buffers.slot_mapping % self._block_size
        max_seq_len = buffers.block_tables.shape[1] * self._block_size
        self._lengths = Lengths(buffers.query_start, buffers.seq_lens, 1, max_seq_len, buffers.block_tables)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        if soft_cap and not self._library.has_soft_cap:
            return self._attend_plainly(query, key, value, key_cache, value_cache, scale, sliding_window, soft_cap)
        num_tokens = self._slot_blocks.shape[0]
        key_cache[self._slot_blocks, self._slot_offsets] = key[:num_tokens]
        value_cache[self._slot_blocks, self._slot_offsets] = value[:num_tokens]
        if self._library.is_paged:
            keys, values = key_cache, value_cache
        else:
            keys = key_cache[self._key_blocks, self._key_offsets]
            values = value_cache[self._key_blocks, self._key_offsets]
        real = query[:num_tokens].contiguous()
        attended = self._library.attend(real, keys, values, self._lengths, scale, sliding_window, soft_cap)
        if num_tokens == query.shape[0]:
            return attended
        output = torch.zeros_like(query)
        output[:num_tokens] = attended
        return output

    def _attend_plainly(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int,
        soft_cap: float,
    ) -> Tensor:
        if self._plain_batch is None:
            # Planned from lengths on the host, which decodes in a graph have not.
            raise RuntimeError("layers with a soft cap need a library that has one, to be in a CUDA graph")
        self._plain.begin_step(self._plain_batch)
        return self._plain.attend(query, key, value, key_cache, value_cache, scale, sliding_window, soft_cap)

    def _plan_gather(self, batch: AttentionBatch) -> None:
        """Block and offset of every position of every sequence, one after the other."""
        request = torch.repeat_interleave(torch.arange(len(batch.seq_lens)), batch.seq_lens)
        starts = batch.seq_lens.cumsum(0) - batch.seq_lens
        positions = torch.arange(len(request)) - starts[request]
        blocks = batch.block_tables[request, positions // self._block_size]
        self._key_blocks = blocks.to(self._device)
        self._key_offsets = (positions % self._block_size).to(self._device)

    def _on_device(self, values: Tensor) -> Tensor:
        return values.to(device=self._device, dtype=torch.int32)


def make_cuda_attention(
    is_batch_invariant: bool,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> CudaAttention:
    """With the best library that this installation and this device have. Raises ConfigError, see choose_library."""
    candidates = cuda_candidates(is_batch_invariant)
    library = choose_library(candidates, device, dtype, block_size, num_heads, num_kv_heads, head_dim)
    return CudaAttention(library, block_size, num_heads, num_kv_heads, device)
