"""Paged attention in plain torch, on the CPU bit-identical per token under any batching; slower than a compiled kernel.

Scores and sums are float32. A sequence is read in tiles of KV at fixed absolute positions, always of full size and masked,
and merged in position order by online softmax (https://arxiv.org/abs/1805.02867). Query rows come in multiples of
ROW_MULTIPLE. So every token meets the same shapes and order of additions, alone or in company, decoded or prefilled, and whether a
tile is read for it alone or for all requests that share its blocks (attention_plan.py decides that).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch
from core.model.attention_plan import QUERY_TILE_TOKENS, AttentionPlan, AttentionPlanner, DecodePlan, PrefillPlan, SharedPlan
from core.model.shared_tiles import CascadeRule

TILE_TOKENS = 256  # positions per KV tile, rounded down to whole blocks (up to one block, where that is larger)
ROW_MULTIPLE = 8  # batched float32 GEMMs give a row the same bits among any multiple of 8 rows (measured; tests repeat it)


class TorchAttention(AttentionBackend):
    """Plain-torch backend. Differences from the interface: none."""

    def __init__(
        self,
        block_size: int,
        num_heads: int,
        num_kv_heads: int,
        device: torch.device | str = "cpu",
        rule: CascadeRule | None = None,
    ) -> None:
        """rule: when requests that share blocks read them together; None: where it was measured to pay."""
        self._group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._block_size = block_size
        self._tile_tokens = max(TILE_TOKENS // block_size, 1) * block_size
        self._planner = AttentionPlanner(block_size, self._tile_tokens, self._group, device, rule or CascadeRule())
        self._slot_blocks = torch.empty(0, dtype=torch.int64)
        self._slot_offsets = torch.empty(0, dtype=torch.int64)
        self._plan = AttentionPlan(None, None, [], 0)
        self._workspace = _Workspace()

    @property
    def plan(self) -> AttentionPlan:
        """Of the step that began last."""
        return self._plan

    def begin_step(self, batch: AttentionBatch) -> None:
        self._slot_blocks = batch.slot_mapping // self._block_size
        self._slot_offsets = batch.slot_mapping % self._block_size
        self._plan = self._planner.plan(batch)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        num_tokens = self._slot_blocks.shape[0]
        key_cache[self._slot_blocks, self._slot_offsets] = key[:num_tokens]
        value_cache[self._slot_blocks, self._slot_offsets] = value[:num_tokens]
        scaled_query = query.float() * scale
        output = torch.zeros_like(query)
        plan = self._plan
        shared = None if plan.shared is None else self._attend_shared(plan.shared, scaled_query, key_cache, value_cache)
        if plan.decode is not None:
            attended = self._attend_decode(plan.decode, shared, scaled_query, key_cache, value_cache)
            output[plan.decode.rows] = attended.to(output.dtype)
        for prefill in plan.prefills:
            self._attend_prefill(prefill, shared, scaled_query, key_cache, value_cache, output)
        return output

    def _attend_shared(self, plan: SharedPlan, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor) -> Tensor:
        """State of the shared tokens' softmax after their shared tiles, [num_kv_heads, num_tokens * group, head_dim + 2]."""
        heads, group, head_dim = self._num_kv_heads, self._group, scaled_query.shape[-1]
        num_tokens = plan.rows.shape[0]
        query = scaled_query.new_zeros(heads, num_tokens * group + ROW_MULTIPLE, head_dim)  # rows are filled up from what follows
        tokens = scaled_query[plan.rows].view(num_tokens, heads, group, head_dim)
        query[:, : num_tokens * group].view(heads, num_tokens, group, head_dim).copy_(tokens.transpose(0, 1))
        state = _new_state(scaled_query, heads, num_tokens * group)
        for tile in plan.tiles:
            keys = self._read_tiles("keys", key_cache, tile.block_ids, 1)[0].transpose(1, 2)
            values = self._read_tiles("values", value_cache, tile.block_ids, 1)[0]
            end = tile.first_token + tile.num_tokens
            for first in range(tile.first_token, end, QUERY_TILE_TOKENS):
                rows = slice(first * group, min(first + QUERY_TILE_TOKENS, end) * group)
                padded = query[:, rows.start : rows.start + _round_up(rows.stop - rows.start)]
                scores = self._workspace.take("scores", scaled_query, heads, padded.shape[1], self._tile_tokens)
                torch.bmm(padded, keys, out=scores)
                _add_tile(state[:, rows], scores, values)
        return state

    def _attend_decode(
        self, plan: DecodePlan, shared: Tensor | None, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """[num_requests, num_heads, head_dim] float32 for the decoding requests, in the plan's order."""
        num_requests, heads, group, head_dim = plan.rows.shape[0], self._num_kv_heads, self._group, scaled_query.shape[-1]
        query = scaled_query.new_zeros(num_requests * heads, _round_up(group), head_dim)
        query[:, :group] = scaled_query[plan.rows].view(num_requests * heads, group, head_dim)
        state = _new_state(scaled_query, num_requests * heads, group)
        if shared is not None:
            tokens = shared.view(heads, -1, group, head_dim + 2)[:, plan.continued_tokens]
            state.view(num_requests, heads, group, -1)[plan.continued] = tokens.transpose(0, 1)
        for tile in plan.passes:
            batch = slice(tile.first_request * heads, (tile.first_request + tile.num_requests) * heads)
            keys = self._read_tiles("keys", key_cache, tile.block_ids, tile.num_requests)
            values = self._read_tiles("values", value_cache, tile.block_ids, tile.num_requests)
            scores = self._workspace.take("scores", query, tile.num_requests * heads, query.shape[1], self._tile_tokens)
            torch.bmm(query[batch], keys.flatten(0, 1).transpose(1, 2), out=scores)
            if tile.first_partial < tile.num_requests:
                partial = scores.view(tile.num_requests, heads, -1, self._tile_tokens)[tile.first_partial :]
                partial.masked_fill_(tile.is_hidden[:, None, None, :], -torch.inf)
                # What lies beyond the end is some other request's or nobody's: a NaN there would survive a weight of zero.
                values[tile.first_partial :].masked_fill_(tile.is_hidden[:, None, :, None], 0.0)
            _add_tile(state[batch], scores, values.flatten(0, 1))
        return _result(state).reshape(num_requests, heads * group, head_dim)

    def _attend_prefill(
        self,
        plan: PrefillPlan,
        shared: Tensor | None,
        scaled_query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
    ) -> None:
        """Fill the request's rows of `output`."""
        heads, group, head_dim = self._num_kv_heads, self._group, scaled_query.shape[-1]
        keys = self._read_tiles("prefill_keys", key_cache, plan.block_ids, 1)[0].transpose(
            1, 2
        )  # [kv_heads, head_dim, positions]
        values = self._read_tiles("prefill_values", value_cache, plan.block_ids, 1)[0]
        values[:, plan.num_tokens :] = 0.0  # as in decoding: beyond the end anything may lie
        for tile in plan.query_tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_rows)
            num_rows = tile.num_rows * group
            query = scaled_query.new_zeros(heads, _round_up(num_rows), head_dim)
            tokens = scaled_query[rows].view(tile.num_rows, heads, group, head_dim)
            query[:, :num_rows].view(heads, tile.num_rows, group, head_dim).copy_(tokens.transpose(0, 1))
            if shared is None or tile.first_shared_token is None:
                state = _new_state(scaled_query, heads, num_rows)
            else:
                state = shared[:, tile.first_shared_token * group :][:, :num_rows]
            for kv_tile in range(tile.num_tiles):
                positions = slice(kv_tile * self._tile_tokens, (kv_tile + 1) * self._tile_tokens)
                scores = self._workspace.take("scores", query, heads, query.shape[1], self._tile_tokens)
                torch.bmm(query, keys[:, :, positions], out=scores)
                if (is_hidden := tile.is_hidden_by_tile.get(kv_tile)) is not None:
                    scores[:, :num_rows].masked_fill_(is_hidden, -torch.inf)
                _add_tile(state, scores, values[:, positions])
            result = _result(state).view(heads, tile.num_rows, group, head_dim)
            output[rows] = result.transpose(0, 1).reshape(tile.num_rows, heads * group, head_dim).to(output.dtype)

    def _read_tiles(self, name: str, cache: Tensor, block_ids: Tensor, num_requests: int) -> Tensor:
        """The named blocks as [num_requests, num_kv_heads, positions, head_dim] float32, valid until the next of this name."""
        num_blocks, head_dim = block_ids.shape[0], cache.shape[-1]
        blocks = self._workspace.take("blocks", cache, num_blocks, *cache.shape[1:])
        torch.index_select(cache, 0, block_ids, out=blocks)
        positions = num_blocks // num_requests * self._block_size
        shape = (num_requests, self._num_kv_heads, positions, head_dim)
        tiles = self._workspace.take(name, cache, *shape, dtype=torch.float32)
        return tiles.copy_(blocks.view(num_requests, positions, self._num_kv_heads, head_dim).transpose(1, 2))


