"""The tiered connector over children whose every answer the test gives: which tier serves, which is skipped, and who waits."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, content_of, wait_until
from connectors.registry import create_connector
from connectors.tiered.connector import TieredConnector
from connectors.tiered.options import parse_tiered_options
from connectors.tiered.seen_blocks import SeenBlocks
from core.errors import ConfigError, ConnectorError
from core.kv.connector import PrefixLookup, TransferDirection, TransferOutcome
from core.kv.pool_memory import KVPoolMemory
from tests.support.memory_connector import MemoryConnector


class Child(MemoryConnector):
    """A tier: answers at once unless told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.is_broken_at_start = False

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        if self.is_broken_at_start:
            raise ConnectorError("not there")
        super().register_kv_cache(pool)

    def put(self, hashes: list[bytes]) -> None:
        """Have these blocks."""
        self.store.blocks.update({name: content_of(name) for name in hashes})

    def has(self, hashes: list[bytes]) -> list[bool]:
        """Which of these it has."""
        return [name in self.store.blocks for name in hashes]


class Tiers:
    """A node over children named a, b, c."""

    def __init__(self, num_tiers: int, **options: object) -> None:
        names = "abc"[:num_tiers]
        tiers = {name: {"connector": "none"} for name in names}
        own, parsed = parse_tiered_options({"tiers": ",".join(names), **tiers, **options})
        self.clock = SteppedClock()
        self.children = [Child() for _ in names]
        self.connector = TieredConnector(own, parsed, list(self.children), self.clock)

    def open(self) -> Node:
        self.node = Node(self.connector, self.clock)
        return self.node


@pytest.fixture
def opened() -> Iterator[list[Tiers]]:
    """Whatever a test appends is closed."""
    tiers: list[Tiers] = []
    yield tiers
    for each in tiers:
        each.connector.close()
        assert each.connector.stats().num_open_references == 0


def open_tiers(opened: list[Tiers], num_tiers: int = 2, **options: object) -> tuple[Node, list[Child]]:
    tiers = Tiers(num_tiers, **options)
    opened.append(tiers)
    return tiers.open(), tiers.children


HASHES = chain(1, 8)


