"""Eviction policies: each against a plain model over random histories, and each for what it is for. And pins."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from connectors.contract.node import SteppedClock
from connectors.registry import create_connector
from connectors.slots.eviction_policy import FREQUENT, PINNED, AdaptiveReplacement
from connectors.slots.index import SlotIndex, take_lease_number
from connectors.slots.index_file import LAST_USE, IndexFile, create_index_file
from core.errors import ConfigError
from tests.unit.connectors.test_slot_index import LAYOUT, SLOT_BYTES, save

OpenStore = Callable[..., SlotIndex]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Open the test's index with a policy; a second call is another process' view of the same."""

    def open_it(eviction: str, num_slots: int = 32) -> SlotIndex:
        path = tmp_path / "index"
        if not path.exists():
            create_index_file(path, LAYOUT, num_slots, SLOT_BYTES)
        file = IndexFile(path, LAYOUT, SLOT_BYTES)
        return SlotIndex(file, take_lease_number(file), lambda _number: True, lambda _first, _end: None, num_slots, eviction)

    yield open_it


def names(seed: int, count: int) -> list[bytes]:
    """Block hashes of a chain; any 8 bytes of them tell them apart, as of real ones."""
    return [hashlib.blake2b(f"{seed} {position}".encode(), digest_size=16).digest() for position in range(count)]


def stored(index: SlotIndex, chain: Sequence[bytes]) -> list[bool]:
    """Which of these are stored."""
    return [name in index.mirror for name in chain]


def use(index: SlotIndex, chain: Sequence[bytes]) -> int:
    """A request: hits what is stored of its prefix, and stores the rest. How many blocks it hit."""
    num_hits = index.mirror.count_prefix(chain)
    index.touch_later(chain[:num_hits], chain[:num_hits])
    index.catch_up()
    save(index, chain[num_hits:], chain[:num_hits])
    return num_hits


class TestPrefix:
    def test_parents_outlive_children_also_where_nobody_knew_the_chain(self, open_store: OpenStore) -> None:
        """A block used without its ancestors makes its parents older than itself."""
        index = open_store("prefix", 8)
        chain = names(1, 4)
        save(index, chain)
        save(index, names(2, 2))
        index.touch_later(chain[3:])  # its parents are now the oldest of all
        index.catch_up()
        save(index, names(3, 3))  # two free slots, and one that must be evicted
        assert stored(index, chain) == [True] * 4
        assert stored(index, names(2, 2)) == [True, False]

    def test_lru_evicts_the_parent_in_the_same_history(self, open_store: OpenStore) -> None:
        index = open_store("lru", 8)
        chain = names(1, 4)
        save(index, chain)
        save(index, names(2, 2))
        index.touch_later(chain[3:])
        index.catch_up()
        save(index, names(3, 3))
        assert stored(index, chain) == [True, True, False, True]

    def test_pinned_or_protected_child_keeps_its_parents(self, open_store: OpenStore) -> None:
        index = open_store("prefix", 8)
        chain = names(1, 3)
        save(index, chain)
        index.pin(chain[2:])
        for seed in range(2, 12):
            save(index, names(seed, 3))
        assert stored(index, chain) == [True] * 3

    def test_chains_that_follow_each_other_in_a_circle_can_be_evicted(self, open_store: OpenStore) -> None:
        index = open_store("prefix", 4)
        first, second = names(1, 2)
        reservation = index.reserve([first, second], [])
        index.publish({first: reservation.new_slots[0]}, [second, first])
        index.publish({second: reservation.new_slots[1]}, [first, second])
        for seed in range(2, 6):
            assert save(index, names(seed, 4)) == 4

    @pytest.mark.parametrize("seed", range(8))
    def test_any_history_evicts_the_oldest_leaf_of_a_plain_model(self, open_store: OpenStore, seed: int) -> None:
        rng = random.Random(seed)
        index = open_store("prefix", 24)
        model = LeafModel(24)
        for _ in range(150):
            chain = names(rng.randrange(5), rng.randrange(1, 12))
            start = rng.choice([0, 0, 0, rng.randrange(len(chain))])
            known = chain[:start] if rng.random() < 0.5 else []
            if rng.random() < 0.4:
                index.touch_later([*known, *chain[start:]])
                index.catch_up()
                model.touch([*known, *chain[start:]])
            else:
                save(index, chain[start:], known)
                model.save(chain[start:], known)
            index.recency._victims.clear()  # a scan for each, as the model does
            assert {name for name in model.ticks if name in index.mirror} == set(model.ticks)
            assert len(index.mirror) == len(model.ticks)