class _Workspace:
    """Memory that passes use again: a fresh allocation of a megabyte costs more, in first touches, than what is done in it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized contiguous tensor on like's device; whoever had the same name before loses it."""
        dtype = dtype or like.dtype
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype, device=like.device)
        return buffer[:size].view(shape)


def _new_state(like: Tensor, batch: int, num_rows: int) -> Tensor:
    """An online softmax that has seen no tile, [batch, num_rows, head_dim + 2]: weighted values, their total weight, maximum score."""
    state = like.new_zeros(batch, num_rows, like.shape[-1] + 2)
    state[..., -1] = -torch.inf
    return state


def _add_tile(state: Tensor, scores: Tensor, values: Tensor) -> None:
    """Merge a tile into the state's rows. scores: [batch, at least as many rows, positions], overwritten; values: [batch, positions,
    head_dim].

    A tile that is wholly hidden from a row leaves it bit for bit as it was. Every row sees position 0, so that its maximum is
    finite from the first tile on. Rows of scores beyond the state's only fill up the product to a multiple of ROW_MULTIPLE.
    """
    num_rows = state.shape[1]
    weighted, total, maximum = state[..., :-2], state[..., -2:-1], state[..., -1:]
    weights = scores[:, :num_rows]
    new_maximum = torch.maximum(maximum, weights.amax(-1, keepdim=True))
    decay = (maximum - new_maximum).exp_()
    weights.sub_(new_maximum).exp_()
    total.mul_(decay).add_(weights.sum(-1, keepdim=True))
    weighted.mul_(decay).add_(torch.bmm(scores, values)[:, :num_rows])
    maximum.copy_(new_maximum)


def _result(state: Tensor) -> Tensor:
    """[batch, num_rows, head_dim] float32."""
    return state[..., :-2] / state[..., -2:-1]


def _round_up(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