class TestLookupAndLoad:
    def test_prefix_is_the_longest_over_all_tiers_and_each_run_comes_from_the_fastest(self, opened: list[Tiers]) -> None:
        node, (first, second, third) = open_tiers(opened, 3, promote=False)
        first.put([*HASHES[:2], *HASHES[5:6]])
        second.put(HASHES[1:4])
        third.put(HASHES[:7])
        assert node.lookup(HASHES) == 7
        assert node.lookup(HASHES, 4) == 3
        result = node.load(HASHES[:7])
        assert (result.outcome, result.num_blocks_ok) == (TransferOutcome.OK, 7)
        assert [tier.num_hit_blocks for tier in node.stats().tiers] == [2, 2, 3]

    def test_block_that_one_tier_cannot_load_comes_from_the_next(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        first.put(HASHES)
        second.put(HASHES)
        first.is_immediate = False
        transfer = node.start_load(HASHES)
        first.complete(1, TransferOutcome.CORRUPT, num_ok=3)
        first.is_immediate = True
        (result,) = node.results([transfer])
        assert (result.outcome, result.num_blocks_ok) == (TransferOutcome.OK, 8)

    def test_block_that_no_tier_can_load_ends_the_load_with_the_gravest_reason(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        first.put(HASHES)
        second.put(HASHES[:2])
        first.is_immediate = False
        transfer = node.start_load(HASHES)
        first.complete(1, TransferOutcome.CORRUPT, num_ok=3)
        (result,) = node.results([transfer])
        assert (result.outcome, result.num_blocks_ok, result.wants_save) == (TransferOutcome.CORRUPT, 3, False)

    def test_fault_of_one_tier_is_a_miss(self, opened: list[Tiers]) -> None:
        node, (_first, second) = open_tiers(opened)
        second.put(HASHES)
        second.is_immediate = False
        transfer = node.start_load(HASHES)
        second.complete(1, TransferOutcome.ERROR, num_ok=0)
        assert node.results([transfer])[0].outcome is TransferOutcome.MISS


class TestPromotion:
    def test_load_from_a_slower_tier_asks_for_a_save_that_goes_to_the_faster_ones_alone(self, opened: list[Tiers]) -> None:
        node, (first, second, third) = open_tiers(opened, 3)
        first.put(HASHES[:2])
        third.put(HASHES)
        assert node.load(HASHES, "r").wants_save
        assert node.save(HASHES, "r").outcome is TransferOutcome.OK
        assert all(first.has(HASHES))
        assert second.has(HASHES) == [False] * 2 + [True] * 6
        assert [transfer.block_hashes for transfer in first.started][-1] == tuple(HASHES[2:])
        assert len(third.started) == 1  # the load

    def test_load_from_the_fastest_tier_asks_for_nothing(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        first.put(HASHES)
        second.put(HASHES)
        assert not node.load(HASHES).wants_save

    def test_tier_that_wants_what_it_brought_itself_is_given_it_too(self, opened: list[Tiers]) -> None:
        node, (first, second, third) = open_tiers(opened, 3)
        second.put(HASHES)
        second.is_immediate = False
        transfer = node.start_load(HASHES, "r")
        second.complete(1, wants_save=True)
        second.is_immediate = True
        assert node.results([transfer])[0].wants_save
        node.save(HASHES, "r")
        assert [child.started[-1].direction for child in (first, second)] == [TransferDirection.SAVE] * 2
        assert not third.started

    def test_promotion_can_be_turned_off(self, opened: list[Tiers]) -> None:
        node, (_first, second) = open_tiers(opened, promote=False)
        second.put(HASHES)
        assert not node.load(HASHES).wants_save


class TestSave:
    def test_write_through_is_early_when_the_first_tier_has_it_and_ends_when_all_do(self, opened: list[Tiers]) -> None:
        node, (_first, second) = open_tiers(opened)
        second.is_immediate = False
        transfer = node.start_save(HASHES)
        early = []
        wait_until(lambda: early.extend(node.connector.poll_early_results()) or bool(early))
        assert (early[0].transfer_id, early[0].num_blocks_ok) == (transfer.transfer_id, 8)
        assert node.connector.poll_transfers() == []
        second.complete(2)
        assert node.results([transfer])[0].outcome is TransferOutcome.OK
        assert node.connector.poll_early_results() == []
        assert all(second.has(HASHES))

    def test_handoff_tier_decides_when_a_save_is_early(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened, handoff="b")
        first.is_immediate = second.is_immediate = False
        transfer = node.start_save(HASHES)
        first.complete(1)
        wait_until(lambda: not first.pending and node.stats().tiers[0].store_blocks == 8)
        time.sleep(0.05)
        assert node.connector.poll_early_results() == []
        second.complete(2)
        assert node.results([transfer])[0].outcome is TransferOutcome.OK

    def test_write_back_goes_to_the_first_tier_and_what_it_refuses_to_the_next(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened, write="back", staging_bytes=1)
        assert node.save(HASHES[:4]).outcome is TransferOutcome.OK
        assert (first.has(HASHES[:4]), second.has(HASHES[:4])) == ([True] * 4, [False] * 4)
        first.is_immediate = False
        transfer = node.start_save(HASHES)
        first.complete(first.started[-1].transfer_id, TransferOutcome.MISS, num_ok=6)
        assert node.results([transfer])[0].outcome is TransferOutcome.OK
        assert second.has(HASHES) == [False] * 6 + [True] * 2

    def test_slower_tier_that_holds_back_too_much_is_left_out(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        second.is_immediate = False
        transfers = [node.start_save(chain(seed, 4), first_block=4 * seed) for seed in range(6)]
        assert len(second.pending) == 2  # of 4 blocks each, an eighth of a pool of 64
        for transfer_id in list(second.pending):
            second.complete(transfer_id)
        assert {result.outcome for result in node.results(transfers)} == {TransferOutcome.OK}
        assert len(first.store.blocks) == 24

    def test_store_threshold_admits_a_block_at_its_second_request(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened, b={"connector": "none", "store_threshold": 2})
        node.lookup(HASHES, request_id="one")
        node.save(HASHES, "one")
        node.lookup(HASHES, request_id="one")
        assert (all(first.has(HASHES)), any(second.has(HASHES))) == (True, False)
        node.lookup(HASHES[:4], request_id="two")
        node.save(HASHES, "one")
        assert second.has(HASHES) == [True] * 4 + [False] * 4


class TestBadTiers:
    def test_lookup_waits_for_a_tier_that_does_not_know_only_so_long(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened, lookup_wait_s=0.5)
        first.put(HASHES[:3])
        second.is_lookup_known = False
        question = PrefixLookup("r", HASHES, LAYOUT.block_size)
        assert node.connector.get_num_new_matched_tokens(question, 0) is None
        node.clock.offset_s += 0.6
        assert node.connector.get_num_new_matched_tokens(question, 0) == 3 * LAYOUT.block_size

    def test_tier_that_is_late_three_times_is_waited_for_again_when_it_answers(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened, lookup_wait_s=0.5)
        first.put(HASHES[:3])
        second.put(HASHES)
        second.is_lookup_known = False

        def ask(request_id: str) -> int | None:
            return node.connector.get_num_new_matched_tokens(PrefixLookup(request_id, HASHES, LAYOUT.block_size), 0)

        for number in range(3):
            assert ask(f"late{number}") is None
            node.clock.offset_s += 0.6
            assert ask(f"late{number}") == 3 * LAYOUT.block_size
        node.clock.offset_s -= 0.5
        assert ask("at once") == 3 * LAYOUT.block_size
        node.clock.offset_s += 5.0
        assert ask("again") is None
        second.is_lookup_known = True
        assert ask("again") == 8 * LAYOUT.block_size

    def test_tier_that_raises_costs_its_own_blocks_and_is_used_again_within_five_seconds(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        first.put(HASHES[:3])
        second.put(HASHES)
        second.fail_calls = {"lookup", "load", "save"}
        for seed in range(2, 12):
            assert node.lookup(HASHES) == 3
            assert node.save(chain(seed, 2)).outcome is TransferOutcome.OK
            node.clock.offset_s += 0.5
        assert not node.stats().tiers[1].is_reachable
        second.fail_calls = set()
        node.clock.offset_s += 5.0
        assert node.lookup(HASHES) == 8
        assert node.stats().tiers[1].is_reachable

    def test_load_that_hangs_in_a_slow_tier_ends_early_with_what_the_others_had(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        first.put(HASHES[:3])
        second.put(HASHES)
        second.is_immediate = False
        transfer = node.start_load(HASHES)
        node.clock.offset_s += 50.0  # of 60
        early = []
        wait_until(lambda: early.extend(node.connector.poll_early_results()) or bool(early))
        assert (early[0].num_blocks_ok, early[0].outcome) == (3, TransferOutcome.MISS)
        assert node.lookup(HASHES) == 3  # it is given nothing more
        second.complete(2)
        assert node.results([transfer])[0].num_blocks_ok == 8
        assert node.lookup(HASHES) == 8

    def test_save_that_hangs_in_a_slow_tier_does_not_keep_others_from_the_fast_one(self, opened: list[Tiers]) -> None:
        node, (first, second) = open_tiers(opened)
        second.is_immediate = False
        hanging = node.start_save(HASHES)
        node.clock.offset_s += 50.0
        wait_until(lambda: not node.stats().tiers[1].is_reachable)
        others = [node.start_save(chain(seed, 4), first_block=8) for seed in range(2, 8)]
        found = []
        wait_until(lambda: found.extend(node.connector.poll_transfers()) or len(found) >= len(others))
        assert {result.outcome for result in found} == {TransferOutcome.OK}
        assert len(first.store.blocks) == 32
        second.complete(2)
        assert node.results([hanging])[0].outcome is TransferOutcome.OK

    def test_all_tiers_failing_is_a_fault_of_the_store(self, opened: list[Tiers]) -> None:
        node, children = open_tiers(opened)
        for child in children:
            child.fail_calls = {"load", "save"}
        assert [node.save(HASHES).outcome for _ in range(4)][-1] is TransferOutcome.ERROR

    def test_tier_that_cannot_be_opened_at_start_comes_back_by_itself(self, opened: list[Tiers]) -> None:
        tiers = Tiers(2)
        opened.append(tiers)
        tiers.children[0].is_broken_at_start = True
        node = tiers.open()
        assert node.save(HASHES).outcome is TransferOutcome.OK
        assert node.load(HASHES).outcome is TransferOutcome.OK
        assert [tier.is_reachable for tier in node.stats().tiers] == [False, True]
        node.clock.offset_s += 2.0
        wait_until(lambda: node.stats().tiers[0].is_reachable)  # a child of kind none, in its place

    def test_tier_among_nodes_learns_the_secret_and_each_question_s_sources_and_its_address_is_told(
        self, opened: list[Tiers]
    ) -> None:
        tiers = Tiers(2)
        opened.append(tiers)
        tiers.connector.cluster_secret = b"secret"
        node = tiers.open()
        tiers.children[1].put(HASHES[4:])
        tiers.children[0].put(HASHES[:2])
        lookup = PrefixLookup("request", HASHES, LAYOUT.block_size, ("10.0.0.2:8100",))
        wait_until(lambda: node.connector.get_num_new_matched_tokens(lookup, 0) == 2 * LAYOUT.block_size)
        wait_until(lambda: node.connector.get_num_new_matched_tokens(lookup, 4 * LAYOUT.block_size) == 4 * LAYOUT.block_size)
        for child in tiers.children:
            assert child.cluster_secret == b"secret"
            assert set(child.sources.values()) == {("10.0.0.2:8100",)}
        assert tiers.connector.kv_address == tiers.children[0].kv_address == "memory:1"

    def test_no_tier_that_can_be_opened_ends_the_start(self) -> None:
        tiers = Tiers(2)
        for child in tiers.children:
            child.is_broken_at_start = True
        with pytest.raises(ConnectorError, match="none of the tiers"):
            tiers.open()


class TestOptions:
    def test_options_of_tiers_may_be_mappings_or_dotted(self) -> None:
        own, tiers = parse_tiered_options(
            {"tiers": "shm, cold", "shm.name": "x", "cold": {"connector": "nvme", "path": "/kv"}, "cold.store_threshold": 3}
        )
        assert own.tiers == ("shm", "cold")
        assert [(tier.connector, tier.options, tier.store_threshold) for tier in tiers] == [
            ("shm", {"name": "x"}, 1),
            ("nvme", {"path": "/kv"}, 3),
        ]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({}, r"connector\.options\.tiers"),
            ({"tiers": "shm,shm"}, r"connector\.options\.tiers.*different names"),
            ({"tiers": "tiered"}, r"connector\.options\.tiers"),
            ({"tiers": ["write"]}, r"connector\.options\.tiers"),
            ({"tiers": "a", "a": {"connector": "tiered"}}, r"connector\.options\.a\.connector"),
            ({"tiers": "shm,redis", "shm": {"names": "x"}}, r"connector\.options\.shm\.names"),
            ({"tiers": "shm,nvme"}, r"connector\.options\.nvme\.path"),
            ({"tiers": "shm,rediss"}, r"connector\.options\.tiers.*'rediss'.*names of connectors"),
            ({"tiers": "a", "a": {"connector": "rediss"}}, r"connector\.options\.a\.connector.*'rediss'.*one of"),
            ({"tiers": "none", "nvme.path": "x"}, r"connector\.options\.nvme\.path.*one of the tiers none"),
            ({"tiers": "none", "none": 3}, r"connector\.options\.none.*mapping"),
            ({"tiers": "none", "write": "around"}, r"connector\.options\.write.*through or back"),
            ({"tiers": "none", "handoff": "shm"}, r"connector\.options\.handoff.*one of the tiers none"),
            ({"tiers": "shm,none", "shm.store_threshold": 2}, r"connector\.options\.shm\.store_threshold.*slower"),
            ({"tiers": "shm,none", "none.store_threshold": 0}, r"connector\.options\.none\.store_threshold.*1 to 1000"),
        ],
    )
    def test_option_that_is_not_allowed_is_refused_by_its_full_name(self, options: dict[str, object], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            create_connector("tiered", options, SteppedClock())

    @pytest.mark.parametrize(
        "options",
        [
            {"redis": {"password": "secret"}},
            {"rediss.password": "secret"},
            {"none": "secret"},
            {"tiers": "redis", "redis.pasword": "secret"},
            {"tiers": "redis", "redis": {"url": "http://:secret@host"}},
        ],
    )
    def test_secret_of_a_tier_is_not_shown_where_an_option_is_refused(self, options: dict[str, object]) -> None:
        with pytest.raises(ConfigError) as refusal:
            create_connector("tiered", {"tiers": "none", **options}, SteppedClock())
        assert "secret" not in str(refusal.value)


class TestSeenBlocks:
    def test_count_is_the_number_of_requests(self) -> None:
        seen = SeenBlocks(100)
        for request_id in ("a", "b", "a", "c", "a"):
            seen.note(request_id, HASHES[:2])
        seen.note("d", HASHES[:1])
        assert [seen.count(name) for name in HASHES[:3]] == [4, 3, 0]

    def test_memory_is_bounded_and_parents_are_remembered_longest(self) -> None:
        seen = SeenBlocks(6)
        seen.note("a", HASHES)
        assert len(seen) == 6
        assert [seen.count(name) for name in HASHES] == [1] * 6 + [0] * 2