class LeafModel:
    """What LeavesFirst should do, one eviction at a time, in dicts."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.ticks: dict[bytes, int] = {}
        self.parents: dict[bytes, tuple[bytes, int]] = {}
        self.tick = 0

    def touch(self, chain: Sequence[bytes]) -> None:
        present = [name for name in chain if name in self.ticks]
        for offset, name in enumerate(present):
            self.ticks[name] = self.tick + len(present) - offset
        self.tick += len(present)

    def save(self, hashes: Sequence[bytes], ancestors: Sequence[bytes]) -> None:
        missing = list(dict.fromkeys(name for name in hashes if name not in self.ticks))
        while len(self.ticks) + len(missing) > self.num_slots and self._evict({*hashes, *ancestors}):
            pass
        chain = [*ancestors, *hashes]
        for name in missing[: self.num_slots - len(self.ticks)]:
            position = chain.index(name)
            self.parents[name] = (chain[position - 1] if position else b"", position + 1)
            self.ticks[name] = 0
        self.touch(chain)

    def _evict(self, protected: set[bytes]) -> bool:
        followed = {
            parent
            for name, (parent, depth) in self.parents.items()
            if name in self.ticks and parent in self.ticks and depth == self.parents[parent][1] + 1
        }
        leaves = [name for name in self.ticks if name not in followed and name not in protected]
        if leaves:
            victim = min(leaves, key=self.ticks.__getitem__)
            del self.ticks[victim], self.parents[victim]
        return bool(leaves)


@pytest.mark.parametrize("eviction", ["lru", "arc", "prefix"])
def test_reserve_with_a_stored_block_among_the_new_ones_evicts_another(open_store: OpenStore, eviction: str) -> None:
    index = open_store(eviction, 4)
    one, two, *new = names(1, 5)
    save(index, [one])
    save(index, [two])
    index.touch_later([one])
    save(index, [two, *new])  # two was used longest ago
    assert stored(index, [one, two, *new]) == [False, True, True, True, True]


class TestArc:
    def test_second_use_moves_a_block_to_those_used_again_and_a_ghost_raises_the_target(self, open_store: OpenStore) -> None:
        index = open_store("arc", 8)
        policy = index.recency._policy
        assert isinstance(policy, AdaptiveReplacement)
        again, other = names(1, 1), names(2, 1)
        use(index, again)
        use(index, other)
        assert self.used_again(index, [*again, *other]) == [False, False]
        use(index, again)
        assert self.used_again(index, [*again, *other]) == [True, False]
        use(index, names(3, 7))
        assert (stored(index, [*again, *other]), policy.target_recent) == ([True, False], 0.0)
        use(index, other)
        assert (self.used_again(index, other), policy.target_recent) == ([True], 1.0)

    def used_again(self, index: SlotIndex, chain: Sequence[bytes]) -> list[bool]:
        words = index.file.records[index.mirror.slots_of(chain), LAST_USE]
        return [bool(word & np.uint64(FREQUENT)) for word in words]

    def trace(self, index: SlotIndex) -> int:
        """Hits of twenty rounds over a small working set, with a scan of blocks that nobody uses again after each."""
        num_hits = 0
        for number in range(20):
            num_hits += sum(use(index, names(seed, 4)) for seed in range(4))
            for scanned in range(3):
                use(index, names(1000 + 3 * number + scanned, 16))
        return num_hits

    def test_scan_does_not_push_out_what_is_used_again(self, open_store: OpenStore, tmp_path: Path) -> None:
        num_arc_hits = self.trace(open_store("arc", 32))
        (tmp_path / "index").unlink()
        num_lru_hits = self.trace(open_store("lru", 32))
        assert num_lru_hits == 0
        assert num_arc_hits >= 17 * 16  # of 20 rounds: it takes two or three to learn

    def test_blocks_used_again_stay_so_for_another_process(self, open_store: OpenStore) -> None:
        ours, theirs = open_store("arc", 32), open_store("arc", 32)
        for _ in range(3):
            use(ours, names(1, 4))
            use(ours, names(2, 4))
            use(ours, names(3, 4))
        for seed in range(100, 110):
            use(theirs, names(seed, 16))
        assert stored(theirs, names(1, 4)) == [True] * 4

    def test_handoff_right_after_a_save_is_no_second_use(self, open_store: OpenStore) -> None:
        index = open_store("arc", 32)
        for seed in range(20):
            use(index, names(seed, 4))
            use(index, names(seed, 4))  # the decode node, at once
        use(index, names(0, 4))
        assert stored(index, names(12, 4)) == [False] * 4  # as old ones of a scan, they have gone in order
        assert stored(index, names(19, 4)) == [True] * 4

    @pytest.mark.parametrize("seed", range(8))
    def test_any_history_evicts_as_a_plain_model(self, open_store: OpenStore, seed: int) -> None:
        rng = random.Random(seed)
        index, model = open_store("arc", 16), ArcModel(16)
        for _ in range(400):
            name = names(rng.choice([rng.randrange(8), rng.randrange(8, 40)]), 1)
            use(index, name)
            model.use(name[0])
            index.recency._victims.clear()
            assert {name for name in model.ticks if name in index.mirror} == set(model.ticks)
            assert len(index.mirror) == len(model.ticks)


class ArcModel:
    """ARC over single blocks, in dicts: lists by the last use, ghosts in order of eviction."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.ticks: dict[bytes, int] = {}
        self.frequent: set[bytes] = set()
        self.ghosts: dict[bool, list[bytes]] = {False: [], True: []}
        self.target = 0.0
        self.tick = 0

    def use(self, name: bytes) -> None:
        if name in self.ticks:
            if self.tick - self.ticks[name] >= self.num_slots // 8:
                self.frequent.add(name)
            self.tick += 1  # by the hit, and by the save of nothing new
        else:
            self._adapt(name)
            if len(self.ticks) == self.num_slots:
                self._evict()
        self.tick += 1
        self.ticks[name] = self.tick

    def _adapt(self, name: bytes) -> None:
        recent, frequent = self.ghosts[False], self.ghosts[True]
        if name in recent:
            self.target = min(self.num_slots, self.target + max(1.0, len(frequent) / len(recent)))
            recent.remove(name)
        elif name in frequent:
            self.target = max(0.0, self.target - max(1.0, len(recent) / len(frequent)))
            frequent.remove(name)
        else:
            return
        self.frequent.add(name)

    def _evict(self) -> None:
        lists = {
            is_frequent: [name for name in self.ticks if (name in self.frequent) == is_frequent] for is_frequent in (False, True)
        }
        takes_frequent = bool(lists[True]) and (len(lists[False]) <= int(self.target) or not lists[False])
        victim = min(lists[takes_frequent], key=self.ticks.__getitem__)
        del self.ticks[victim]
        self.frequent.discard(victim)
        self.ghosts[takes_frequent] = [*self.ghosts[takes_frequent], victim][-self.num_slots :]


