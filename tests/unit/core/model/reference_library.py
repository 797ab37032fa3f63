"""An attention library as attention_library.py wants one, in plain torch: what the CUDA backend is tested with on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from core.model.attention_library import AttentionLibrary, Lengths


def make_reference_library(*, is_paged: bool, has_soft_cap: bool = True) -> AttentionLibrary:
    """Checks what it is given as a kernel would, and remembers nothing."""

    def attend(
        query: Tensor, keys: Tensor, values: Tensor, lengths: Lengths, scale: float, sliding_window: int, soft_cap: float
    ) -> Tensor:
        assert has_soft_cap or not soft_cap
        assert (lengths.block_tables is not None, lengths.key_start is None) == (is_paged, is_paged)
        places = (lengths.query_start, lengths.seq_lens, lengths.block_tables if is_paged else lengths.key_start)
        assert all(place is not None and place.dtype == torch.int32 for place in places)
        assert query.is_contiguous() and query.shape[0] == int(lengths.query_start[-1])
        assert int(lengths.query_start.diff().max()) <= lengths.max_query_len
        assert int(lengths.seq_lens.max()) <= lengths.max_seq_len
        output = torch.empty_like(query)
        for request, length in enumerate(lengths.seq_lens.tolist()):
            if lengths.block_tables is not None:
                blocks = lengths.block_tables[request, : -(-length // keys.shape[1])].long()
                own_keys, own_values = (cache[blocks].flatten(0, 1)[:length] for cache in (keys, values))
            else:
                assert lengths.key_start is not None
                start, end = lengths.key_start[request : request + 2].tolist()
                assert end - start == length
                own_keys, own_values = keys[start:end], values[start:end]
            rows = slice(*lengths.query_start[request : request + 2].tolist())
            output[rows] = _attend(query[rows], own_keys, own_values, scale, sliding_window or length, soft_cap)
        return output

    return AttentionLibrary("reference", is_paged, has_soft_cap, attend)


def _attend(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int, soft_cap: float) -> Tensor:
    group = query.shape[1] // keys.shape[1]
    keys, values = (part.double().repeat_interleave(group, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(keys))[-len(query) :, None] - torch.arange(len(keys))
    weights = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
