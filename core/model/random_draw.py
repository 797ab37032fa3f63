"""Draws a token per row by inverse transform sampling, after temperature, min_p, top_k and top_p, without sorting vocabularies.

What the filters keep is nearly always among a few hundred tokens. So the row's best are found first: the maxima of blocks of
BLOCK tokens give a bound that many tokens reach, and only these candidates are sorted. Where that does not settle a row (a flat
distribution), a lower bound is tried, and at last the row is sorted wholly. Which way a row goes follows from the row alone, and
all lead to the same thresholds. Cumulated sums are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.model.logit_adjustments import HIGHEST_FLOAT
from core.model.sampled_row import IntArray, SampledRow

BLOCK = 64  # tokens whose maximum, and whose sum, is taken together
Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
FindBounds = Callable[[Tensor], Floats]


class _Filters(NamedTuple):
    """Parameters of rows. min_logits: log(min_p), -inf: off. top_ks: 0: off. top_ps: 1: off. All [num_rows]."""

    min_logits: Floats
    top_ks: IntArray
    top_ps: Doubles

    @classmethod
    def of(cls, rows: Sequence[SampledRow], vocab_size: int) -> _Filters:
        values = np.array([(row.sampling.min_p, row.sampling.top_k, row.sampling.top_p) for row in rows], dtype=np.float64)
        min_ps, top_ks, top_ps = values.T
        with np.errstate(divide="ignore"):
            min_logits = np.log(min_ps).astype(np.float32)
        return cls(min_logits, np.where((top_ks > 0) & (top_ks < vocab_size), top_ks, 0).astype(np.int64), top_ps)

    @property
    def are_on(self) -> Flags:
        on: Flags = (self.min_logits > -np.inf) | (self.top_ks > 0) | (self.top_ps < 1.0)
        return on

    def take(self, rows: IntArray) -> _Filters:
        return _Filters(self.min_logits[rows], self.top_ks[rows], self.top_ps[rows])


class _Candidates(NamedTuple):
    """Of each row all possible tokens whose logits reach bounds [num_rows], by id; and the same logits from the best down.

    token_ids, logits, ordered: [num_rows, most]; what is beyond a row's own number has logit -inf.
    """

    bounds: Floats
    token_ids: IntArray
    logits: Floats
    ordered: Floats


class RandomDraw:
    """Draws. Keeps a buffer of the batch's size, so that no step pays for the first touch of its memory. Step thread only."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def draw(self, logits: Tensor, rows: Sequence[SampledRow]) -> IntArray:
        """[len(rows)] tokens: the first of each row whose cumulated probability passes the row's uniform number.

        logits: [len(rows), vocab] float32 on the CPU, contiguous, finite or -inf, overwritten. Filters keep what is at or above a
        threshold, so that tokens of equal logits are kept or dropped together. A row of -inf only gives token 0.
        """
        num_rows, vocab_size = logits.shape
        _apply_temperatures(logits, rows)
        if vocab_size % BLOCK:
            logits = torch.nn.functional.pad(logits, (0, BLOCK - vocab_size % BLOCK), value=-torch.inf)
        filters = _Filters.of(rows, vocab_size)
        uniforms = np.array([row.uniform for row in rows], dtype=np.float64)
        tokens: IntArray = np.zeros(num_rows, dtype=np.int64)
        is_drawn: Flags = np.zeros(num_rows, dtype=np.bool_)
        thresholds: Floats = np.full(num_rows, -np.inf, dtype=np.float32)
        for find_bounds in (_near_bounds, _far_bounds):
            if len(limited := np.flatnonzero(filters.are_on & ~is_drawn)):
                limited_filters = filters.take(limited)
                chosen, is_drawn[limited] = self._draw_limited(
                    _take(logits, limited), find_bounds, limited_filters, uniforms[limited]
                )
                tokens[limited] = chosen
        if len(wide := np.flatnonzero(filters.are_on & ~is_drawn)):
            thresholds[wide] = _thresholds_by_sorting(_take(logits, wide).numpy(), filters.take(wide))
        if len(rest := np.flatnonzero(~is_drawn)):
            tokens[rest] = self._draw_from_all(_take(logits, rest), thresholds[rest], uniforms[rest])
        return tokens

    def _draw_limited(
        self, logits: Tensor, find_bounds: FindBounds, filters: _Filters, uniforms: Doubles
    ) -> tuple[IntArray, Flags]:
        """Tokens, and of which rows they are settled: those whose candidates include all that is kept."""
        candidates = _find_candidates(logits, find_bounds(logits))
        # Rows that min_p or top_k limit to more than the candidates reach no total, and so are not settled here.
        is_of_all = ~_is_enclosed(candidates, filters)
        totals: Doubles = np.where(is_of_all, np.inf, np.nan)
        is_top_p_alone = (filters.top_ps < 1.0) & (filters.top_ks == 0) & (filters.min_logits == -np.inf)
        if len(needs_total := np.flatnonzero(is_of_all & is_top_p_alone)):
            totals[needs_total] = _cumulated_blocks(self._exp(_take(logits, needs_total)))[:, -1]
        thresholds, is_settled = _find_thresholds(candidates.ordered, candidates.bounds, filters, totals)
        kept = np.where(candidates.logits >= thresholds[:, None], candidates.logits, np.float32(-np.inf))
        cumulated = np.cumsum(_exp_of(kept), axis=-1, dtype=np.float64)
        places = _search(cumulated, uniforms * cumulated[:, -1])
        return candidates.token_ids[np.arange(len(places)), places], is_settled

    def _draw_from_all(self, logits: Tensor, thresholds: Floats, uniforms: Doubles) -> IntArray:
        weights = self._exp(logits)
        filtered = np.flatnonzero(thresholds > -np.inf)
        if len(filtered):
            numbers = torch.from_numpy(filtered)
            dropped = logits[numbers] < torch.from_numpy(thresholds[filtered, None])
            weights[numbers] = weights[numbers].masked_fill_(dropped, 0.0)
        blocks = _cumulated_blocks(weights)
        targets = uniforms * blocks[:, -1]
        chosen = _search(blocks, targets)
        every = np.arange(len(chosen))
        before = np.where(chosen > 0, blocks[every, chosen - 1], 0.0)
        inside = weights.view(len(chosen), -1, BLOCK).numpy()[every, chosen]
        cumulated = before[:, None] + np.cumsum(inside, axis=-1, dtype=np.float64)
        found: IntArray = chosen * BLOCK + _search(cumulated, targets)
        return found

    def _exp(self, logits: Tensor) -> Tensor:
        """exp(logits), valid until the next call."""
        if self._buffer.numel() < logits.numel():
            self._buffer = torch.empty(logits.numel())
        return torch.exp(logits, out=self._buffer[: logits.numel()].view(logits.shape))


