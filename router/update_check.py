"""What a node may not tell of a request: an update that cannot be true is the node's fault, and is not delivered."""

from __future__ import annotations

from core.wire.messages import RequestUpdate


def update_problem(update: RequestUpdate, vocab_size: int, num_known_tokens: int) -> str:
    """What cannot be true of an update, in words; empty when there is nothing. num_known_tokens: prompt and output so far."""
    if any(not 0 <= token_id < vocab_size for token_id in update.token_ids):
        return f"a token id outside the vocabulary of {vocab_size}"
    if update.logprobs is not None and [entry.token_id for entry in update.logprobs] != list(update.token_ids):
        return "log-probabilities of other tokens than its own"
    for entries in (update.logprobs, update.prompt_logprobs):
        for entry in entries or ():
            if not all(0 <= token_id < vocab_size for token_id in (entry.token_id, *(top_id for top_id, _ in entry.top))):
                return f"a log-probability of a token outside the vocabulary of {vocab_size}"
    if update.first_index < 0:
        return f"first_index {update.first_index}"
    if not 0 <= update.num_cached_tokens <= num_known_tokens:
        return f"num_cached_tokens {update.num_cached_tokens} of {num_known_tokens}"
    return ""
