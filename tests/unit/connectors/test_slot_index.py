"""The slot index: reserve, publish, evict, share, and what dead processes leave. Two instances stand for two processes."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.slots.index import SlotIndex, take_lease_number
from connectors.slots.index_file import (
    CHECKSUM,
    HASH_LOW,
    NUM_RECENT_CHANGES,
    SEQUENCE,
    STATE_AND_OWNER,
    IndexFile,
    SlotState,
    create_index_file,
    record_checksums,
    resize_index_file,
)
from connectors.slots.index_mirror import sequences_of
from connectors.slots.runs import in_few_runs
from core.errors import ConnectorError

LAYOUT = bytes(range(16))
SLOT_BYTES = 8192

OpenIndex = Callable[..., SlotIndex]


def names(seed: int, count: int) -> list[bytes]:
    """Block hashes of a chain."""
    return [seed.to_bytes(8, "little") + position.to_bytes(8, "little") for position in range(count)]


def save(index: SlotIndex, chain: Sequence[bytes], ancestors: Sequence[bytes] = ()) -> int:
    """Reserve and publish at once; how many blocks are stored afterwards."""
    reservation = index.reserve(chain, ancestors)
    index.publish({chain[position]: slot for position, slot in reservation.new_slots.items()}, [*ancestors, *chain])
    return reservation.num_covered


@pytest.fixture
def open_index(tmp_path: Path) -> OpenIndex:
    """Open the test's index, created with num_slots at first; dead: lease numbers whose process is gone."""

    def no_growth(first_slot: int, end_slot: int) -> None:
        pass

    def open_it(
        num_slots: int = 8, dead: Sequence[int] = (), grow: Callable[[int, int], None] = no_growth, grow_step: int = 4
    ) -> SlotIndex:
        path = tmp_path / "index"
        if not path.exists():
            create_index_file(path, LAYOUT, num_slots, SLOT_BYTES)
        file = IndexFile(path, LAYOUT, SLOT_BYTES)
        return SlotIndex(file, take_lease_number(file), lambda number: number not in dead, grow, grow_step)

    return open_it


def test_reserve_then_publish_makes_blocks_visible_to_all(open_index: OpenIndex) -> None:
    ours, theirs = open_index(), open_index()
    chain = names(1, 3)
    reservation = ours.reserve(chain, [])
    assert reservation.num_covered == 3 and ours.num_writing == 3
    assert theirs.mirror.refresh() and theirs.mirror.count_prefix(chain) == 0
    ours.publish({chain[position]: slot for position, slot in reservation.new_slots.items()}, chain)
    assert theirs.mirror.refresh() and theirs.mirror.count_prefix(chain) == 3
    assert ours.num_writing == 0


def test_release_gives_slots_back(open_index: OpenIndex) -> None:
    index = open_index(num_slots=4)
    index.release(list(index.reserve(names(1, 4), []).new_slots.values()))
    assert index.num_writing == 0
    assert save(index, names(2, 4)) == 4
    assert index.num_evictions == 0


def test_reserve_when_full_evicts_the_least_recently_used_tail_first(open_index: OpenIndex) -> None:
    index = open_index(num_slots=8)
    old, new = names(1, 4), names(2, 4)
    save(index, old)
    save(index, new)
    save(index, names(3, 2))
    assert [name in index.mirror for name in old] == [True, True, False, False]
    index.touch_later(old[:2])
    save(index, names(4, 2))
    assert index.mirror.count_prefix(old) == 2
    assert [name in index.mirror for name in new] == [True, True, False, False]


def test_reserve_never_evicts_its_own_prefix(open_index: OpenIndex) -> None:
    index = open_index(num_slots=4)
    chain = names(1, 6)
    assert save(index, chain[:3]) == 3
    assert save(index, chain[3:], ancestors=chain[:3]) == 1
    assert index.mirror.count_prefix(chain) == 4
    assert save(index, chain) == 4


def test_reserve_never_evicts_slots_in_writing(open_index: OpenIndex) -> None:
    ours, theirs = open_index(num_slots=4), open_index()
    assert ours.reserve(names(1, 3), []).num_covered == 3
    assert theirs.reserve(names(2, 4), []).num_covered == 1


