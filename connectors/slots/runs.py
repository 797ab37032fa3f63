"""Which of a store's free slots to take, so that a transfer's blocks lie in few runs of neighbours: one I/O each."""

from __future__ import annotations

import bisect

import numpy as np
import numpy.typing as npt


def in_few_runs(slots: npt.NDArray[np.int64], num_wanted: int) -> list[int]:
    """Ascending slots in an order whose first num_wanted are few runs: the longest ones, and last the smallest that is enough."""
    starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(slots)).tolist()
    others = sorted(range(len(lengths)), key=lambda run: -lengths[run])
    chosen: list[int] = []
    num_missing = num_wanted
    while num_missing > 0 and others:
        num_enough = bisect.bisect_right(others, -num_missing, key=lambda run: -lengths[run])  # the runs that are long enough
        chosen.append(others.pop(max(0, num_enough - 1)))
        num_missing -= lengths[chosen[-1]]
    all_slots = slots.tolist()
    return [slot for run in (*chosen, *others) for slot in all_slots[int(starts[run]) : int(starts[run]) + lengths[run]]]
