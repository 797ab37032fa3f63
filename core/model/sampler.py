"""Chooses each sampled row's next token from its logits.

A row's choice depends on the row alone: its logits, its parameters, its tokens so far, and one number hashed from
(seed, number of output tokens). So a request goes on identically in any batch, on any node, after any restart.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.model.logit_adjustments import HIGHEST_FLOAT, adjust_logits, is_adjusted
from core.model.random_draw import RandomDraw
from core.model.sampled_row import IntArray, SampledRow


class Sampler:
    """Knows the model's eos tokens, which min_tokens forbids, and keeps memory that steps use again. Step thread only."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._random_draw = RandomDraw()
        self._buffer = torch.empty(0)

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """One token id per row. logits: [len(rows), vocab], any float dtype, left unchanged.

        Greedy rows that nothing adjusts are read where they lie, on logits' device, in their own dtype. NaN counts as -inf. Rows
        whose every token is forbidden get token 0 rather than an error.
        """
        adjusted = [i for i, row in enumerate(rows) if is_adjusted(row)]
        changed = sorted({*adjusted, *(i for i, row in enumerate(rows) if not row.sampling.is_greedy)})
        tokens: IntArray = np.zeros(len(rows), dtype=np.int64)
        if len(changed) < len(rows):
            is_plain = np.ones(len(rows), dtype=np.bool_)
            is_plain[changed] = False
            plain = np.flatnonzero(is_plain)
            tokens[plain] = best_tokens(logits if not changed else logits[torch.from_numpy(plain).to(logits.device)])
        if changed:
            tokens[changed] = self._sample_changed(logits, [rows[i] for i in changed], changed)
        return [int(token) for token in tokens.tolist()]

    def _sample_changed(self, logits: Tensor, rows: Sequence[SampledRow], row_numbers: Sequence[int]) -> IntArray:
        """Tokens of rows that are adjusted, random, or both; row i's logits are logits[row_numbers[i]]."""
        own = self._float_copy(logits, row_numbers)
        if adjusted := [i for i, row in enumerate(rows) if is_adjusted(row)]:
            adjust_logits(own, rows, adjusted, self._eos_token_ids)
        random = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
        if not random:
            return best_tokens(own)
        if len(random) == len(rows):
            return self._random_draw.draw(own, rows)
        tokens: IntArray = np.zeros(len(rows), dtype=np.int64)
        greedy = [i for i, row in enumerate(rows) if row.sampling.is_greedy]
        tokens[greedy] = best_tokens(own[greedy])
        tokens[random] = self._random_draw.draw(own[random], [rows[i] for i in random])
        return tokens

    def _float_copy(self, logits: Tensor, row_numbers: Sequence[int]) -> Tensor:
        """[len(row_numbers), vocab] float32 on the CPU, finite or -inf; valid until the next call."""
        chosen = logits if len(row_numbers) == logits.shape[0] else logits[torch.tensor(row_numbers, device=logits.device)]
        if self._buffer.numel() < chosen.numel():
            self._buffer = torch.empty(chosen.numel())
        own = self._buffer[: chosen.numel()].view(chosen.shape).copy_(chosen)
        if not bool((own.amax(dim=-1) < torch.inf).all()):  # a maximum is NaN as soon as anything is
            torch.nan_to_num_(own, nan=-torch.inf, posinf=HIGHEST_FLOAT, neginf=-torch.inf)
        return own


def is_plain(row: SampledRow) -> bool:
    """Whether the row's best raw logit is all that is wanted of it."""
    return row.sampling.is_greedy and row.mask is None and row.sampling.logprobs is None and not is_adjusted(row)


def best_tokens(logits: Tensor) -> IntArray:
    """[num_rows] the first of each row's equal maxima. logits: [num_rows, vocab], any float dtype and device; NaN counts as -inf.

    On the CPU a 16-bit float is compared by its bits: among positive ones a greater number has greater bits as an integer, and
    all negative ones are below. So a row whose best is above zero needs no conversion.
    """
    if logits.device.type != "cpu":
        return _best_of_floats(logits)
    if logits.dtype in (torch.bfloat16, torch.float16):
        bits = logits.view(torch.int16).numpy()
        tokens: IntArray = bits.argmax(axis=-1).astype(np.int64)
        best = np.take_along_axis(bits, tokens[:, None], axis=-1)[:, 0]
        infinity = torch.tensor(torch.inf, dtype=logits.dtype).view(torch.int16).item()
        odd = np.flatnonzero((best <= 0) | (best >= infinity))
    else:
        values = logits.float().numpy()
        tokens = values.argmax(axis=-1).astype(np.int64)
        odd = np.flatnonzero(~np.isfinite(np.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]))
    if len(odd):
        tokens[odd] = _best_of_floats(logits[torch.from_numpy(odd)])
    return tokens


def _best_of_floats(logits: Tensor) -> IntArray:
    """best_tokens of any values, on any device."""
    exact = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=HIGHEST_FLOAT, neginf=-torch.inf)
    if exact.device.type == "cpu":
        found: IntArray = exact.numpy().argmax(axis=-1).astype(np.int64)
        return found
    tokens: IntArray = exact.argmax(dim=-1).cpu().numpy()
    return tokens