def test_publish_of_a_block_that_another_published_frees_the_copy(open_index: OpenIndex) -> None:
    ours, theirs = open_index(num_slots=4), open_index()
    chain = names(1, 2)
    first, second = ours.reserve(chain, []), theirs.reserve(chain, [])
    assert not set(first.new_slots.values()) & set(second.new_slots.values())
    ours.publish({chain[position]: slot for position, slot in first.new_slots.items()}, chain)
    theirs.publish({chain[position]: slot for position, slot in second.new_slots.items()}, chain)
    assert theirs.mirror.prefix_slots(chain) == list(first.new_slots.values())
    assert save(ours, names(2, 2)) == 2 and ours.num_evictions == 0


def test_forget_frees_the_slot_unless_it_was_recycled(open_index: OpenIndex) -> None:
    index = open_index(num_slots=2)
    chain = names(1, 2)
    save(index, chain)
    slots = index.mirror.prefix_slots(chain)
    before = dict(zip(slots, sequences_of(index.file, slots, chain), strict=True))
    index.forget({slots[0]: before[slots[0]]})
    assert chain[0] not in index.mirror and chain[1] in index.mirror
    save(index, names(2, 2))
    index.forget(before)
    assert index.mirror.count_prefix(names(2, 2)) == 2


def test_sequences_of_slots_that_hold_something_else_are_unknown(open_index: OpenIndex) -> None:
    index = open_index()
    save(index, names(1, 1))
    (slot,) = index.mirror.prefix_slots(names(1, 1))
    assert sequences_of(index.file, [slot, slot, slot + 1], [*names(1, 1), *names(2, 1), *names(1, 1)])[1:] == [-1, -1]
    assert sequences_of(index.file, [slot], names(1, 1))[0] > 0


def test_slots_of_dead_writers_are_taken_back(open_index: OpenIndex) -> None:
    dying = open_index(num_slots=4)
    dying.reserve(names(1, 4), [])
    assert open_index().reserve(names(2, 2), []).num_covered == 0
    survivor = open_index(dead=[dying.file.next_lease - 1])
    assert save(survivor, names(2, 4)) == 4


def test_late_publish_of_a_reclaimed_slot_changes_nothing(open_index: OpenIndex) -> None:
    slow = open_index(num_slots=2)
    lost = slow.reserve(names(1, 2), []).new_slots
    survivor = open_index(dead=[slow.file.next_lease])
    survivor._is_lease_alive = lambda number: False
    save(survivor, names(2, 2))
    slow.publish({names(1, 2)[position]: slot for position, slot in lost.items()}, names(1, 2))
    slow.release(list(lost.values()))
    assert slow.mirror.count_prefix(names(2, 2)) == 2 and slow.mirror.count_prefix(names(1, 2)) == 0


def test_growth_comes_before_eviction_and_its_failure_is_survived(open_index: OpenIndex) -> None:
    room = 6
    calls: list[tuple[int, int]] = []

    def grow(first_slot: int, end_slot: int) -> None:
        calls.append((first_slot, end_slot))
        if end_slot > room:
            raise OSError(errno.ENOSPC, "full")

    index = open_index(num_slots=12, grow=grow)
    assert save(index, names(1, 4)) == 4 and calls == [(0, 4)]
    assert save(index, names(2, 2)) == 2 and index.num_evictions == 0
    assert save(index, names(3, 2)) == 2 and index.num_evictions == 2
    assert index.room.num_failed_growths > 0
    room = 12
    assert save(index, names(4, 4)) == 4 and index.num_evictions == 2


def test_unused_slots_are_neighbours_never_written_and_few_of_those_left(open_index: OpenIndex) -> None:
    index, other = open_index(num_slots=64, grow_step=64), open_index(grow_step=64)
    assert index.reserve_unused(8) == []  # nothing is allocated yet
    save(index, names(1, 4))
    seen: list[int] = []
    while slots := index.reserve_unused(6):
        assert len(slots) <= (60 - len(seen)) // 8 and slots == list(range(slots[0], slots[0] + len(slots)))
        seen.extend(slots)
        index.release(slots)
    assert len(seen) == len(set(seen)) == 53 and not set(seen) & set(index.mirror.slots_of(names(1, 4)))
    assert index.num_writing == 0 and other.reserve_unused(8) == []
    assert save(other, names(2, 60)) == 60 and other.num_evictions == 0


