"""Chooses each sampled row's next token from its logits, and reports log-probabilities.

A row's choice depends on the row alone: its logits, its parameters, its tokens so far, and one number hashed from
(seed, number of output tokens). So a request goes on identically in any batch, on any node, after any restart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.sampling_params import SamplingParams
from core.step import TokenLogprob

TOP_P_CANDIDATES = 1024  # top_p looks among this many best tokens first, and sorts all only if they do not suffice
LOWEST_LOGIT = -1e30  # of a token that a grammar allows; stays finite under any temperature and penalty
# What each byte of a mask adds to eight logits: 0 or -inf. Four times as fast as unpacking the bits and filling by them.
_BIASES_BY_BYTE: npt.NDArray[np.float32] = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
LOGPROB_CHUNK_ROWS = 64  # bounds the float32 copy of [rows, vocab] that prompt log-probabilities need


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row to sample. token_ids: prompt and output so far, borrowed for the call; num_prompt_tokens of them are prompt.

    mask: which tokens its grammar allows, see GrammarMatcher.token_masks; None: all.
    """

    sampling: SamplingParams
    token_ids: npt.NDArray[np.int64]
    num_prompt_tokens: int
    mask: bytes | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were sampled before this one, on whichever node."""
        return len(self.token_ids) - self.num_prompt_tokens


class Sampler:
    """Stateless apart from the model's eos tokens, which min_tokens forbids."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
        """One token id per row. logits: [len(rows), vocab], any float dtype, left unchanged.

        Rows whose every token is forbidden, or whose logits are all NaN, get token 0 rather than an error.
        """
        adjusted = [i for i, row in enumerate(rows) if self._is_adjusted(row)]
        random = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
        if adjusted or random:
            logits = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
            for i in adjusted:
                self._adjust(logits[i], rows[i])
        tokens = logits.argmax(dim=-1)  # the first of equal maxima
        if random:
            index = torch.tensor(random)
            tokens[index] = sample_random(logits[index], [rows[i] for i in random])
        return [int(token) for token in tokens.tolist()]

    def _is_adjusted(self, row: SampledRow) -> bool:
        sampling = row.sampling
        if sampling.logit_bias or sampling.has_penalties or row.num_output_tokens < sampling.min_tokens:
            return True
        return row.mask is not None and sampling.ignore_eos

    def _adjust(self, logits: Tensor, row: SampledRow) -> None:
        """Apply bias, min_tokens and penalties to one row of float32 logits [vocab], in place."""
        sampling = row.sampling
        if sampling.logit_bias:
            token_ids = torch.tensor(list(sampling.logit_bias), dtype=torch.int64)
            logits[token_ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        if row.mask is not None:
            self._postpone_end(logits, row)
        elif row.num_output_tokens < sampling.min_tokens:
            ending = sampling.stop_token_ids + (() if sampling.ignore_eos else self._eos_token_ids)
            logits[torch.tensor(ending, dtype=torch.int64)] = -torch.inf
        if sampling.has_penalties:
            apply_penalties(logits, row)
            # An extreme penalty makes infinities and NaN, and a NaN would choose a token that does not exist.
            torch.nan_to_num_(logits, nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)

    def _postpone_end(self, logits: Tensor, row: SampledRow) -> None:
        """min_tokens and ignore_eos hold only while the grammar can go on: where nothing else may follow, it ends."""
        sampling = row.sampling
        is_too_early = row.num_output_tokens < sampling.min_tokens
        ending = (sampling.stop_token_ids if is_too_early else ()) + (
            self._eos_token_ids if is_too_early or sampling.ignore_eos else ()
        )
        token_ids = torch.tensor(ending, dtype=torch.int64)
        kept = logits[token_ids]
        logits[token_ids] = -torch.inf
        if logits.max() == -torch.inf:
            logits[token_ids] = kept


def apply_token_masks(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Make what the rows' grammars forbid impossible (-inf), and what they allow possible, whatever the model says, in place.

    logits: [len(rows), vocab], any float dtype. Sampling and log-probabilities both follow: a token without an alternative has
    probability 1.
    """
    vocab_size = logits.shape[1]
    lowest = max(torch.finfo(logits.dtype).min, LOWEST_LOGIT)
    for i, row in enumerate(rows):
        if row.mask is not None:
            biases = _BIASES_BY_BYTE.take(np.frombuffer(row.mask, dtype=np.uint8), axis=0)
            allowed = torch.from_numpy(biases.reshape(-1)[:vocab_size])
            torch.nan_to_num_(logits[i], nan=lowest).clamp_(lowest, -lowest).add_(allowed)


def apply_penalties(logits: Tensor, row: SampledRow) -> None:
    """Repetition penalty over prompt and output, frequency and presence over output, on [vocab] float32 logits, in place."""
    sampling = row.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.token_ids))
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    output_ids, counts = np.unique(row.token_ids[row.num_prompt_tokens :], return_counts=True)
    if len(output_ids) and (sampling.frequency_penalty or sampling.presence_penalty):
        penalty = sampling.frequency_penalty * torch.from_numpy(counts).float() + sampling.presence_penalty
        logits[torch.from_numpy(output_ids)] -= penalty


def sample_random(logits: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """[len(rows)] int64 tokens drawn by inverse transform sampling: the first token whose cumulated probability passes u.

    logits: [len(rows), vocab] float32, finite or -inf, overwritten. Filters keep what is above a threshold, so that tokens
    of equal logits are kept or dropped together.
    """
    temperatures = torch.tensor([row.sampling.temperature for row in rows], dtype=torch.float32)
    logits.div_(temperatures[:, None]).clamp_(max=torch.finfo(torch.float32).max)
    # A row of -inf only has no distribution; with any finite maximum its first token wins.
    best = logits.amax(dim=-1, keepdim=True)
    logits.sub_(torch.where(best == -torch.inf, 0.0, best))
    _filter_min_p(logits, rows)
    _filter_top_k(logits, rows)
    _filter_top_p(logits, rows)
    cumulated = logits.exp_().cumsum(dim=-1, dtype=torch.float64)
    total = cumulated[:, -1:].contiguous()
    uniforms = torch.tensor([uniform(row.sampling.seed, row.num_output_tokens) for row in rows], dtype=torch.float64)
    tokens = torch.searchsorted(cumulated, uniforms[:, None] * total, right=True)
    last_possible = torch.searchsorted(cumulated, total)  # u * total may round up to total
    return torch.minimum(tokens, last_possible).squeeze(1)


def uniform(seed: int | None, num_output_tokens: int) -> float:
    """A number in [0, 1) of 53 random bits, hashed from the request's seed (None: 0) and the token's place in its output."""
    digest = sha256(b"kvrelay sample 1|%d|%d" % (seed or 0, num_output_tokens)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53


def _filter_min_p(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Drop tokens less likely than min_p times the likeliest. The likeliest has logit 0 here, and 0 is never below log(min_p)."""
    if any(row.sampling.min_p > 0 for row in rows):
        thresholds = [math.log(row.sampling.min_p) if row.sampling.min_p > 0 else -math.inf for row in rows]
        logits.masked_fill_(logits < torch.tensor(thresholds, dtype=torch.float32)[:, None], -torch.inf)


def _filter_top_k(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    vocab_size = logits.shape[1]
    limited = [i for i, row in enumerate(rows) if 0 < row.sampling.top_k < vocab_size]
    if limited:
        counts = torch.tensor([rows[i].sampling.top_k for i in limited])
        best = torch.topk(logits[limited], int(counts.max()), dim=-1).values
        _drop_below(logits, limited, best.gather(1, counts[:, None] - 1))


def _filter_top_p(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Keep the smallest set of best tokens whose probabilities reach top_p, and whatever equals the last of them."""
    limited = [i for i, row in enumerate(rows) if row.sampling.top_p < 1.0]
    if not limited:
        return
    totals = logits[limited].exp_().sum(dim=-1, dtype=torch.float64)
    targets = totals * torch.tensor([rows[i].sampling.top_p for i in limited], dtype=torch.float64)
    num_candidates = min(TOP_P_CANDIDATES, logits.shape[1])
    best = torch.topk(logits[limited], num_candidates, dim=-1).values
    reached = best.exp().cumsum(dim=-1, dtype=torch.float64)
    is_enough = reached[:, -1] >= targets
    enough = [j for j, done in enumerate(is_enough.tolist()) if done]
    if enough:
        last = torch.searchsorted(reached[enough], targets[enough][:, None])
        _drop_below(logits, [limited[j] for j in enough], best[enough].gather(1, last))
    for j in range(len(limited)):
        if not is_enough[j]:
            ordered = logits[limited[j]].sort(descending=True).values
            last = torch.searchsorted(ordered.exp().cumsum(dim=-1, dtype=torch.float64), targets[j : j + 1])
            _drop_below(logits, [limited[j]], ordered[last.clamp_(max=logits.shape[1] - 1)][:, None])


def _drop_below(logits: Tensor, rows: list[int], thresholds: Tensor) -> None:
    """Set logits of `rows` that are below the row's threshold ([len(rows), 1]) to -inf."""
    chosen = logits[rows]
    logits[rows] = chosen.masked_fill_(chosen < thresholds, -torch.inf)


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of token_ids[i] under row i, its rank, and the num_tops[i] best tokens.

    logits: [len(token_ids), vocab] raw, any float dtype. Equal tokens share the better rank and are listed by id.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), LOGPROB_CHUNK_ROWS):
        part = slice(start, start + LOGPROB_CHUNK_ROWS)
        logprobs = torch.log_softmax(logits[part].float(), dim=-1)
        tokens = torch.tensor(token_ids[part], dtype=torch.int64)[:, None]
        chosen = logprobs.gather(1, tokens)
        ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
        values: list[float] = chosen.squeeze(1).tolist()
        tops = _top_tokens(logprobs, num_tops[part])
        found += [
            TokenLogprob(token_id=int(token_id), logprob=value, rank=rank, top=top)
            for token_id, value, rank, top in zip(token_ids[part], values, ranks, tops, strict=True)
        ]
    return found


def _top_tokens(logprobs: Tensor, num_tops: Sequence[int]) -> list[tuple[tuple[int, float], ...]]:
    most = max(num_tops, default=0)
    if most == 0:
        return [()] * len(num_tops)
    # Row by row the same for any `most`: topk leaves open which of equal tokens come first, so ties are ordered by id afterwards.
    best = torch.topk(logprobs, most, dim=-1)
    found = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    # What a grammar forbids is no alternative: then there are fewer than were asked for.
    pairs = ([pair for pair in zip(ids, values, strict=True) if pair[1] > -math.inf] for ids, values in found)
    return [tuple(sorted(row, key=lambda pair: (-pair[1], pair[0]))[:count]) for row, count in zip(pairs, num_tops, strict=True)]
