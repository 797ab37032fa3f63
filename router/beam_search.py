"""Beam search as plain decisions: which sequences go on, which have ended, which are the best. No I/O.

The algorithm is vLLM's: at every step each beam offers its 2 x width most likely next tokens; those that end a generation
complete a sequence, and of the others the best `width` go on. beam_generation.py asks nodes for the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from core.sampling_params import MAX_LOGPROBS
from core.step import TokenLogprob

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2  # a step needs 2 x width alternatives per beam, so that `width` remain when some end


@dataclass(frozen=True, slots=True)
class BeamOptions:
    """width: how many sequences go on at every step, and how many are returned. include_stop: their eos token, too."""

    width: int
    length_penalty: float
    ignore_eos: bool
    include_stop: bool

    @property
    def num_alternatives(self) -> int:
        """Log-probabilities that a step needs of each beam."""
        return 2 * self.width


@dataclass(frozen=True, slots=True)
class Beam:
    """One sequence. token_ids: output only, with the eos token that ended it; logprobs are parallel to them."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cumulative_logprob: float = 0.0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A beam and one token more; made into a Beam only if it is kept, because that copies it."""

    parent: Beam
    token_id: int
    entry: TokenLogprob
    logprob: float
    rank: int
    score: float

    def to_beam(self, *, is_stopped: bool) -> Beam:
        rank = self.entry.rank if self.token_id == self.entry.token_id else self.rank
        entry = replace(self.entry, token_id=self.token_id, logprob=self.logprob, rank=rank)
        return Beam(
            (*self.parent.token_ids, self.token_id),
            (*self.parent.logprobs, entry),
            self.parent.cumulative_logprob + self.logprob,
            is_stopped,
        )


class BeamSearch:
    """The search behind one prompt. `running` are the beams whose next tokens are wanted; empty once it is done."""

    def __init__(self, options: BeamOptions, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self.running: list[Beam] = [Beam()]
        self._options = options
        self._eos_token_ids = frozenset(eos_token_ids)
        self._max_tokens = max_tokens
        self._num_steps = 0
        self._completed: list[tuple[float, Beam]] = []  # the best `width` with their scores, best first
        self._last: list[Beam] = []  # beams that the end of max_tokens met

    def advance(self, next_tokens: Sequence[TokenLogprob]) -> None:
        """Take the log-probabilities of each running beam's next token, in the order of `running`."""
        options, eos_token_ids = self._options, self._eos_token_ids
        self._num_steps += 1
        going_on: list[_Candidate] = []
        ended: list[_Candidate] = []
        for parent, entry in zip(self.running, next_tokens, strict=True):
            for rank, (token_id, logprob) in enumerate(alternatives(entry, options.num_alternatives), 1):
                score = self._score(parent.cumulative_logprob + logprob, token_id)
                candidate = _Candidate(parent, token_id, entry, logprob, rank, score)
                (ended if token_id in eos_token_ids and not options.ignore_eos else going_on).append(candidate)
        for candidate in ended:
            self._completed.append((candidate.score, candidate.to_beam(is_stopped=True)))
        self._completed.sort(key=lambda scored: -scored[0])  # stable: of equal ones the earlier is better
        del self._completed[options.width :]
        going_on.sort(key=lambda candidate: -candidate.score)
        self.running = [candidate.to_beam(is_stopped=False) for candidate in going_on[: options.width]]
        if self._num_steps >= self._max_tokens:
            self._last, self.running = self.running, []
        elif self._is_decided():
            self.running = []

    def best(self) -> list[Beam]:
        """The `width` best sequences, best first, once nothing runs any more; fewer if the vocabulary has no more."""
        scored = [*self._completed, *((self._score(beam.cumulative_logprob, beam.token_ids[-1]), beam) for beam in self._last)]
        scored.sort(key=lambda pair: -pair[0])
        return [beam for _, beam in scored[: self._options.width]]

    def _score(self, cumulative_logprob: float, last_token_id: int) -> float:
        """Of a sequence of _num_steps tokens, as vLLM ranks: an eos token counts in probability, not in length."""
        num_tokens = max(1, self._num_steps - (last_token_id in self._eos_token_ids))
        return float(cumulative_logprob / num_tokens**self._options.length_penalty)

    def _is_decided(self) -> bool:
        """Whether no running beam can get ahead of the completed ones: probability only falls, so its best length is an end's."""
        if len(self._completed) < self._options.width:
            return False
        penalty = self._options.length_penalty
        divisor = max(self._num_steps**penalty, self._max_tokens**penalty)
        worst_score = self._completed[-1][0]
        return all(beam.cumulative_logprob / divisor <= worst_score for beam in self.running)


def alternatives(entry: TokenLogprob, num_alternatives: int) -> list[tuple[int, float]]:
    """The most likely next tokens; a sampled one that is not among them is one more, as in vLLM."""
    found = list(entry.top[:num_alternatives])
    if all(token_id != entry.token_id for token_id, _ in found):
        found.append((entry.token_id, entry.logprob))
    return found
