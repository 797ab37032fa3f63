"""What changes logits before a token is chosen: grammar masks, bias, min_tokens and penalties, of all rows of a step at once.

Only masks touch a whole row. The rest are edits of a few tokens each, gathered over the batch into one list of places in the
flat logits. A row's edits are its own, in this order: mask, bias, forbidden ends, penalties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.model.sampled_row import IntArray, SampledRow

FloatArray = npt.NDArray[np.float32]
LOWEST_LOGIT = -1e30  # of a token that a grammar allows; stays finite under any temperature and penalty
HIGHEST_FLOAT = torch.finfo(torch.float32).max
# What each byte of a mask adds to eight logits: 0 or -inf. Four times as fast as unpacking the bits and filling by them.
_BIASES_BY_BYTE: FloatArray = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


def apply_token_masks(logits: Tensor, rows: Sequence[SampledRow]) -> None:
    """Make what the rows' grammars forbid impossible (-inf), and what they allow possible, whatever the model says, in place.

    logits: [len(rows), vocab] on the CPU, any float dtype. Sampling and log-probabilities both follow: a token without an
    alternative has probability 1.
    """
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    if not masked:
        return
    vocab_size = logits.shape[1]
    num_bytes = -(-vocab_size // 8)  # masks may be longer, each as it likes
    masks = np.frombuffer(b"".join((rows[i].mask or b"")[:num_bytes] for i in masked), dtype=np.uint8)
    biases = torch.from_numpy(_BIASES_BY_BYTE).to(logits.dtype)
    allowed = biases.index_select(0, torch.from_numpy(masks.astype(np.int64))).view(len(masked), -1)[:, :vocab_size]
    lowest = max(torch.finfo(logits.dtype).min, LOWEST_LOGIT)
    is_all = len(masked) == len(rows)
    chosen = logits if is_all else logits[masked]
    torch.nan_to_num_(chosen, nan=lowest).clamp_(lowest, -lowest).add_(allowed)
    if not is_all:
        logits[masked] = chosen


def is_adjusted(row: SampledRow) -> bool:
    """Whether adjust_logits has anything to do for the row."""
    sampling = row.sampling
    if sampling.logit_bias or sampling.has_penalties or row.num_output_tokens < sampling.min_tokens:
        return True
    return row.mask is not None and sampling.ignore_eos


def adjust_logits(logits: Tensor, rows: Sequence[SampledRow], row_numbers: Sequence[int], eos_token_ids: tuple[int, ...]) -> None:
    """Apply bias, min_tokens and penalties in place to rows row_numbers of float32 logits [len(rows), vocab], which are
    contiguous, on the CPU, and finite or -inf, as they are afterwards.
    """
    flat = logits.view(-1).numpy()
    vocab_size = logits.shape[1]
    _add_biases(flat, vocab_size, [(i, rows[i]) for i in row_numbers if rows[i].sampling.logit_bias])
    ends = [(i, ending) for i in row_numbers if (ending := _forbidden_ends(rows[i], eos_token_ids))]
    _forbid(logits, [pair for pair in ends if rows[pair[0]].mask is None])
    _postpone(logits, [pair for pair in ends if rows[pair[0]].mask is not None])
    _apply_penalties(flat, vocab_size, [(i, rows[i]) for i in row_numbers if rows[i].sampling.has_penalties])


def _add_biases(flat: FloatArray, vocab_size: int, biased: Sequence[tuple[int, SampledRow]]) -> None:
    if biased:
        biases = [row.sampling.logit_bias for _, row in biased]
        places = _places(vocab_size, [i for i, _ in biased], [np.fromiter(bias, np.int64, len(bias)) for bias in biases])
        flat[places] += np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for bias in biases])


def _forbidden_ends(row: SampledRow, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that would end the row's request too early."""
    sampling = row.sampling
    is_too_early = row.num_output_tokens < sampling.min_tokens
    if row.mask is not None:
        ending = eos_token_ids if is_too_early or sampling.ignore_eos else ()
    else:
        ending = eos_token_ids if is_too_early and not sampling.ignore_eos else ()
    return (sampling.stop_token_ids if is_too_early else ()) + ending


def _forbid(logits: Tensor, ends: Sequence[tuple[int, tuple[int, ...]]]) -> None:
    if ends:
        places = _places(logits.shape[1], [i for i, _ in ends], [np.array(ending, dtype=np.int64) for _, ending in ends])
        logits.view(-1).numpy()[places] = -np.inf


def _postpone(logits: Tensor, ends: Sequence[tuple[int, tuple[int, ...]]]) -> None:
    """As _forbid, for rows with a grammar: only while it can go on. Where nothing else may follow, the request ends."""
    if ends:
        numbers = [i for i, _ in ends]
        kept = logits[numbers]
        _forbid(logits, ends)
        is_stuck = logits[numbers].amax(dim=-1) == -torch.inf
        logits[torch.tensor(numbers)[is_stuck]] = kept[is_stuck]


def _apply_penalties(flat: FloatArray, vocab_size: int, penalized: Sequence[tuple[int, SampledRow]]) -> None:
    """Repetition penalty over prompt and output, frequency and presence over output."""
    if not penalized:
        return
    counts = [row.counted() for _, row in penalized]
    places = _places(vocab_size, [i for i, _ in penalized], [count.token_ids for count in counts])
    lengths = [len(count.token_ids) for count in counts]
    sampling = [row.sampling for _, row in penalized]
    parameters = np.array([(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for s in sampling], dtype=np.float32)
    repetition, frequency, presence = np.repeat(parameters, lengths, axis=0).T
    num_seen = np.concatenate([count.output_counts for count in counts])
    values = flat[places]
    # An extreme penalty makes infinities and NaN, and a NaN would choose a token that does not exist.
    with np.errstate(all="ignore"):
        values = np.where(values > 0, values / repetition, values * repetition)
        values -= frequency * num_seen + np.where(num_seen > 0, presence, np.float32(0.0))
    flat[places] = np.nan_to_num(values, copy=False, nan=-np.inf, posinf=HIGHEST_FLOAT, neginf=-np.inf)


def _places(vocab_size: int, row_numbers: Sequence[int], token_ids: Sequence[IntArray]) -> IntArray:
    """Where the rows' tokens are in the flat logits; what is added to needs each place once."""
    starts = np.repeat(np.array(row_numbers, dtype=np.int64) * vocab_size, [len(ids) for ids in token_ids])
    places: IntArray = starts + np.concatenate(token_ids)
    return places
