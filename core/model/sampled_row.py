"""One row of logits that a token is wanted for, with all that the choice depends on; and a request's tokens so far, counted.

sampler.py chooses, logit_adjustments.py changes the logits before, random_draw.py draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from core.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


class TokenCounts:
    """The distinct tokens of one request and how often each is in its output, kept up as the output grows.

    Counting a prompt of thousands of tokens again in each step would cost more than the step's sampling. Step thread only.
    """

    __slots__ = ("_counts", "_places", "_token_ids", "num_counted", "num_prompt_tokens")

    def __init__(self, num_prompt_tokens: int) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_counted = 0  # leading tokens that are in
        self._places: dict[int, int] = {}
        self._token_ids: IntArray = np.empty(64, dtype=np.int64)
        self._counts: npt.NDArray[np.float32] = np.zeros(64, dtype=np.float32)

    @property
    def token_ids(self) -> IntArray:
        """The distinct tokens of prompt and output; valid until the next advance."""
        return self._token_ids[: len(self._places)]

    @property
    def output_counts(self) -> npt.NDArray[np.float32]:
        """How often each of token_ids is in the output: 0 for those of the prompt alone. Valid until the next advance."""
        return self._counts[: len(self._places)]

    def advance(self, token_ids: IntArray) -> None:
        """Count what follows the tokens that are counted already. token_ids: all of the request's, never fewer than before."""
        assert len(token_ids) >= self.num_counted, f"{len(token_ids)} tokens, of which {self.num_counted} are counted"
        first, split = self.num_counted, max(self.num_counted, min(self.num_prompt_tokens, len(token_ids)))
        if first < split:
            self._add(np.unique(token_ids[first:split]).tolist(), 0.0)
        self._add(token_ids[split:].tolist(), 1.0)
        self.num_counted = len(token_ids)

    def _add(self, token_ids: Sequence[int], count: float) -> None:
        for token_id in token_ids:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._token_ids):
                self._token_ids = np.concatenate((self._token_ids, np.empty_like(self._token_ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._token_ids[place] = token_id
            self._counts[place] += count


@dataclass(frozen=True, slots=True)
class SampledRow:
    """One row to sample. token_ids: prompt and output so far, borrowed for the call; num_prompt_tokens of them are prompt.

    mask: which tokens its grammar allows, see GrammarMatcher.token_masks; None: all. counts: of exactly token_ids; None: they
    are counted when penalties ask for them.
    """

    sampling: SamplingParams
    token_ids: IntArray
    num_prompt_tokens: int
    mask: bytes | None = None
    counts: TokenCounts | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens that were sampled before this one, on whichever node."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def uniform(self) -> float:
        """The row's own random number, see `uniform`."""
        return uniform(self.sampling.seed, self.num_output_tokens)

    def counted(self) -> TokenCounts:
        """counts, or a count of token_ids made now."""
        if self.counts is not None:
            assert self.counts.num_counted == len(self.token_ids), "counts of other tokens"
            return self.counts
        counts = TokenCounts(self.num_prompt_tokens)
        counts.advance(self.token_ids)
        return counts


def uniform(seed: int | None, num_output_tokens: int) -> float:
    """A number in [0, 1) of 53 random bits, hashed from the request's seed (None: 0) and the token's place in its output."""
    digest = sha256(b"kvrelay sample 1|%d|%d" % (seed or 0, num_output_tokens)).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53
