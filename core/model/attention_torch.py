"""Paged attention in plain torch, on the CPU bit-identical per token under any batching; slower than a compiled kernel.

Scores and sums are float32. A sequence is read in tiles of KV at fixed absolute positions, always of full size and masked,
and merged in position order by online softmax (https://arxiv.org/abs/1805.02867). Query rows come in multiples of
ROW_MULTIPLE. So every token meets the same shapes and order of additions, alone or in company, decoded or prefilled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch

TILE_TOKENS = 256  # positions per KV tile, rounded down to whole blocks (up to one block, where that is larger)
QUERY_TILE_TOKENS = 128  # query tokens of one request that share a pass over the KV tiles
ROW_MULTIPLE = 8  # batched float32 GEMMs give a row the same bits among any multiple of 8 rows (measured; tests repeat it)


@dataclass(frozen=True, slots=True)
class _DecodeTile:
    """One KV tile of all decoding requests that reach it: the first `num_requests` in the plan's order.

    block_ids: [num_requests * blocks_per_tile]. Requests from first_partial on end inside the tile;
    is_hidden: [num_requests - first_partial, tile_tokens], True beyond the request's end.
    """

    num_requests: int
    block_ids: Tensor
    first_partial: int
    is_hidden: Tensor


@dataclass(frozen=True, slots=True)
class _DecodePlan:
    """Requests that compute one token, longest sequence first. rows: [num_requests], their rows in the flat batch."""

    rows: Tensor
    tiles: list[_DecodeTile]


@dataclass(frozen=True, slots=True)
class _QueryTile:
    """Some consecutive query tokens of one request, as rows first_row to first_row + num_rows of the flat batch.

    num_tiles: KV tiles that its last token reaches. is_hidden_by_tile: for the tiles on the causal diagonal,
    [padded rows * group, tile_tokens], True where the key lies after the query.
    """

    first_row: int
    num_rows: int
    num_tiles: int
    is_hidden_by_tile: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _PrefillPlan:
    """One request that computes several tokens. block_ids: [num_tiles * blocks_per_tile]; seq_len in tokens."""

    block_ids: Tensor
    seq_len: int
    query_tiles: list[_QueryTile]


class TorchAttention(AttentionBackend):
    """Plain-torch backend. Differences from the interface: none."""

    def __init__(self, block_size: int, num_heads: int, num_kv_heads: int, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._blocks_per_tile = max(TILE_TOKENS // block_size, 1)
        self._block_size = block_size
        self._tile_tokens = self._blocks_per_tile * block_size
        self._slot_blocks = torch.empty(0, dtype=torch.int64)
        self._slot_offsets = torch.empty(0, dtype=torch.int64)
        self._decode: _DecodePlan | None = None
        self._prefills: list[_PrefillPlan] = []

    def begin_step(self, batch: AttentionBatch) -> None:
        self._slot_blocks = batch.slot_mapping // self._block_size
        self._slot_offsets = batch.slot_mapping % self._block_size
        starts: list[int] = batch.query_start.tolist()
        seq_lens: list[int] = batch.seq_lens.tolist()
        max_tiles = -(-max(seq_lens, default=0) // self._tile_tokens)
        block_tables = _with_columns(batch.block_tables, max_tiles * self._blocks_per_tile)
        decoding = [r for r in range(len(seq_lens)) if starts[r + 1] - starts[r] == 1]
        self._decode = self._plan_decode(decoding, starts, seq_lens, block_tables) if decoding else None
        self._prefills = [
            self._plan_prefill(starts[r], starts[r + 1] - starts[r], seq_lens[r], block_tables[r])
            for r in range(len(seq_lens))
            if starts[r + 1] - starts[r] > 1
        ]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        num_tokens = self._slot_blocks.shape[0]
        key_cache[self._slot_blocks, self._slot_offsets] = key[:num_tokens]
        value_cache[self._slot_blocks, self._slot_offsets] = value[:num_tokens]
        scaled_query = query.float() * scale
        output = torch.zeros_like(query)
        if self._decode is not None:
            output[self._decode.rows] = self._attend_decode(self._decode, scaled_query, key_cache, value_cache).to(query.dtype)
        for plan in self._prefills:
            self._attend_prefill(plan, scaled_query, key_cache, value_cache, output)
        return output

    def _plan_decode(self, decoding: list[int], starts: list[int], seq_lens: list[int], block_tables: Tensor) -> _DecodePlan:
        order = sorted(decoding, key=lambda r: -seq_lens[r])
        lengths = [seq_lens[r] for r in order]
        tables = block_tables[order]
        lengths_tensor = torch.tensor(lengths, device=self._device)
        tiles = []
        for tile in range(-(-lengths[0] // self._tile_tokens)):
            first, end = tile * self._tile_tokens, (tile + 1) * self._tile_tokens
            num_requests = sum(length > first for length in lengths)
            first_partial = sum(length >= end for length in lengths)
            columns = slice(tile * self._blocks_per_tile, (tile + 1) * self._blocks_per_tile)
            positions = torch.arange(first, end, device=self._device)
            tiles.append(
                _DecodeTile(
                    num_requests=num_requests,
                    block_ids=tables[:num_requests, columns].reshape(-1),
                    first_partial=first_partial,
                    is_hidden=positions[None, :] >= lengths_tensor[first_partial:num_requests, None],
                )
            )
        return _DecodePlan(rows=torch.tensor([starts[r] for r in order], device=self._device), tiles=tiles)

    def _plan_prefill(self, start: int, num_tokens: int, seq_len: int, block_table: Tensor) -> _PrefillPlan:
        first_position = seq_len - num_tokens
        query_tiles = []
        for offset in range(0, num_tokens, QUERY_TILE_TOKENS):
            num_rows = min(QUERY_TILE_TOKENS, num_tokens - offset)
            first = first_position + offset
            num_tiles = (first + num_rows - 1) // self._tile_tokens + 1
            positions = torch.arange(first, first + _round_up(num_rows), device=self._device).clamp(max=first + num_rows - 1)
            row_positions = positions.repeat_interleave(self._group)[:, None]
            tile_offsets = torch.arange(self._tile_tokens, device=self._device)[None, :]
            is_hidden_by_tile = {
                tile: tile_offsets + tile * self._tile_tokens > row_positions
                for tile in range((first + 1) // self._tile_tokens, num_tiles)
            }
            query_tiles.append(_QueryTile(start + offset, num_rows, num_tiles, is_hidden_by_tile))
        num_blocks = query_tiles[-1].num_tiles * self._blocks_per_tile
        return _PrefillPlan(block_ids=block_table[:num_blocks], seq_len=seq_len, query_tiles=query_tiles)

    def _attend_decode(self, plan: _DecodePlan, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """[num_requests, num_heads, head_dim] float32 for the decoding requests, in the plan's order."""
        num_requests, head_dim = plan.rows.shape[0], scaled_query.shape[-1]
        heads = self._num_kv_heads
        query = scaled_query.new_zeros(num_requests, heads, _round_up(self._group), head_dim)
        query[:, :, : self._group] = scaled_query[plan.rows].view(num_requests, heads, self._group, head_dim)
        query = query.view(num_requests * heads, -1, head_dim)
        softmax = _OnlineSoftmax(query)
        for tile in plan.tiles:
            keys = self._read_tiles(key_cache, tile.block_ids, tile.num_requests)
            values = self._read_tiles(value_cache, tile.block_ids, tile.num_requests)
            scores = torch.bmm(query[: tile.num_requests * heads], keys.flatten(0, 1).transpose(1, 2))
            if tile.first_partial < tile.num_requests:
                partial = scores.view(tile.num_requests, heads, -1, self._tile_tokens)[tile.first_partial :]
                partial.masked_fill_(tile.is_hidden[:, None, None, :], -torch.inf)
                # What lies beyond the end is some other request's or nobody's: a NaN there would survive a weight of zero.
                values[tile.first_partial :].masked_fill_(tile.is_hidden[:, None, :, None], 0.0)
            softmax.add_tile(scores, values.flatten(0, 1))
        result = softmax.result().view(num_requests, heads, -1, head_dim)[:, :, : self._group]
        return result.reshape(num_requests, heads * self._group, head_dim)

    def _attend_prefill(
        self, plan: _PrefillPlan, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor, output: Tensor
    ) -> None:
        """Fill the request's rows of `output`."""
        heads, group, head_dim = self._num_kv_heads, self._group, scaled_query.shape[-1]
        keys = self._read_tiles(key_cache, plan.block_ids, 1)[0].transpose(1, 2)  # [kv_heads, head_dim, positions]
        values = self._read_tiles(value_cache, plan.block_ids, 1)[0]
        values[:, plan.seq_len :] = 0.0  # as in decoding: beyond the end anything may lie
        for tile in plan.query_tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_rows)
            query = scaled_query.new_zeros(heads, _round_up(tile.num_rows), group, head_dim)
            query[:, : tile.num_rows] = scaled_query[rows].view(tile.num_rows, heads, group, head_dim).transpose(0, 1)
            query = query.view(heads, -1, head_dim)
            softmax = _OnlineSoftmax(query)
            for kv_tile in range(tile.num_tiles):
                positions = slice(kv_tile * self._tile_tokens, (kv_tile + 1) * self._tile_tokens)
                scores = torch.bmm(query, keys[:, :, positions])
                if (is_hidden := tile.is_hidden_by_tile.get(kv_tile)) is not None:
                    scores.masked_fill_(is_hidden, -torch.inf)
                softmax.add_tile(scores, values[:, positions])
            result = softmax.result().view(heads, -1, group, head_dim)[:, : tile.num_rows]
            output[rows] = result.transpose(0, 1).reshape(tile.num_rows, heads * group, head_dim).to(output.dtype)

    def _read_tiles(self, cache: Tensor, block_ids: Tensor, num_requests: int) -> Tensor:
        """The named blocks as [num_requests, num_kv_heads, positions, head_dim] float32."""
        blocks = cache.index_select(0, block_ids)
        return (
            blocks.view(num_requests, -1, self._num_kv_heads, blocks.shape[-1])
            .transpose(1, 2)
            .to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        )


