"""The tiers of one tiered connector, in order, and what loads and saves over them have in common.

Not safe for threads: whoever calls holds the tiered connector's lock.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from connectors.prefix_chains import PrefixChains
from connectors.tiered.tier import Tier
from core.clock import Clock
from core.kv.connector import PrefixLookup, Transfer, TransferOutcome, TransferResult
from core.kv.layout import KVLayout

MAX_RUNS = 8  # how often a prefix may change from one tier to another
_DEADLINE_SHARE = 0.8  # of the time left: what a tier leaves for the next one, and for telling the engine in time
_MAX_PROMOTIONS = 256

Report = Callable[[TransferResult], None]


class Questions:
    """What is asked about one request's prefix. Stores remember an answer by request, so a tier that is asked again, about what
    comes after another tier's part, is asked under another name."""

    def __init__(self, lookup: PrefixLookup) -> None:
        self._lookup = lookup
        self._num_asked: dict[int, int] = {}

    def to(self, tier: Tier) -> PrefixLookup:
        """The next question to a tier."""
        number = self._num_asked.get(tier.index, 0)
        self._num_asked[tier.index] = number + 1
        if not number:
            return self._lookup
        return dataclasses.replace(self._lookup, request_id=f"{self._lookup.request_id}#{number}")


class TierSet:
    """Fastest first."""

    def __init__(self, tiers: Sequence[Tier], clock: Clock) -> None:
        self.tiers = tiers
        self.clock = clock
        self.chains = PrefixChains()
        self.layout: KVLayout | None = None
        self.num_pool_blocks = 0
        self.is_closed = False
        self._ids = itertools.count(1)
        self._promotions: dict[tuple[str, bytes], list[int]] = {}

    @property
    def block_bytes(self) -> int:
        """Payload of one block."""
        assert self.layout is not None, "register_kv_cache comes first"
        return self.layout.block_bytes

    def usable(self) -> list[Tier]:
        """Tiers that may be given transfers now."""
        now_s = self.clock.now_s()
        return [tier for tier in self.tiers if tier.is_usable(now_s)]

    def child_id(self) -> int:
        """For one more transfer of a child's."""
        return next(self._ids)

    def child_deadline_s(self, transfer: Transfer) -> float:
        """Until when a child may work on its share."""
        now_s = self.clock.now_s()
        return now_s + _DEADLINE_SHARE * (transfer.deadline_s - now_s)

    def find_run(self, questions: Questions, first: int, without: frozenset[int]) -> tuple[Tier | None, int]:
        """The fastest tier that has the first-th block, and how many it has from there; else one that may have it, and 0.

        Where all say no, the fastest is tried all the same, unless some have been: it may not know yet what a transfer finds out,
        such as a store that was made anew by another process.
        """
        usable = self.usable()
        unknown: Tier | None = None
        for tier in usable:
            if tier.index in without:
                continue
            count = tier.count(questions.to(tier), first)
            if count:
                return tier, count
            if count is None and unknown is None:
                unknown = tier
        if unknown is None and usable and not without:
            unknown = usable[0]
        return unknown, 0

    def why(self, outcomes: Iterable[TransferOutcome]) -> TransferOutcome:
        """What to call the end of a transfer that no tier could complete, after the outcomes of those that tried.

        The fault of one tier is a miss as long as another can be used: only what concerns all is a fault of the store.
        """
        found = set(outcomes)
        if self.is_closed:
            return TransferOutcome.CANCELLED
        if TransferOutcome.CORRUPT in found:
            return TransferOutcome.CORRUPT
        if self.usable() or TransferOutcome.MISS in found:
            return TransferOutcome.MISS
        return TransferOutcome.TIMEOUT if TransferOutcome.TIMEOUT in found else TransferOutcome.ERROR

    # -- promotion -----------------------------------------------------------------------------------------------------
    def offer_promotion(self, transfer: Transfer, sources: list[int]) -> bool:
        """After a load: whether a faster tier than a block's source should get it. sources: the tier of each block."""
        fastest = next((tier.index for tier in self.usable()), len(self.tiers))
        if not sources or max(sources) <= fastest:
            return False
        while len(self._promotions) >= _MAX_PROMOTIONS:  # the engine declined some
            del self._promotions[next(iter(self._promotions))]
        self._promotions[transfer.request_id, transfer.block_hashes[0]] = sources
        return True

    def take_promotion(self, transfer: Transfer) -> list[int] | None:
        """The sources of a save that the engine makes of an offer; None for an ordinary save."""
        sources = self._promotions.pop((transfer.request_id, transfer.block_hashes[0]), None)
        return sources if sources is not None and len(sources) == len(transfer.block_hashes) else None
