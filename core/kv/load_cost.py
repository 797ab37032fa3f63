"""Is loading KV worth it? Predicted time of a load against predicted time of computing the same tokens, both learned online.

Plain arithmetic over plain state; the caller brings times and sizes. Called from the step thread only.
"""

from __future__ import annotations

_DECAY = 0.9  # weight of the past at each observation: about the last ten count
_PROBE_EVERY = 16  # loads judged too slow are tried this often, so that a store that became fast again is noticed


class LinearCost:
    """seconds = intercept + slope * size, by exponentially weighted least squares, both kept at 0 or above.

    As long as all sizes seen are alike, is_proportional says what is assumed of others: that time grows with size (computing),
    or that it is mostly latency (loading), which errs towards trying, and so towards learning.
    """

    def __init__(self, *, is_proportional: bool) -> None:
        self._is_proportional = is_proportional
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, size: float, seconds: float) -> None:
        """Learn that `size` units took `seconds`."""
        self._weight = self._weight * _DECAY + 1.0
        self._x = self._x * _DECAY + size
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + size * size
        self._xy = self._xy * _DECAY + size * seconds

    def predict_s(self, size: float) -> float | None:
        """Seconds for `size` units; None before the first observation."""
        if self._weight == 0.0:
            return None
        mean_s = self._y / self._weight
        spread = self._weight * self._xx - self._x * self._x
        if spread > 1e-9 * self._xx * self._weight:
            slope = max(0.0, (self._weight * self._xy - self._x * self._y) / spread)
            intercept = mean_s - slope * self._x / self._weight
            if intercept < 0.0:  # the line through the origin that fits best
                slope, intercept = self._xy / self._xx, 0.0
            return intercept + slope * size
        return self._y / self._x * size if self._is_proportional and self._x else mean_s


class LoadOrRecompute:
    """Chooses, for tokens that a store can supply, between loading and computing."""

    def __init__(self) -> None:
        self._load = LinearCost(is_proportional=False)
        self._recompute = LinearCost(is_proportional=True)
        self._num_declined = 0

    def observe_load(self, num_bytes: int, seconds: float) -> None:
        """A load of num_bytes took `seconds`."""
        self._load.observe(num_bytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that computed num_tokens prompt tokens took `seconds`."""
        self._recompute.observe(num_tokens, seconds)

    def recompute_s(self, num_tokens: int) -> float | None:
        """Predicted seconds of computing num_tokens prompt tokens; None before the first observation."""
        return self._recompute.predict_s(num_tokens)

    def should_load(self, num_tokens: int, num_bytes: int, num_bytes_ahead: int) -> tuple[bool, str]:
        """Whether to load, and the reason in a word: unmeasured, faster, probe or slower.

        num_bytes_ahead: already queued at the store by other loads.
        """
        load_s = self._load.predict_s(num_bytes + num_bytes_ahead)
        recompute_s = self._recompute.predict_s(num_tokens)
        if load_s is None or recompute_s is None:
            return True, "unmeasured"
        if load_s <= recompute_s:
            return True, "faster"
        self._num_declined += 1
        if self._num_declined % _PROBE_EVERY == 0:
            return True, "probe"
        return False, "slower"
