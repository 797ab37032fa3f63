"""A language model for tests of beam search, and the search as one would write it with the model at hand: slow and plain."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

NextLogprobs = Callable[[tuple[int, ...]], list[tuple[int, float]]]


def tiny_language(seed: int, vocab_size: int) -> NextLogprobs:
    """Known tokens -> every token with its log-probability, the likeliest first."""

    def next_logprobs(known: tuple[int, ...]) -> list[tuple[int, float]]:
        source = random.Random(f"{seed} {len(known)} {known[-3:]}")
        weights = [source.expovariate(1.0) ** 3 + 1e-6 for _ in range(vocab_size)]
        total = sum(weights)
        pairs = [(token_id, math.log(weight / total)) for token_id, weight in enumerate(weights)]
        return sorted(pairs, key=lambda pair: -pair[1])

    return next_logprobs


def search_plainly(
    next_logprobs: NextLogprobs,
    prompt: Sequence[int],
    *,
    width: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    eos_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
) -> list[tuple[tuple[int, ...], float]]:
    """(output tokens, cumulative log-probability) of the best `width` sequences, as vLLM's beam search finds them: to the end."""

    def score(beam: tuple[tuple[int, ...], float]) -> float:
        num_tokens = len(beam[0]) - (beam[0][-1] in eos_token_ids)
        return beam[1] / max(1, num_tokens) ** length_penalty

    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    completed: list[tuple[tuple[int, ...], float]] = []
    for _ in range(max_tokens):
        going_on = []
        for token_ids, cumulative in running:
            for token_id, logprob in next_logprobs((*prompt, *token_ids))[: 2 * width]:
                beam = ((*token_ids, token_id), cumulative + logprob)
                (completed if token_id in eos_token_ids and not ignore_eos else going_on).append(beam)
        running = sorted(going_on, key=score, reverse=True)[:width]
    return sorted(completed + running, key=score, reverse=True)[:width]