class TestPins:
    @pytest.mark.parametrize("eviction", ["lru", "arc", "prefix"])
    def test_pinned_prefix_is_not_evicted_by_any_process_until_unpinned(self, open_store: OpenStore, eviction: str) -> None:
        ours, theirs = open_store(eviction), open_store(eviction)
        prompt = names(1, 4)
        save(ours, prompt)
        assert ours.pin(prompt) == 4
        for seed in range(2, 30):
            save(theirs, names(seed, 8))
        assert stored(ours, prompt) == stored(theirs, prompt) == [True] * 4
        theirs.unpin(prompt)
        for seed in range(30, 60):
            save(theirs, names(seed, 8))
        assert stored(theirs, prompt) == [False] * 4

    def test_prefix_pinned_before_it_is_stored_is_pinned_when_it_comes(self, open_store: OpenStore) -> None:
        index = open_store("lru")
        assert index.pin(names(1, 4)) == 0
        save(index, names(1, 4))
        for seed in range(2, 30):
            save(index, names(seed, 8))
        assert stored(index, names(1, 4)) == [True] * 4

    def test_pins_take_a_quarter_of_the_slots_at_most(self, open_store: OpenStore) -> None:
        index = open_store("lru")
        for seed in range(4):
            save(index, names(seed, 6))
        assert [index.pin(names(seed, 6)) for seed in range(4)] == [6, 2, 0, 0]
        assert save(index, names(9, 24)) == 24

    def test_damage_that_pins_everything_does_not_fill_the_store_for_good(self, open_store: OpenStore) -> None:
        index = open_store("lru")
        save(index, names(1, 32))
        index.file.records[:, LAST_USE] |= np.uint64(PINNED)
        assert save(index, names(2, 16)) == 16

    def test_slot_of_a_pinned_block_that_was_damaged_is_not_pinned(self, open_store: OpenStore) -> None:
        index = open_store("lru", 4)
        save(index, names(1, 1))
        index.pin(names(1, 1))
        (slot,) = index.mirror.slots_of(names(1, 1))
        index.forget({slot: int(index.file.records[slot, 3])})
        index.unpin(names(1, 1))
        for seed in range(2, 8):
            assert save(index, names(seed, 4)) == 4


def test_unknown_policy_is_refused_by_name() -> None:
    for name, options in (("shm", {}), ("nvme", {"path": "/x"})):
        with pytest.raises(ConfigError, match=r"connector\.options\.eviction.*'mru'.*lru, arc, prefix"):
            create_connector(name, {**options, "eviction": "mru"}, SteppedClock())
