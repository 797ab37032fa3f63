"""When the uses were that an index counts: a few pairs of a count and a time, in the header of its file.

Records only count uses, which is what eviction goes by. People ask for ages: `kvrelay cache` gets them here. Pairs lie the
further apart the older they are, so that a month takes as little room as an hour. All of it are hints: damage makes ages
wrong, and nothing else.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from connectors.slots.index_file import USE_TIMES, IndexFile

_MAX_PAIRS = len(USE_TIMES) // 2
_INTERVAL_S = 10  # between two pairs, at least
_SPACING = 8  # a pair is needed where without it two others would be further apart than this part of their age
_MAX_TIME_S = 2**40


class UseTimes:
    """Of one index file. note() is called under the file's lock."""

    def __init__(self, file: IndexFile) -> None:
        self._words = file.header[USE_TIMES.start : USE_TIMES.stop].reshape(-1, 2)
        self._noted_s = 0

    def note(self, tick_before: int, tick: int) -> None:
        """The count of uses went from tick_before to tick just now. Cheap where the last pair is young."""
        now_s = int(time.time())
        if now_s == self._noted_s:
            return
        self._noted_s = now_s
        num_pairs = int(np.argmin(self._words[:, 1])) if self._words[-1, 1] == 0 else _MAX_PAIRS
        last_tick, last_s = (int(word) for word in self._words[num_pairs - 1]) if num_pairs else (-1, 0)
        if tick == last_tick or (last_s <= now_s < last_s + _INTERVAL_S and last_tick <= tick):
            return
        pairs = [(at, when) for at, when in self._words[:num_pairs].tolist() if at <= tick_before and when <= now_s]
        if pairs and pairs[-1][0] < tick_before:  # had these uses been later, there would be a pair of them
            pairs.append((tick_before, min(now_s, pairs[-1][1] + _INTERVAL_S)))
        pairs.append((tick, now_s))
        kept = _thinned(pairs, now_s)
        self._words[: len(kept)] = kept
        self._words[len(kept) :] = 0

    def times_of(self, ticks: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Unix seconds before which each of these uses was, and not long before; NaN where nothing is known."""
        words = self._words.copy()
        pairs = words[(words[:, 1] > 0) & (words[:, 1] < _MAX_TIME_S)]
        if not len(pairs) or (np.diff(pairs.astype(np.float64), axis=0) < 0).any():
            return np.full(len(ticks), np.nan)
        times = np.append(pairs[:, 1].astype(np.float64), time.time())  # later than the last pair: now, or a moment ago
        found: npt.NDArray[np.float64] = times[np.searchsorted(pairs[:, 0], ticks)]
        return found


def _thinned(pairs: list[tuple[int, int]], now_s: int) -> list[tuple[int, int]]:
    """Those pairs, oldest first, without which some gap would be longer than a part of its age; the newest that fit."""
    kept = pairs[:-3:-1]
    for place in range(len(pairs) - 3, -1, -1):
        older_s = pairs[place - 1][1] if place else -1
        if place == 0 or kept[-1][1] - older_s > (now_s - older_s) / _SPACING:
            kept.append(pairs[place])
    return kept[: _MAX_PAIRS - 2][::-1]
