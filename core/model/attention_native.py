"""Paged attention by this project's own CPU kernel (native/src/attention.cpp), in bfloat16 or float32.

Bits are the same per token in any batch and on any number of threads: KV is read in tiles at absolute positions. In
bfloat16, probabilities are rounded before they weigh the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch
from core.model.native_linear import NATIVE_DTYPES

_NO_SLOTS = torch.empty(0, dtype=torch.int64)


class NativeAttention(AttentionBackend):
    """For a pool of bfloat16 or float32 in host memory. Shared prefixes are read by each request for itself."""

    def __init__(self, native: Any, block_size: int) -> None:
        """native: the extension. block_size: of the pool, in tokens."""
        self._kernels = {dtype: getattr(native, f"paged_attention_{name}") for dtype, name in NATIVE_DTYPES.items()}
        self._block_size = block_size
        self._slot_mapping = self._block_tables = self._query_start = self._seq_lens = _NO_SLOTS

    @property
    def slot_mapping(self) -> Tensor:
        """Of the step that began last; see AttentionBatch."""
        return self._slot_mapping

    def begin_step(self, batch: AttentionBatch) -> None:
        """See AttentionBackend."""
        self._slot_mapping = batch.slot_mapping.contiguous()
        self._block_tables = batch.block_tables.contiguous()
        self._query_start = batch.query_start.contiguous()
        self._seq_lens = batch.seq_lens.contiguous()

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
        """See AttentionBackend."""
        num_tokens = self._slot_mapping.shape[0]
        blocks, offsets = self._slot_mapping // self._block_size, self._slot_mapping % self._block_size
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
        """The same, for a layer whose K and V of this step are in the pool already."""
        query = query.contiguous()
        num_rows, num_heads, head_dim = query.shape
        _, block_size, num_kv_heads, _ = key_cache.shape
        assert key_cache.stride() == value_cache.stride() and key_cache.stride()[2:] == (head_dim, 1), "heads lie side by side"
        assert block_size == self._block_size
        output = torch.empty_like(query)
        self._kernels[query.dtype](
            (query.data_ptr(), output.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()),
            (self._block_tables.data_ptr(), self._query_start.data_ptr(), self._seq_lens.data_ptr()),
            (
                *(num_rows, self._seq_lens.shape[0], self._block_tables.shape[1]),
                *(num_heads, num_kv_heads, head_dim),
                *(block_size, key_cache.stride(0), key_cache.stride(1)),
            ),
            sliding_window,
            scale,
            soft_cap,
        )
        return output
