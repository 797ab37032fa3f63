"""Small made-up traces for tests of the replay."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

from bench.router.trace import BLOCK_TOKENS, TraceRequest, parse_trace


def line(timestamp: float, hash_ids: Iterable[int], last_tokens: int = BLOCK_TOKENS, output_length: int = 20) -> str:
    """One line of a trace, whose last block has last_tokens tokens."""
    ids = list(hash_ids)
    num_tokens = (len(ids) - 1) * BLOCK_TOKENS + last_tokens
    return json.dumps({"timestamp": timestamp, "input_length": num_tokens, "output_length": output_length, "hash_ids": ids})


def conversations(seed: int, num_conversations: int = 30, num_turns: int = 4, gap_ms: float = 400.0) -> list[TraceRequest]:
    """Conversations whose turns come mixed, each turn's prompt standing on the one before it; all begin with block 0."""
    rng = random.Random(seed)
    fresh = iter(range(1, 10**6))
    history: list[list[int]] = [[0] for _ in range(num_conversations)]
    turns = [place for place in range(num_conversations) for _ in range(num_turns)]
    rng.shuffle(turns)
    lines = []
    for number, place in enumerate(turns):
        history[place] += [next(fresh) for _ in range(rng.randint(1, 12))]
        partial = [*history[place], next(fresh)]
        lines.append(line(number * gap_ms, partial, rng.randint(1, BLOCK_TOKENS - 1), rng.randint(1, 60)))
    return parse_trace(lines)
