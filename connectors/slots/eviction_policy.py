"""In which order a store of slots gives up its blocks: least recently used, ARC, or leaves of prefixes first.

What all processes of a store have to agree on is in the records: when a block was last used, whether it was used again, which
block it follows. Policies are plain functions and plain state over arrays of records; they are called under the index' lock.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from connectors.slots.index_file import DEPTH, HASH_LOW, LAST_USE, PARENT, Words, hashes_of
from core.errors import ConfigError

# The word LAST_USE: | 2 bits 0 | used again | pinned | 60 bits: the tick |
FREQUENT = 1 << 61
PINNED = 1 << 60
TICK_MASK = PINNED - 1
EVICTION_POLICIES = ("lru", "arc", "prefix")

_MAX_BATCH = 4096  # victims found by one scan of all records
_MAX_ARC_BATCH = 512  # ARC changes its mind sooner
_MAX_GHOSTS = 65536  # per list and process, at about 100 bytes each
_FILTER_BITS = 20
_USED_AGAIN_SHARE = 8  # a hit counts as another use when blocks worth this share of the store were used in between

Slots = npt.NDArray[np.int64]


class EvictionPolicy(ABC):
    """One process' view of the blocks."""

    max_batch = _MAX_BATCH

    @abstractmethod
    def order(self, records: Words, slots: Slots, num_now: int, num_ahead: int) -> Slots:
        """num_now of `slots`, which may be evicted, the first to go first, and perhaps num_ahead more to be evicted later.

        records, [n, 8]: of all slots.
        """

    def is_stale(self) -> bool:
        """Whether what is left of the last order should not be followed any further."""
        return False

    def allowed(self, records: Words, slots: Sequence[int], taken: Set[int]) -> Sequence[int]:
        """Those of the next slots of the last order, unchanged since, that may be evicted after those in taken."""
        return slots

    def note_missing(self, block_hashes: Iterable[bytes]) -> None:  # noqa: B027 - most policies learn nothing from it
        """Blocks that are about to be stored."""

    def take_frequent(self, block_hashes: Iterable[bytes]) -> Sequence[bytes]:
        """Those of the blocks, which are now stored, that had been used more than once before they were evicted."""
        return ()

    def note_evicted(self, records: Words, slots: Sequence[int]) -> None:  # noqa: B027
        """The blocks in these slots are evicted by this process."""


class LeastRecentlyUsed(EvictionPolicy):
    """By the last use alone. Prefixes are touched tail first, so that parents outlive children where the chain is known."""

    def order(self, records: Words, slots: Slots, num_now: int, num_ahead: int) -> Slots:
        return _oldest(records, slots, num_now + num_ahead)


class LeavesFirst(EvictionPolicy):
    """The least recently used block that no stored block follows, as far as the records know who follows whom."""

    def __init__(self) -> None:
        self._followers_by_slot: dict[int, list[int]] = {}

    def order(self, records: Words, slots: Slots, num_now: int, num_ahead: int) -> Slots:
        num_wanted = num_now + num_ahead
        for num_candidates in (2 * num_wanted, 8 * num_wanted, len(slots)):
            candidates = _oldest(records, slots, num_candidates)
            self._followers_by_slot = _followers_by_slot(records, candidates)
            found = _leaves_first(candidates.tolist(), self._followers_by_slot, num_wanted)
            if len(found) >= num_wanted or num_candidates >= len(slots):
                break
        return np.asarray(found, dtype=np.int64)

    def allowed(self, records: Words, slots: Sequence[int], taken: Set[int]) -> Sequence[int]:
        # A follower that came since has touched its block. One that was to go first may have been kept.
        evicted: dict[int, None] = {}
        for slot in slots:
            name = records[slot, HASH_LOW]
            followers = self._followers_by_slot.get(slot, ())
            if all(follower in taken or follower in evicted or records[follower, PARENT] != name for follower in followers):
                evicted[slot] = None
        return list(evicted)


