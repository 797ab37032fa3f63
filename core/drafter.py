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
from core.request import Request
from core.stats import EngineStats

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


class DraftedRequests:
    """What the scheduler does with a drafter's guesses: they count as tokens to compute until a step has verified them."""

    def __init__(self, drafter: Drafter, stats: EngineStats, max_running: int) -> None:
        """max_running: with more requests in a batch nothing is drafted."""
        self._max_running = max_running
        self._drafter = drafter
        self._stats = stats

    def propose(self, request: Request, num_running: int) -> None:
        """Let the next step verify what the drafter guesses.

        All but one of the tokens that are left: a step brings one more than it had drafts.
        """
        if num_running > self._max_running:
            return
        num_left = request.max_total_tokens - len(request.token_ids) - 1
        request.draft_token_ids = self._drafter.propose(request.request_id, request.token_ids, num_left)
        request.num_tokens_with_spec += len(request.draft_token_ids)

    @staticmethod
    def drop(request: Request) -> None:
        """Forget guesses that no step has been given."""
        request.num_tokens_with_spec -= len(request.draft_token_ids)
        request.draft_token_ids = []

    def roll_back(self, request: Request, drafts: list[int], num_kept: int) -> None:
        """num_kept of the tokens that a step with drafts sampled were appended: behind them, what was computed is void."""
        request.num_written_tokens = request.num_computed_tokens = len(request.token_ids) - 1
        request.draft_token_ids = []
        stats = self._stats
        stats.num_drafts += 1
        stats.num_draft_tokens += len(drafts)
        for position in range(min(num_kept - 1, len(drafts))):
            stats.accepted_by_position[str(position)] = stats.accepted_by_position.get(str(position), 0) + 1

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._drafter.forget(request.request_id)


def create_drafter(options: EngineOptions) -> Drafter | None:
    """What the options name; None where nothing is to be drafted."""
    if options.num_speculative_tokens == 0:
        return None
    return NgramDrafter(options.num_speculative_tokens, options.prompt_lookup_max, options.prompt_lookup_min)