def test_unused_slots_of_a_process_that_died_while_filling_them_are_taken_back(open_index: OpenIndex) -> None:
    dying = open_index(num_slots=32, grow_step=32)
    save(dying, names(1, 1))
    assert len(dying.reserve_unused(8)) == 3
    survivor = open_index(dead=[dying.file.next_lease])
    assert save(survivor, names(2, 31)) == 31 and survivor.num_evictions == 0


@pytest.mark.parametrize(
    ("num_wanted", "first"),
    [
        (3, [20, 21, 22]),  # the smallest run that is enough
        (4, [1, 2, 3, 4]),
        (7, [1, 2, 3, 4, 20, 21, 22]),
        (6, [1, 2, 3, 4, 30, 31]),  # the longest first, and then what is just enough
        (0, []),
        (99, [1, 2, 3, 4, 20, 21, 22, 30, 31, 9]),
    ],
)
def test_few_runs_are_chosen_from_scattered_slots(num_wanted: int, first: list[int]) -> None:
    slots = [1, 2, 3, 4, 9, 20, 21, 22, 30, 31]
    order = in_few_runs(np.array(slots), num_wanted)
    assert order[: len(first)] == first and sorted(order) == slots


def test_few_runs_of_no_slots_are_none() -> None:
    assert in_few_runs(np.array([], dtype=np.int64), 5) == []


def test_full_store_that_evicts_ahead_gives_neighbours_and_still_evicts_the_oldest(open_index: OpenIndex) -> None:
    index = open_index(num_slots=64, grow_step=64)
    index.room.num_freed_ahead = 8
    chains = [names(seed, 2) for seed in range(32)]
    for chain in chains[0::2] + chains[1::2]:  # neighbours on the medium were not used one after the other
        save(index, chain)
    reservation = index.reserve(names(100, 8), [])
    slots = sorted(reservation.new_slots.values())
    assert slots == list(range(slots[0], slots[0] + 8))
    index.release(slots)
    assert index.num_evictions == 16
    assert [index.mirror.count_prefix(chain) for chain in chains[0:16:2]] == [0] * 8
    assert [index.mirror.count_prefix(chain) for chain in chains[1::2]] == [2] * 16


def test_mirror_limited_refresh_declines_what_is_too_much(open_index: OpenIndex) -> None:
    ours, theirs = open_index(num_slots=64), open_index()
    save(ours, names(1, 20))
    assert not theirs.mirror.refresh(max_changes=10)
    assert theirs.mirror.refresh() and theirs.mirror.count_prefix(names(1, 20)) == 20
    save(ours, names(2, 2))
    assert theirs.mirror.refresh(max_changes=10) and theirs.mirror.count_prefix(names(2, 2)) == 2


