"""The sampler as its definition reads: one row at a time, by a full sort, every count made anew. The oracle of the real
one, and what `bench.sampling` compares with.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from core.model.sampled_row import SampledRow, uniform

HIGHEST = torch.finfo(torch.float32).max


def sample_plainly(logits: Tensor, rows: Sequence[SampledRow], eos_token_ids: Sequence[int]) -> list[int]:
    """One token per row; logits: [len(rows), vocab], masked already where rows have grammars."""
    return [_sample_row(logits[i].float(), row, list(eos_token_ids)) for i, row in enumerate(rows)]


def adjusted_plainly(logits: Tensor, row: SampledRow, eos_token_ids: list[int]) -> Tensor:
    """A copy of one row of float32 logits [vocab] after bias, forbidden ends and penalties."""
    sampling, output = row.sampling, row.token_ids[row.num_prompt_tokens :].tolist()
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=HIGHEST, neginf=-torch.inf)
    for token_id, bias in sampling.logit_bias.items():
        logits[token_id] += bias
    is_early = len(output) < sampling.min_tokens
    ends = list(sampling.stop_token_ids) if is_early else []
    if row.mask is None:
        ends += eos_token_ids if is_early and not sampling.ignore_eos else []
    else:
        ends += eos_token_ids if is_early or sampling.ignore_eos else []
    without_ends = logits.clone()
    without_ends[ends] = -torch.inf
    if row.mask is None or without_ends.max() > -torch.inf:
        logits = without_ends
    if sampling.has_penalties:
        for token_id in set(row.token_ids.tolist()):
            value = logits[token_id]
            logits[token_id] = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        for token_id, count in Counter(output).items():
            logits[token_id] -= torch.tensor(float(count)) * sampling.frequency_penalty + sampling.presence_penalty
        logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=HIGHEST, neginf=-torch.inf)
    return logits


def _sample_row(logits: Tensor, row: SampledRow, eos_token_ids: list[int]) -> int:
    sampling = row.sampling
    logits = adjusted_plainly(logits, row, eos_token_ids)
    if sampling.is_greedy:
        return int(logits.argmax())
    logits = (logits / sampling.temperature).clamp(max=HIGHEST)
    if logits.max() == -torch.inf:
        return 0
    logits -= logits.max().clone()
    if sampling.min_p > 0:
        logits[logits < math.log(sampling.min_p)] = -torch.inf
    if 0 < sampling.top_k < len(logits):
        logits[logits < logits.sort(descending=True).values[sampling.top_k - 1]] = -torch.inf
    if sampling.top_p < 1.0:
        ordered = logits.sort(descending=True).values
        reached = ordered.exp().double().cumsum(0)
        last = int(torch.searchsorted(reached, reached[-1] * sampling.top_p))
        logits[logits < ordered[last]] = -torch.inf
    cumulated = logits.exp().double().cumsum(0).numpy()
    target = uniform(sampling.seed, row.num_output_tokens) * cumulated[-1]
    return int(min(np.searchsorted(cumulated, target, side="right"), np.searchsorted(cumulated, cumulated[-1])))