@dataclass(slots=True)
class AdaptiveReplacement(EvictionPolicy):
    """ARC (Megiddo and Modha, 2003), so that a scan of blocks that are used once does not push out those that are used again.

    T1, T2 and their order are in the shared records. The ghost lists, and with them the target size of T1, are this process':
    they know what it evicted itself. A use soon after another is no other use: a prompt that is stored by one node and loaded by
    the next was used once (`counts_as_another_use`).
    """

    num_slots: int
    target_recent: float = 0.0  # of T1, in blocks
    _recent_ghosts: dict[bytes, None] = field(default_factory=dict)  # B1
    _frequent_ghosts: dict[bytes, None] = field(default_factory=dict)  # B2
    _returning: set[bytes] = field(default_factory=set)
    _target_at_order: float = 0.0
    _is_last_order_short: bool = False

    @property
    def max_batch(self) -> int:  # type: ignore[override]
        """Victims found by one scan."""
        return _MAX_ARC_BATCH

    def order(self, records: Words, slots: Slots, num_now: int, num_ahead: int) -> Slots:
        is_frequent = (records[slots, LAST_USE] & np.uint64(FREQUENT)) != 0
        recent, frequent = slots[~is_frequent], slots[is_frequent]
        num_first = self.num_frequent_first(len(recent), len(frequent), num_now + num_ahead)
        first = _oldest(records, frequent, num_first)
        then = _oldest(records, recent, num_now + num_ahead - len(first))
        last = _oldest(records, frequent, num_now - len(then))[len(first) :]  # only as T1 has no more
        self._target_at_order = self.target_recent
        self._is_last_order_short = len(last) > 0
        return np.concatenate([first, then, last])

    def num_frequent_first(self, num_recent: int, num_frequent: int, num_wanted: int) -> int:
        """How many of T2 go before the first of T1: each makes room for a block in T1, until T1 is larger than its target."""
        return max(0, min(num_frequent, num_wanted, int(self.target_recent) + 1 - num_recent))

    def is_stale(self) -> bool:
        is_other_target = abs(self.target_recent - self._target_at_order) > max(1, self.num_slots // 64)
        return is_other_target or self._is_last_order_short

    def note_missing(self, block_hashes: Iterable[bytes]) -> None:
        recent, frequent = self._recent_ghosts, self._frequent_ghosts
        for block_hash in block_hashes:
            if block_hash in recent:
                step = max(1.0, len(frequent) / len(recent))
                self.target_recent = min(float(self.num_slots), self.target_recent + step)
                del recent[block_hash]
            elif block_hash in frequent:
                step = max(1.0, len(recent) / len(frequent))
                self.target_recent = max(0.0, self.target_recent - step)
                del frequent[block_hash]
            else:
                continue
            self._returning.add(block_hash)

    def take_frequent(self, block_hashes: Iterable[bytes]) -> Sequence[bytes]:
        returning = [name for name in block_hashes if name in self._returning]
        self._returning.difference_update(returning)
        return returning

    def note_evicted(self, records: Words, slots: Sequence[int]) -> None:
        evicted = records[list(slots)]
        is_frequent = (evicted[:, LAST_USE] & np.uint64(FREQUENT)) != 0
        for ghosts, names in (
            (self._frequent_ghosts, hashes_of(evicted[is_frequent])),
            (self._recent_ghosts, hashes_of(evicted[~is_frequent])),
        ):
            ghosts.update(dict.fromkeys(names))
            while len(ghosts) > min(self.num_slots, _MAX_GHOSTS):
                del ghosts[next(iter(ghosts))]
        if len(self._returning) > _MAX_GHOSTS:  # reserved, but never stored
            self._returning.clear()


def create_eviction_policy(name: str, num_slots: int) -> EvictionPolicy:
    """By its name, one of EVICTION_POLICIES."""
    if name == "arc":
        return AdaptiveReplacement(num_slots)
    return LeavesFirst() if name == "prefix" else LeastRecentlyUsed()


def check_eviction_policy(name: str) -> None:
    """For a connector's options. Raises ConfigError."""
    if name not in EVICTION_POLICIES:
        raise ConfigError("connector.options.eviction", name, f"one of {', '.join(EVICTION_POLICIES)}")


def counts_as_another_use(old_words: Words, tick: int, num_slots: int) -> npt.NDArray[np.bool_]:
    """For blocks that are hit at `tick`, by what LAST_USE was before: whether that is far enough from the use before."""
    ages = np.uint64(tick) - np.minimum(old_words & np.uint64(TICK_MASK), np.uint64(tick))
    is_another: npt.NDArray[np.bool_] = ages >= max(1, num_slots // _USED_AGAIN_SHARE)
    return is_another


def _oldest(records: Words, slots: Slots, num_wanted: int) -> Slots:
    """The num_wanted of these slots that were used longest ago, in order."""
    if num_wanted <= 0:
        return slots[:0]
    ticks = records[slots, LAST_USE] & np.uint64(TICK_MASK)
    if num_wanted < len(slots):
        oldest = np.argpartition(ticks, num_wanted)[:num_wanted]
        slots, ticks = slots[oldest], ticks[oldest]
    return slots[np.argsort(ticks, kind="stable")]


def _leaves_first(slots: Sequence[int], followers_by_slot: Mapping[int, Sequence[int]], num_wanted: int) -> list[int]:
    """Of these slots, oldest first: those without followers, and those that become so when others of them have gone."""
    age_by_slot = {slot: age for age, slot in enumerate(slots)}
    num_followers = {slot: len(followers) for slot, followers in followers_by_slot.items()}
    parent_by_slot = {follower: slot for slot, followers in followers_by_slot.items() for follower in followers}
    leaves = [(age, slot) for slot, age in age_by_slot.items() if slot not in num_followers]  # in order: a heap
    order: list[int] = []
    while leaves and len(order) < num_wanted:
        _age, slot = heapq.heappop(leaves)
        order.append(slot)
        parent = parent_by_slot.get(slot, -1)
        if parent >= 0:
            num_followers[parent] -= 1
            if not num_followers[parent]:
                heapq.heappush(leaves, (age_by_slot[parent], parent))
    return order


def _followers_by_slot(records: Words, candidates: Slots) -> dict[int, list[int]]:
    """The slots of stored blocks that follow those in the candidates, for each that has any."""
    names = records[candidates, HASH_LOW]
    slot_by_name: dict[int, int] = dict(zip(names.tolist(), candidates.tolist(), strict=True))
    found: dict[int, list[int]] = {}
    followers = _followers_of(records, names)
    for follower, name, depth in zip(
        followers.tolist(), records[followers, PARENT].tolist(), records[followers, DEPTH].tolist(), strict=True
    ):
        slot = slot_by_name[name]
        if depth == int(records[slot, DEPTH]) + 1:  # or they follow in a circle, as made-up chains may
            found.setdefault(slot, []).append(follower)
    return found


def _followers_of(records: Words, names: Words) -> Slots:
    """Slots of stored blocks that follow one of these. A small bit filter first: most follow none, and there may be a million."""
    mask = np.uint64((1 << _FILTER_BITS) - 1)
    is_named = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
    is_named[(names & mask).astype(np.int64)] = True
    slots = np.flatnonzero(is_named[(records[:, PARENT] & mask).astype(np.int64)] & (records[:, DEPTH] > 1))
    return slots[np.isin(records[slots, PARENT], names)]
