"""Paged attention in plain torch, on the CPU bit-identical per token under any batching; slower than a compiled kernel.

Scores and sums are float32. A sequence is read in tiles of KV at fixed absolute positions, always of full size and masked,
and merged in position order by online softmax (https://arxiv.org/abs/1805.02867). Query rows come in multiples of
ROW_MULTIPLE. So every token meets the same shapes and order of additions, alone or in company, decoded or prefilled, and whether
a tile is read for it alone or for all requests that share its blocks (attention_plan.py decides that).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from core.model.attention import AttentionBackend, AttentionBatch
from core.model.attention_plan import QUERY_TILE_TOKENS, AttentionPlan, AttentionPlanner, DecodePlan, PrefillPlan, SharedPlan
from core.model.kv_format import KVFormat
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
        kv_format: KVFormat | None = None,
    ) -> None:
        """rule: when requests that share blocks read them together; None: where it was measured to pay. kv_format: how numbers
        lie in the pool, whose views then have its last dimension; None: as floats.
        """
        self._group = num_heads // num_kv_heads
        self._num_kv_heads = num_kv_heads
        self._block_size = block_size
        self._tile_tokens = max(TILE_TOKENS // block_size, 1) * block_size
        self._planner = AttentionPlanner(block_size, self._tile_tokens, self._group, device, rule or CascadeRule())
        self._slot_blocks = torch.empty(0, dtype=torch.int64)
        self._slot_offsets = torch.empty(0, dtype=torch.int64)
        self._plan = AttentionPlan(None, None, [], 0)
        self._batch: AttentionBatch | None = None
        self._max_seq_len = 0
        self._window_plans: dict[int, list[PrefillPlan]] = {}
        self._soft_cap = 0.0
        self._workspace = _Workspace()
        self._kv_format = kv_format or KVFormat()

    @property
    def plan(self) -> AttentionPlan:
        """Of the step that began last."""
        return self._plan

    def begin_step(self, batch: AttentionBatch) -> None:
        self._slot_blocks = batch.slot_mapping // self._block_size
        self._slot_offsets = batch.slot_mapping % self._block_size
        self._plan = self._planner.plan(batch)
        self._batch = batch
        self._max_seq_len = int(batch.seq_lens.max()) if len(batch.seq_lens) else 0
        self._window_plans = {}

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
        num_tokens = self._slot_blocks.shape[0]
        for values, cache in ((key, key_cache), (value, value_cache)):
            cache[self._slot_blocks, self._slot_offsets] = self._kv_format.encode(values[:num_tokens]).to(cache.dtype)
        scaled_query = query.float() * scale
        output = torch.zeros_like(query)
        self._soft_cap = soft_cap
        if 0 < sliding_window < self._max_seq_len:
            for windowed in self._plan_window(sliding_window):
                self._attend_prefill(windowed, None, scaled_query, key_cache, value_cache, output)
            return output
        plan = self._plan
        shared = None if plan.shared is None else self._attend_shared(plan.shared, scaled_query, key_cache, value_cache)
        if plan.decode is not None:
            attended = self._attend_decode(plan.decode, shared, scaled_query, key_cache, value_cache)
            output[plan.decode.rows] = attended.to(output.dtype)
        for prefill in plan.prefills:
            self._attend_prefill(prefill, shared, scaled_query, key_cache, value_cache, output)
        return output

    def _plan_window(self, sliding_window: int) -> list[PrefillPlan]:
        """The step's plan for layers of this window, made by the first of them."""
        if sliding_window not in self._window_plans:
            assert self._batch is not None
            self._window_plans[sliding_window] = self._planner.plan_window(self._batch, sliding_window)
        return self._window_plans[sliding_window]

    def _attend_shared(self, plan: SharedPlan, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor) -> _OnlineSoftmax:
        """The shared tokens' softmax after their shared tiles; batch: KV heads, rows: tokens * group."""
        heads, group, head_dim = self._num_kv_heads, self._group, scaled_query.shape[-1]
        num_tokens = plan.rows.shape[0]
        query = scaled_query.new_zeros(heads, num_tokens * group + ROW_MULTIPLE, head_dim)  # rows are filled up from what follows
        tokens = scaled_query[plan.rows].view(num_tokens, heads, group, head_dim)
        query[:, : num_tokens * group].view(heads, num_tokens, group, head_dim).copy_(tokens.transpose(0, 1))
        softmax = _OnlineSoftmax.new(heads, num_tokens * group, scaled_query)
        for run in plan.runs:
            keys = self._read_tiles("keys", key_cache, run.block_ids, run.num_tiles)
            values = self._read_tiles("values", value_cache, run.block_ids, run.num_tiles)
            end = run.first_token + run.num_tokens
            for first in range(run.first_token, end, QUERY_TILE_TOKENS):
                rows = slice(first * group, min(first + QUERY_TILE_TOKENS, end) * group)
                padded = query[:, rows.start : rows.start + _round_up(rows.stop - rows.start)]
                scores = self._scores(padded, keys.transpose(1, 2), run.num_tiles)
                softmax.rows(rows).add_tiles(scores, values, run.num_tiles)
        return softmax

    def _attend_decode(
        self, plan: DecodePlan, shared: _OnlineSoftmax | None, scaled_query: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """[num_requests, num_heads, head_dim] float32 for the decoding requests, in the plan's order."""
        num_requests, heads, group, head_dim = plan.rows.shape[0], self._num_kv_heads, self._group, scaled_query.shape[-1]
        query = scaled_query.new_zeros(num_requests * heads, _round_up(group), head_dim)
        query[:, :group] = scaled_query[plan.rows].view(num_requests * heads, group, head_dim)
        softmax = _OnlineSoftmax.new(num_requests * heads, group, scaled_query)
        if shared is not None:
            for ours, theirs in zip(softmax, shared, strict=True):
                tokens = theirs.view(heads, -1, group, theirs.shape[-1])[:, plan.continued_tokens]
                ours.view(num_requests, heads, group, -1)[plan.continued] = tokens.transpose(0, 1)
        for part in plan.passes:
            num_tiles = part.num_tiles * part.num_requests
            keys = self._read_tiles("keys", key_cache, part.block_ids, num_tiles)
            values = self._read_tiles("values", value_cache, part.block_ids, num_tiles)
            batch = slice(part.first_request * heads, (part.first_request + part.num_requests) * heads)
            scores = self._scores(query[batch], keys.transpose(1, 2), part.num_tiles)
            if part.is_hidden is not None:
                by_request = scores.view(num_tiles, heads, -1, self._tile_tokens)
                by_request[part.first_partial :].masked_fill_(part.is_hidden[:, None, None, :], -torch.inf)
                # What lies beyond the end is some other request's or nobody's: a NaN there would survive a weight of zero.
                by_request = values.view(num_tiles, heads, self._tile_tokens, head_dim)
                by_request[part.first_partial :].masked_fill_(part.is_hidden[:, None, :, None], 0.0)
            softmax.batch(batch).add_tiles(scores, values, part.num_tiles)
        return softmax.result().reshape(num_requests, heads * group, head_dim)

    def _attend_prefill(
        self,
        plan: PrefillPlan,
        shared: _OnlineSoftmax | None,
        scaled_query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        output: Tensor,
    ) -> None:
        """Fill the request's rows of `output`."""
        heads, group, head_dim = self._num_kv_heads, self._group, scaled_query.shape[-1]
        # The whole of a request's own tiles at once, as one tile of any length: [num_kv_heads, positions, head_dim].
        keys = self._read_tiles("prefill_keys", key_cache, plan.block_ids, 1).transpose(1, 2)
        values = self._read_tiles("prefill_values", value_cache, plan.block_ids, 1)
        values[:, plan.num_tokens :] = 0.0  # as in decoding: beyond the end anything may lie
        for tile in plan.query_tiles:
            rows = slice(tile.first_row, tile.first_row + tile.num_rows)
            num_rows = tile.num_rows * group
            query = scaled_query.new_zeros(heads, _round_up(num_rows), head_dim)
            tokens = scaled_query[rows].view(tile.num_rows, heads, group, head_dim)
            query[:, :num_rows].view(heads, tile.num_rows, group, head_dim).copy_(tokens.transpose(0, 1))
            if shared is None or tile.first_shared_token is None:
                softmax = _OnlineSoftmax.new(heads, num_rows, scaled_query)
            else:
                first = tile.first_shared_token * group
                softmax = shared.rows(slice(first, first + num_rows))
            for kv_tile in range(tile.first_tile, tile.num_tiles):
                positions = slice(kv_tile * self._tile_tokens, (kv_tile + 1) * self._tile_tokens)
                scores = self._scores(query, keys[:, :, positions], 1)
                if (is_hidden := tile.is_hidden_by_tile.get(kv_tile)) is not None:
                    scores[:, :num_rows].masked_fill_(is_hidden, -torch.inf)
                softmax.add_tiles(scores, values[:, positions], 1)
            result = softmax.result().view(heads, tile.num_rows, group, head_dim)
            output[rows] = result.transpose(0, 1).reshape(tile.num_rows, heads * group, head_dim).to(output.dtype)

    def _scores(self, query: Tensor, keys: Tensor, num_tiles: int) -> Tensor:
        """[num_tiles * batch, rows, positions], tile by tile, valid until the next.

        query: [batch, rows, head_dim], the same for each tile; keys: [num_tiles * batch, head_dim, positions].
        """
        if num_tiles > 1:
            query = query.repeat(num_tiles, 1, 1)
        scores = self._workspace.take("scores", query, (keys.shape[0], query.shape[1], keys.shape[2]))
        torch.bmm(query, keys, out=scores)
        if self._soft_cap:  # tanh by exp, which gives every element the same bits wherever it lies; torch's tanh need not
            scores.mul_(2.0 / self._soft_cap).exp_().add_(1.0).reciprocal_().mul_(-2.0).add_(1.0).mul_(self._soft_cap)
        return scores

    def _read_tiles(self, name: str, cache: Tensor, block_ids: Tensor, num_tiles: int) -> Tensor:
        """The named blocks as [num_tiles * num_kv_heads, positions, head_dim] float32, valid until the next of this name."""
        num_blocks, (block_size, heads, stored_dim) = block_ids.shape[0], cache.shape[1:]
        blocks = self._workspace.take("blocks", cache, (num_blocks, block_size, heads, stored_dim))
        torch.index_select(cache, 0, block_ids, out=blocks)
        positions, head_dim = num_blocks // num_tiles * block_size, self._kv_format.head_dim(stored_dim)
        tiles = self._workspace.take(name, cache, (num_tiles * heads, positions, head_dim), torch.float32)
        by_head = blocks.view(num_tiles, positions, heads, stored_dim).transpose(1, 2)
        self._kv_format.decode(by_head, tiles.view(num_tiles, heads, positions, head_dim))
        return tiles


class _Workspace:
    """Memory that passes use again: a fresh allocation of a megabyte costs more, in first touches, than what is done in it."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def take(self, name: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialized contiguous tensor of dtype (like's) on like's device; whoever had the same name before loses it."""
        last = self._last.get(name)
        if last is not None and last.shape == shape:
            return last
        size = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape[0] < size:
            buffer = self._buffers[name] = torch.empty(size, dtype=dtype or like.dtype, device=like.device)
        self._last[name] = buffer[:size].view(shape)
        return self._last[name]


class _OnlineSoftmax(NamedTuple):
    """softmax(scores) @ values over tiles that arrive in position order, of the rows of a batch; all float32.

    maximum, total: [batch, rows, 1], the highest score so far and the sum of weights relative to it; weighted: [batch, rows,
    head_dim].
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor

    @classmethod
    def new(cls, batch: int, num_rows: int, like: Tensor) -> _OnlineSoftmax:
        """Before the first tile. like: of the result's head_dim, dtype and device."""
        maximum = like.new_full((batch, num_rows, 1), torch.finfo(torch.float32).min)
        return cls(maximum, like.new_zeros(batch, num_rows, 1), like.new_zeros(batch, num_rows, like.shape[-1]))

    def batch(self, part: slice) -> _OnlineSoftmax:
        """A view of some of the batch."""
        return _OnlineSoftmax(self.maximum[part], self.total[part], self.weighted[part])

    def rows(self, part: slice) -> _OnlineSoftmax:
        """A view of some rows."""
        return _OnlineSoftmax(self.maximum[:, part], self.total[:, part], self.weighted[:, part])

    def add_tiles(self, scores: Tensor, values: Tensor, num_tiles: int) -> None:
        """Merge num_tiles tiles. scores: [num_tiles * batch, rows or more, positions], overwritten; rows beyond ours only fill up
        the product to a multiple of ROW_MULTIPLE. values: [num_tiles * batch, positions, head_dim].

        A tile that is wholly hidden from a row leaves it bit for bit as it was: the maximum is finite from the beginning.
        Maxima are exact and additions keep their order: tiles that come together leave the bits that one after the other would.
        """
        batch, num_rows, _ = self.maximum.shape
        weights = scores[:, :num_rows]
        before, after = self.maximum, weights.amax(-1, keepdim=True)
        if num_tiles == 1:
            after = torch.maximum(before, after)
        else:
            maxima = torch.cat((before, after)).view(num_tiles + 1, batch, num_rows, 1).cummax(0).values
            before, after = maxima[:-1].flatten(0, 1), maxima[1:].flatten(0, 1)
        decays = (before - after).exp_()
        weights.sub_(after).exp_()
        totals, products = weights.sum(-1, keepdim=True), torch.bmm(scores, values)
        for first in range(0, num_tiles * batch, batch):
            tile = slice(first, first + batch)
            self.total.mul_(decays[tile]).add_(totals[tile])
            self.weighted.mul_(decays[tile]).add_(products[tile, :num_rows])
        self.maximum.copy_(after[-batch:])

    def result(self) -> Tensor:
        """[batch, rows, head_dim] float32."""
        return self.weighted / self.total


def _round_up(num_rows: int) -> int:
    return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE
