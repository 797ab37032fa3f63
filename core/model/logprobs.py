"""Log-probabilities of chosen tokens, their ranks, and the best alternatives, for sampled and for prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.step import TokenLogprob

LOGPROB_CHUNK_ROWS = 64  # bounds the logits that prompt log-probabilities need at a time
_ROWS_AT_A_TIME = 16  # whose float32 copy stays in the cache
_BLOCK = 64  # tokens whose maximum is taken together
Top = tuple[tuple[int, float], ...]


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprob]:
    """The log-probability of token_ids[i] under row i, its rank, and the num_tops[i] best tokens.

    logits: [len(token_ids), vocab] raw, any float dtype. Equal tokens share the better rank and are listed by id.
    """
    found: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _ROWS_AT_A_TIME):
        part = slice(start, start + _ROWS_AT_A_TIME)
        logprobs = torch.log_softmax(logits[part].float(), dim=-1)
        tokens = torch.tensor(token_ids[part], dtype=torch.int64)[:, None]
        chosen = logprobs.gather(1, tokens)
        values: list[float] = chosen.squeeze(1).tolist()
        ranks = _ranks(logprobs.numpy(), chosen.numpy())
        tops = _top_tokens(logprobs, num_tops[part])
        found += [
            TokenLogprob(token_id=int(token_id), logprob=value, rank=rank, top=top)
            for token_id, value, rank, top in zip(token_ids[part], values, ranks, tops, strict=True)
        ]
    return found


def _ranks(logprobs: npt.NDArray[np.float32], chosen: npt.NDArray[np.float32]) -> list[int]:
    return [int(np.count_nonzero(better)) + 1 for better in logprobs > chosen]  # by row: only then is it vectorized


def _top_tokens(logprobs: Tensor, num_tops: Sequence[int]) -> list[Top]:
    """Of each row the best, without those that a grammar forbids: then there are fewer than were asked for.

    At least as many tokens as are wanted reach the wanted-th best maximum of a block, and few more do: only those are sorted.
    """
    num_rows, vocab_size = logprobs.shape
    most = min(max(num_tops, default=0), vocab_size)
    if most == 0:
        return [()] * num_rows
    width = _BLOCK if vocab_size >= most * _BLOCK else 1
    whole = logprobs[:, : vocab_size // width * width]
    maxima = whole.reshape(num_rows, -1, width).amax(dim=-1).numpy()
    bounds = np.partition(maxima, maxima.shape[1] - most, axis=-1)[:, maxima.shape[1] - most, None]
    values = logprobs.numpy()
    flat = np.flatnonzero((values >= bounds) & (values > -np.inf))
    row_numbers, token_ids = np.divmod(flat, vocab_size)
    found = values.reshape(-1)[flat]
    order = np.lexsort((token_ids, -found, row_numbers))
    ids, best = token_ids[order].tolist(), found[order].tolist()
    ends = np.cumsum(np.bincount(row_numbers, minlength=num_rows)).tolist()
    tops: list[Top] = []
    for start, end, count in zip([0, *ends[:-1]], ends, num_tops, strict=True):
        last = min(start + count, end)
        tops.append(tuple(zip(ids[start:last], best[start:last], strict=True)))
    return tops