def _apply_temperatures(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Divide by the temperatures and subtract each row's maximum, in place. A row of -inf only keeps 0 as its maximum."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    best = logits.amax(dim=-1).div_(temperatures)  # as the maximum after the division: rounding keeps the order
    logits.div_(temperatures[:, None])
    if not bool((best < torch.inf).all()):
        logits.clamp_(max=HIGHEST_FLOAT)
        best.clamp_(max=HIGHEST_FLOAT)
    logits.sub_(torch.where(best == -torch.inf, 0.0, best)[:, None])


def _take(logits: Tensor, row_numbers: IntArray) -> Tensor:
    """The rows, without a copy where they are all."""
    return logits if len(row_numbers) == logits.shape[0] else logits[torch.from_numpy(row_numbers)]


def _near_bounds(logits: Tensor) -> Floats:
    """A logit that half of the row's blocks reach, and so at least as many tokens. logits: [num_rows, a multiple of BLOCK]."""
    maxima = logits.view(logits.shape[0], -1, BLOCK).amax(dim=-1).numpy()
    middle = maxima.shape[1] // 2
    bounds: Floats = np.partition(maxima, middle, axis=-1)[:, middle]
    return bounds


def _far_bounds(logits: Tensor) -> Floats:
    """A logit that about an eighth of the row's tokens reach, by one in 16 of them. logits as for _near_bounds."""
    some = np.ascontiguousarray(logits.numpy()[:, ::16])
    place = some.shape[1] * 7 // 8
    bounds: Floats = np.partition(some, place, axis=-1)[:, place]
    return bounds


def _find_candidates(logits: Tensor, bounds: Floats) -> _Candidates:
    num_rows, width = logits.shape
    values = logits.numpy()
    flat = np.flatnonzero(values >= np.maximum(bounds, -HIGHEST_FLOAT)[:, None])
    row_numbers, token_ids = np.divmod(flat, width)
    lengths = np.bincount(row_numbers, minlength=num_rows)
    columns = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    shape = (num_rows, max(int(lengths.max()), 1))
    ids: IntArray = np.zeros(shape, dtype=np.int64)
    found: Floats = np.full(shape, -np.inf, dtype=np.float32)
    ids[row_numbers, columns] = token_ids
    found[row_numbers, columns] = values.reshape(-1)[flat]
    return _Candidates(bounds, ids, found, np.ascontiguousarray(np.sort(found, axis=-1)[:, ::-1]))


def _is_enclosed(candidates: _Candidates, filters: _Filters) -> Flags:
    """Rows of which min_p or top_k alone leave candidates only."""
    is_top_k = (filters.top_ks > 0) & (filters.top_ks <= (candidates.ordered > -np.inf).sum(axis=1))
    enclosed: Flags = is_top_k | (filters.min_logits >= candidates.bounds)
    return enclosed


def _thresholds_by_sorting(logits: Floats, filters: _Filters) -> Floats:
    ordered = np.ascontiguousarray(np.sort(logits, axis=-1)[:, ::-1])
    bounds: Floats = np.full(len(logits), -np.inf, dtype=np.float32)
    return _find_thresholds(ordered, bounds, filters, np.full(len(logits), np.nan))[0]


def _find_thresholds(ordered: Floats, bounds: Floats, filters: _Filters, totals: Doubles) -> tuple[Floats, Flags]:
    """The lowest logit that each row keeps, and whether it is settled: at its bound or above, so that all that is kept is known.

    ordered: [num_rows, any] logits from the best down, all of the row that reach its bound. totals: the sum of exp over the row;
    NaN: over what min_p and top_k keep, which is then in `ordered`.
    """
    every = np.arange(len(ordered))
    num_found = (ordered > -np.inf).sum(axis=1)
    has_kth = (filters.top_ks > 0) & (filters.top_ks <= num_found)
    kth = ordered[every, np.where(has_kth, filters.top_ks - 1, 0)]
    thresholds: Floats = np.maximum(filters.min_logits, np.where(has_kth, kth, np.float32(-np.inf)))
    by_top_p = filters.top_ps < 1.0
    if by_top_p.any():
        kept = np.where(ordered >= thresholds[:, None], ordered, np.float32(-np.inf))
        reached = np.cumsum(_exp_of(kept), axis=-1, dtype=np.float64)
        targets = np.where(np.isnan(totals), reached[:, -1], totals) * filters.top_ps
        last = (reached < targets[:, None]).sum(axis=1)
        is_reached = last < num_found
        nucleus = ordered[every, np.minimum(last, ordered.shape[1] - 1)]
        thresholds = np.where(by_top_p & is_reached, np.maximum(thresholds, nucleus), thresholds)
    return thresholds, thresholds >= bounds


def _exp_of(logits: Floats) -> Floats:
    """By torch, whose exp gives an element the same bits wherever it stands."""
    weights: Floats = torch.from_numpy(logits).exp().numpy()
    return weights


def _cumulated_blocks(weights: Tensor) -> Doubles:
    """[num_rows, num_blocks] sums of all up to each block's end."""
    sums = weights.view(weights.shape[0], -1, BLOCK).sum(dim=-1, dtype=torch.float64)
    cumulated: Doubles = np.cumsum(sums.numpy(), axis=-1)
    return cumulated


def _search(cumulated: Doubles, targets: Doubles) -> IntArray:
    """The first place of each row that is above its target; where rounding left none, the first that reaches the row's end."""
    ends = cumulated[:, -1]
    after = (cumulated <= targets[:, None]).sum(axis=1)
    found: IntArray = np.minimum(after, (cumulated < ends[:, None]).sum(axis=1))
    return found
