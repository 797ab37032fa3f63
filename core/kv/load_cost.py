"""Is loading KV worth it? Predicted time of a load against predicted time of computing the same tokens, both learned online.

Plain arithmetic over plain state; the caller brings times and sizes. Called from the step thread only.

    load      = latency + bytes / bandwidth
    computing = overhead of a step + tokens * (what a token costs, and what it costs to attend to those before it)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

_LOAD_DECAY = 0.9  # weight of the past at each observation: about the last ten loads count
_RECOMPUTE_DECAY = 0.95  # steps are many, and what they cost hardly changes
_DECODE_DECAY = 0.95
_SMALL_LOAD_BYTES = 1 << 20  # below, a load is mostly latency
_SMALL_STEP_TOKENS = 64  # below, a step is mostly overhead
_SAME = 1.0 + 1e-9  # errors of fits that differ by rounding
_SINGULAR = 1e-6
_PROBE_EVERY = 16  # loads judged too slow are tried this often, so that a store that became fast again is noticed


class LinearCost:
    """seconds = the sum of terms, each times a rate that is learned: least squares, exponentially weighted, no rate below 0.

    The terms' order matters where they cannot be told apart, as long as all sizes seen are alike: the first explains all it can.
    """

    def __init__(self, num_terms: int, decay: float) -> None:
        self._num_terms = num_terms
        self._decay = decay
        self._products = [[0.0] * num_terms for _ in range(num_terms)]  # weighted sums of term * term
        self._moments = [0.0] * num_terms  # of term * seconds
        self._rates: list[float] | None = None  # None: to be solved for

    def observe(self, terms: Sequence[float], seconds: float, weight: float) -> None:
        """Learn that this took `seconds`. weight: how much an error in seconds matters, squared."""
        for row, term in enumerate(terms):
            self._moments[row] = self._moments[row] * self._decay + weight * term * seconds
            for column, other in enumerate(terms):
                self._products[row][column] = self._products[row][column] * self._decay + weight * term * other
        self._rates = None

    def predict_s(self, terms: Sequence[float]) -> float | None:
        """Seconds for this; None before the first observation."""
        if not any(self._moments):
            return None
        return sum(term * rate for term, rate in zip(terms, self.rates(), strict=True))

    def rates(self) -> list[float]:
        """What each term costs, in the terms' order; all 0 before the first observation."""
        if self._rates is None:
            self._rates = self._solve()
        return self._rates

    def _solve(self) -> list[float]:
        """The best rates: every choice of terms is tried whose rates come out at 0 or above, simple ones first."""
        best, best_gain = [0.0] * self._num_terms, 0.0
        for size in range(1, self._num_terms + 1):
            for chosen in itertools.combinations(range(self._num_terms), size):
                found = _solve_linear(
                    [[self._products[row][column] for column in chosen] for row in chosen], [self._moments[row] for row in chosen]
                )
                if found is None or min(found) < 0.0:
                    continue
                gain = sum(rate * self._moments[row] for rate, row in zip(found, chosen, strict=True))  # squared error explained
                if gain > best_gain * _SAME:
                    best_gain, best = gain, [0.0] * self._num_terms
                    for rate, row in zip(found, chosen, strict=True):
                        best[row] = rate
        return best


def _solve_linear(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination of a symmetric matrix without negative eigenvalues; None where it is as good as singular. Uses its
    arguments up."""
    size = len(right)
    diagonal = [matrix[row][row] for row in range(size)]
    for pivot in range(size):
        if matrix[pivot][pivot] <= _SINGULAR * diagonal[pivot]:
            return None
        for row in range(pivot + 1, size):
            factor = matrix[row][pivot] / matrix[pivot][pivot]
            right[row] -= factor * right[pivot]
            for column in range(pivot, size):
                matrix[row][column] -= factor * matrix[pivot][column]
    for pivot in reversed(range(size)):
        known = sum(matrix[pivot][column] * right[column] for column in range(pivot + 1, size))
        right[pivot] = (right[pivot] - known) / matrix[pivot][pivot]
    return right


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """What computing and loading cost here, learned so far; 0 where nothing was measured. attended: see observe_prefill."""

    prefill_overhead_s: float
    prefill_s_per_token: float
    prefill_s_per_attended: float
    load_latency_s: float
    load_s_per_byte: float
    decode_step_s: float


class LoadOrRecompute:
    """Chooses, for tokens that a store can supply, between loading and computing."""

    def __init__(self) -> None:
        self._load = LinearCost(2, _LOAD_DECAY)  # latency first: errs towards trying larger loads, and so towards learning
        self._recompute = LinearCost(3, _RECOMPUTE_DECAY)
        self._num_declined = 0
        self._decode_step_s = 0.0

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        """A load took `seconds`. num_bytes: its own, and those that were queued ahead of it."""
        self._load.observe((1.0, num_bytes), seconds, 1.0 / (num_bytes + _SMALL_LOAD_BYTES) ** 2)

    def observe_prefill(self, num_tokens: int, num_attended: float, seconds: float) -> None:
        """A step that computed num_tokens tokens, mostly of prompts, took `seconds`. num_attended: the sum of their positions."""
        terms = (float(num_tokens), 1.0, num_attended)
        self._recompute.observe(terms, seconds, 1.0 / (num_tokens + _SMALL_STEP_TOKENS) ** 2)

    def observe_decode(self, seconds: float) -> None:
        """A step that only decoded took `seconds`."""
        past = self._decode_step_s or seconds
        self._decode_step_s = _DECODE_DECAY * past + (1.0 - _DECODE_DECAY) * seconds

    def measured(self) -> MeasuredCosts:
        """What was learned so far."""
        per_token_s, overhead_s, per_attended_s = self._recompute.rates()
        latency_s, per_byte_s = self._load.rates()
        return MeasuredCosts(overhead_s, per_token_s, per_attended_s, latency_s, per_byte_s, self._decode_step_s)

    def predict_recompute_s(self, num_tokens: int, first_position: int) -> float | None:
        """What these tokens add to a step, or to several; None before the first observation."""
        return self._recompute.predict_s((float(num_tokens), 0.0, num_tokens * (first_position + num_tokens / 2)))

    def should_load(self, num_tokens: int, first_position: int, num_bytes: int, num_bytes_ahead: int) -> tuple[bool, str]:
        """Whether to load, and the reason in a word: unmeasured, faster, probe or slower.

        num_tokens from first_position on; what follows them is computed in any case, so a step's overhead is no difference.
        num_bytes_ahead: already queued at the store by other loads.
        """
        load_s = self._load.predict_s((1.0, num_bytes + num_bytes_ahead))
        recompute_s = self.predict_recompute_s(num_tokens, first_position)
        if load_s is None or recompute_s is None:
            return True, "unmeasured"
        if load_s <= recompute_s:
            return True, "faster"
        self._num_declined += 1
        if self._num_declined % _PROBE_EVERY == 0:
            return True, "probe"
        return False, "slower"