def test_mirror_further_behind_than_the_ring_scans_everything(open_index: OpenIndex) -> None:
    ours, theirs = open_index(num_slots=16), open_index()
    save(theirs, names(0, 4))
    for seed in range(NUM_RECENT_CHANGES // 32 + 2):
        save(ours, names(seed, 16))
    assert not theirs.mirror.refresh(max_changes=256)
    assert theirs.mirror.refresh()
    assert theirs.mirror._slot_by_hash == ours.mirror._slot_by_hash


def test_mirror_of_a_new_process_equals_the_old_one(open_index: OpenIndex) -> None:
    index = open_index(num_slots=64)
    for seed in range(9):
        save(index, names(seed, 10))
    assert open_index().mirror._slot_by_hash == index.mirror._slot_by_hash


def test_torn_record_is_ignored_and_its_slot_returns(open_index: OpenIndex) -> None:
    index = open_index(num_slots=4)
    save(index, names(1, 4))
    (slot,) = index.mirror.prefix_slots(names(1, 1))
    index.file.records[slot, HASH_LOW] += np.uint64(1)
    reopened = open_index()
    assert len(reopened.mirror) == 3
    reopened.recover(is_alone=True)
    assert save(reopened, names(2, 1)) == 1 and reopened.num_evictions == 0


def test_change_whose_writer_died_before_announcing_it_reaches_every_mirror(open_index: OpenIndex) -> None:
    index, other = open_index(num_slots=4), open_index()
    save(index, names(1, 1))
    other.mirror.refresh()
    record = np.zeros((1, 8), dtype=np.uint64)
    record[0, STATE_AND_OWNER] = SlotState.STORED
    record[0, 1:3] = np.frombuffer(names(2, 1)[0], dtype=np.uint64)
    record[0, SEQUENCE] = index.file.change_counter + 1
    record[0, CHECKSUM] = record_checksums(record)[0]
    index.file.records[3] = record[0]
    index.file.is_changing = 1  # as its death leaves it
    index.touch_later([])
    index.catch_up()
    assert other.mirror.refresh() and names(2, 1)[0] in other.mirror and names(2, 1)[0] in index.mirror


def test_index_cut_or_removed_is_refused_not_touched(open_index: OpenIndex, tmp_path: Path) -> None:
    index = open_index(num_slots=1000)
    assert index.file.is_intact()
    with (tmp_path / "index").open("r+b") as file:
        file.truncate(5000)
    assert not index.file.is_intact()
    with pytest.raises(ConnectorError, match="removed or cut"):
        index.reserve(names(1, 1), [])
    with pytest.raises(ConnectorError, match="cut"):
        IndexFile(tmp_path / "index", LAYOUT, SLOT_BYTES)


@pytest.mark.parametrize("content", [b"", b"x" * 70_000, bytes(100_000)], ids=["empty", "short", "zeros"])
def test_index_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index").write_bytes(content)
    with pytest.raises(ConnectorError):
        IndexFile(tmp_path / "index", LAYOUT, SLOT_BYTES)


def test_index_of_another_layout_or_slot_size_is_refused(open_index: OpenIndex, tmp_path: Path) -> None:
    open_index()
    with pytest.raises(ConnectorError):
        IndexFile(tmp_path / "index", LAYOUT[::-1], SLOT_BYTES)
    with pytest.raises(ConnectorError):
        IndexFile(tmp_path / "index", LAYOUT, SLOT_BYTES + 4096)


@pytest.mark.parametrize("num_slots", [2, 20])
def test_resized_index_keeps_what_still_fits(open_index: OpenIndex, tmp_path: Path, num_slots: int) -> None:
    save(open_index(num_slots=4), names(1, 4))
    resize_index_file(tmp_path / "index", num_slots)
    index = open_index()
    assert index.file.num_slots == num_slots
    assert index.mirror.count_prefix(names(1, 4)) == min(4, num_slots)
    assert save(index, names(2, num_slots)) == num_slots


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["save", "touch", "forget"]), st.integers(0, 5), st.integers(1, 5)),
        max_size=40,
    )
)
def test_any_history_of_two_processes_keeps_states_and_mirrors_in_step(
    tmp_path_factory: pytest.TempPathFactory, history: list[tuple[int, str, int, int]]
) -> None:
    path = tmp_path_factory.mktemp("index") / "index"
    create_index_file(path, LAYOUT, 12, SLOT_BYTES)
    indexes = []
    for _ in range(2):
        file = IndexFile(path, LAYOUT, SLOT_BYTES)
        indexes.append(SlotIndex(file, take_lease_number(file), lambda number: True, lambda first, end: None, grow_step=5))
    for who, what, seed, count in history:
        index, chain = indexes[who], names(seed, count)
        if what == "save":
            assert save(index, chain) == count
        elif what == "touch":
            index.touch_later(chain)
        else:
            index.mirror.refresh()
            slots = index.mirror.prefix_slots(chain)
            index.forget(dict(zip(slots, sequences_of(index.file, slots, chain[: len(slots)]), strict=True)))
    records = indexes[0].file.records
    assert (record_checksums(records) == records[:, CHECKSUM]).all()
    stored = {
        records[slot, 1:3].tobytes(): slot for slot in np.flatnonzero(records[:, STATE_AND_OWNER] == SlotState.STORED).tolist()
    }
    assert set(records[:, STATE_AND_OWNER].tolist()) <= {SlotState.FREE, SlotState.STORED}
    for index in indexes:
        index.mirror.refresh()
        assert index.mirror._slot_by_hash == stored
        index.file.close()
