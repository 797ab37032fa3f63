"""Ages of blocks, from counts of uses and a few times: right within bounds, small, and never more than a hint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from connectors.slots.index_file import USE_TIMES, IndexFile, create_index_file
from connectors.slots.use_times import UseTimes

START_S = 1_900_000_000.0


class Clock:
    """The time of day, as the test says."""

    now_s = START_S

    def time(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("connectors.slots.use_times.time", clock)
    return clock


@pytest.fixture
def file(tmp_path: Path) -> Iterator[IndexFile]:
    create_index_file(tmp_path / "index", bytes(16), 4, 8192)
    file = IndexFile(tmp_path / "index", bytes(16), 8192)
    yield file
    file.close()


def times(file: IndexFile, *ticks: int) -> list[float]:
    return UseTimes(file).times_of(np.array(ticks, dtype=np.uint64)).tolist()


def test_times_of_an_index_without_pairs_are_not_known(file: IndexFile) -> None:
    assert np.isnan(times(file, 0, 7)).all()


def test_times_of_a_busy_month_are_right_within_a_part_of_their_age(file: IndexFile, clock: Clock) -> None:
    rng, tick, uses = random.Random(0), 0, []
    while clock.now_s < START_S + 30 * 86400:
        clock.now_s += rng.choice([0.1, 5, 60, 600, 4000])
        UseTimes(file).note(tick, tick + 3)
        tick += 3
        uses.append((tick, clock.now_s))
    for at, used_s in uses:
        (found,) = times(file, at)
        age_s = clock.now_s - used_s
        assert used_s - 1 <= found <= used_s + 22 + age_s / 7, at  # never older than it is


def test_times_after_a_long_silence_belong_to_the_uses_before_it(file: IndexFile, clock: Clock) -> None:
    UseTimes(file).note(0, 10)
    clock.now_s += 3
    UseTimes(file).note(10, 20)
    clock.now_s += 36_000
    UseTimes(file).note(20, 30)
    before, shortly_after, now = times(file, 10, 20, 30)
    assert START_S <= before <= shortly_after <= START_S + 10 and now == clock.now_s


def test_times_after_the_clock_was_set_back_are_kept_in_order(file: IndexFile, clock: Clock) -> None:
    UseTimes(file).note(0, 10)
    clock.now_s -= 5000
    UseTimes(file).note(10, 20)
    clock.now_s += 60
    UseTimes(file).note(20, 30)
    found = times(file, 10, 20, 30)
    assert found == sorted(found) and found[-1] <= clock.now_s


def test_times_of_a_damaged_header_are_hints_that_heal(file: IndexFile, clock: Clock) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        file.header[USE_TIMES.start : USE_TIMES.stop] = rng.integers(0, 2**64, len(USE_TIMES), dtype=np.uint64)
        times(file, 1, 2**59)
        UseTimes(file).note(5, 6)
        clock.now_s += 60
        UseTimes(file).note(6, 9)
        assert times(file, 9) == [int(clock.now_s)]