class _OnlineSoftmax:
    """softmax(scores) @ values over tiles that arrive in position order; rows are [batch, rows, head_dim] float32.

    A tile may cover only the first requests of the batch: those whose sequences reach it.
    """

    def __init__(self, query: Tensor) -> None:
        """query: of the result's shape, dtype and device."""
        self._maximum = query.new_full((*query.shape[:2], 1), -torch.inf)
        self._total = query.new_zeros(*query.shape[:2], 1)
        self._weighted = torch.zeros_like(query)

    def add_tile(self, scores: Tensor, values: Tensor) -> None:
        """scores: [n, rows, positions], overwritten; values: [n, positions, head_dim]; n up to batch.

        A tile that is wholly hidden from a row leaves it bit for bit as it was. Every row sees position 0, so that its maximum is
        finite from the first tile on.
        """
        n = scores.shape[0]
        maximum, total, weighted = self._maximum[:n], self._total[:n], self._weighted[:n]
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        decay = (maximum - new_maximum).exp_()
        weights = scores.sub_(new_maximum).exp_()
        total.mul_(decay).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(decay).add_(torch.bmm(weights, values))
        maximum.copy_(new_maximum)

    def result(self) -> Tensor:
        """[batch, rows, head_dim] float32."""
        return self._weighted / self._total


def _round_up(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _with_columns(block_tables: Tensor, num_columns: int) -> Tensor:
    """At least num_columns columns; new ones repeat the first, whose block_id is valid and whose content is masked."""
    lacking = num_columns - block_tables.shape[1]
    if lacking <= 0:
        return block_tables
    return torch.cat((block_tables, block_tables[:, :1].expand(-1, lacking)), dim=1)
