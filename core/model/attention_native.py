"""Paged attention by this project's own CPU kernels (native/src/attention.cpp), in bfloat16 or float32.

Bits are the same per token in any batch and on any number of threads: KV is read in tiles at absolute positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch
from core.model.native_linear import NATIVE_DTYPES


class NativeAttention(AttentionBackend):
    """The compiled backend. head_dim must be even. Which prefixes are shared makes no difference to it."""

    def __init__(self, native: Any, block_size: int) -> None:
        """native: the extension. block_size: of the pool, in tokens."""
        self._native = native
        self._block_size = block_size
        self._kernels = {dtype: getattr(native, f"attend_{name}") for dtype, name in NATIVE_DTYPES.items()}
        self._batch: AttentionBatch | None = None
        self._plan: Any = None

    @property
    def slot_mapping(self) -> Tensor:
        """Of the step that began last: [num_tokens]."""
        assert self._batch is not None
        return self._batch.slot_mapping

    def begin_step(self, batch: AttentionBatch) -> None:
        self._batch = batch  # the plan points into it
        assert batch.block_tables.is_contiguous()
        num_requests, max_blocks = batch.block_tables.shape
        self._plan = self._native.BatchPlan(
            batch.block_tables.data_ptr(),
            batch.query_start.data_ptr(),
            batch.seq_lens.data_ptr(),
            num_requests,
            max_blocks,
            self._block_size,
        )

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
        slots = self.slot_mapping
        num_tokens = slots.shape[0]
        blocks, offsets = slots // self._block_size, slots % self._block_size
        key_cache[blocks, offsets] = key[:num_tokens]
        value_cache[blocks, offsets] = value[:num_tokens]
        return self.attend_stored(query, key_cache, value_cache, scale, sliding_window, soft_cap)

    def attend_stored(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """As attend, of a step whose K and V are in the pool already."""
        query = query.contiguous()
        num_heads, head_dim = query.shape[1:]
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        output[self.slot_mapping.shape[0] :] = 0
        sizes = (num_heads, key_cache.shape[2], head_dim, key_cache.stride(0), key_cache.stride(1))
        self._kernels[query.dtype](
            self._plan,
            query.data_ptr(),
            output.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            sizes,
            scale,
            soft_cap,
            sliding_window,
        )
        return output
