"""Who guesses what a request says next, so that one step can verify several tokens. A guess costs time when wrong, never a token.

Drafts are single guesses without a probability. A step samples every position from the model's own distribution, with the
position's own random number, and keeps the tokens up to the first that differs from its draft. A draft d is then accepted with
probability p(d), and what comes in its place has the distribution p without d, renormalized: rejection sampling (Leviathan et
al., 2023, arXiv:2211.17192) for a draft distribution with all its mass on d. The tokens are those that come without drafts, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from core.config import EngineOptions

_TOKEN_BYTES = 4


class Drafter(Protocol):
    """Step thread only."""

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """At most max_tokens tokens that may follow token_ids; a new list. token_ids only grow while the request lives."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended. Unknown ones are ignored."""
        ...


class NgramDrafter:
    """Prompt lookup: what followed the last time that the last few tokens were there.

    Looks for the longest of max_ngram to min_ngram last tokens that occurred before, and among its places for the latest.
    """

    def __init__(self, num_tokens: int, max_ngram: int, min_ngram: int) -> None:
        self._num_tokens = num_tokens
        self._ngram_lengths = range(max_ngram, min_ngram - 1, -1)
        self._packed: dict[str, bytearray] = {}  # token ids of a request, as int32

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """See Drafter."""
        packed = self._packed.setdefault(request_id, bytearray())
        packed += array("i", token_ids[len(packed) // _TOKEN_BYTES :]).tobytes()
        num_wanted = min(self._num_tokens, max_tokens)
        for length in self._ngram_lengths if num_wanted > 0 else ():
            follower = _end_of_last(packed, length * _TOKEN_BYTES)
            if follower:
                return list(token_ids[follower : follower + num_wanted])
        return []

    def forget(self, request_id: str) -> None:
        """See Drafter."""
        self._packed.pop(request_id, None)


def _end_of_last(packed: bytearray, num_bytes: int) -> int:
    """The token after the last earlier occurrence of the last num_bytes of `packed`; 0: there is none."""
    ngram = packed[-num_bytes:]
    end = len(packed) - 1  # not the n-gram itself, though it may overlap it
    while len(ngram) == num_bytes and (place := packed.rfind(ngram, 0, end)) >= 0:
        if place % _TOKEN_BYTES == 0:
            return (place + num_bytes) // _TOKEN_BYTES
        end = place + num_bytes - 1
    return 0


def create_drafter(options: EngineOptions) -> Drafter | None:
    """What the options name; None where nothing is to be drafted."""
    if options.num_speculative_tokens == 0:
        return None
    return NgramDrafter(options.num_speculative_tokens, options.prompt_lookup_max, options.prompt_lookup_min)
