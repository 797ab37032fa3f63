"""The index against a plain dict of sets, over random histories."""

import random
from collections import defaultdict

import pytest

from router import prefix_index
from router.prefix_index import _STRIDE, _WALKED_BLOCKS, EXPECTED_FOR_S, PrefixIndex

CHAINS = [[bytes([chain, place]) * 8 for place in range(12)] for chain in range(4)]


def leading(block_hashes: list[bytes], held: set[bytes]) -> int:
    """How many of the first are held, without a gap."""
    count = 0
    while count < len(block_hashes) and block_hashes[count] in held:
        count += 1
    return count


class Oracle:
    """A set of blocks per node and per medium."""

    def __init__(self) -> None:
        self.own: dict[str, set[bytes]] = defaultdict(set)
        self.stored: dict[str, set[bytes]] = defaultdict(set)

    def of(self, node_id: str, medium: str) -> set[bytes]:
        return self.stored[medium] if medium else self.own[node_id]

    def match(self, block_hashes: list[bytes]) -> dict[str, int]:
        found = {node_id: leading(block_hashes, held) for node_id, held in self.own.items()}
        return {node_id: count for node_id, count in found.items() if count}


@pytest.mark.parametrize("seed", range(30))
def test_prefix_index_random_history_answers_as_sets_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "_SWEPT_PER_CALL", 5)  # sweeps go on while other things happen
    chance = random.Random(seed)
    index, oracle = PrefixIndex(), Oracle()
    node_ids = [f"node-{number}" for number in range(6)]
    for _ in range(400):
        node_id, medium = chance.choice(node_ids), chance.choice(["", "", "disk", "far"])
        chain = chance.choice(CHAINS)
        first = chance.choice([0, 0, chance.randrange(12)])
        blocks = chain[first : chance.randint(first, 12)]
        action = chance.choice(["store", "store", "store", "remove", "drop"])
        if action == "store":
            index.store(node_id, blocks, medium)
            oracle.of(node_id, medium).update(blocks)
        elif action == "remove":
            index.remove(node_id, blocks, medium)
            oracle.of(node_id, medium).difference_update(blocks)
        elif chance.random() < 0.3:
            index.drop_node(node_id)
            oracle.own.pop(node_id, None)
        for asked in CHAINS:
            assert index.match(asked) == oracle.match(asked)
            assert index.match_stored(asked) == leading(asked, set().union(*oracle.stored.values()))
        assert index.num_blocks(node_id) == len(oracle.own[node_id])


def test_prefix_index_nothing_asked_matches_nothing() -> None:
    index = PrefixIndex()
    index.store("a", CHAINS[0])
    index.store("a", CHAINS[0], "disk")
    assert (index.match([]), index.match_stored([])) == ({}, 0)


def test_prefix_index_full_node_keeps_what_it_had_and_believes_no_more() -> None:
    index = PrefixIndex(max_blocks_per_node=5)
    index.store("a", CHAINS[0])
    index.store("b", CHAINS[1][:3])
    assert index.match(CHAINS[0]) == {"a": 5}
    index.remove("a", CHAINS[0][4:5])
    index.store("a", CHAINS[1])
    assert index.match(CHAINS[1]) == {"a": 1, "b": 3}
    assert index.num_blocks("a") == 5


def test_prefix_index_expected_blocks_continue_those_that_are_there_until_their_time_is_over() -> None:
    index = PrefixIndex()
    index.store("a", CHAINS[0][:4])
    index.expect("a", CHAINS[0][:9], now_s=100.0)
    index.expect("b", CHAINS[0][:2], now_s=101.0)
    assert index.match(CHAINS[0], is_expecting=True) == {"a": 9, "b": 2}
    assert index.match(CHAINS[0]) == {"a": 4}
    index.expire(100.0 + EXPECTED_FOR_S)
    assert index.match(CHAINS[0], is_expecting=True) == {"a": 9, "b": 2}
    index.expire(100.0 + 2 * EXPECTED_FOR_S)
    assert index.match(CHAINS[0], is_expecting=True) == {"a": 4}


def test_prefix_index_full_store_forgets_the_oldest() -> None:
    index = PrefixIndex(max_blocks_per_store=12)
    index.store("a", CHAINS[0], "disk")
    index.store("b", CHAINS[0][:6], "disk")
    index.store("b", CHAINS[1][:6], "disk")
    index.drop_node("a")
    assert [index.match_stored(chain) for chain in CHAINS[:2]] == [6, 6]


def test_prefix_index_dropped_node_leaves_nothing_to_the_next_one_of_its_name() -> None:
    index = PrefixIndex()
    index.store("a", CHAINS[0])
    index.expect("a", CHAINS[1], now_s=0.0)
    index.drop_node("a")
    index.store("a", CHAINS[2][:1])
    assert [index.match(chain, is_expecting=True) for chain in CHAINS[:3]] == [{}, {}, {"a": 1}]


def test_prefix_index_many_restarts_leave_no_entries_and_reuse_bits() -> None:
    index = PrefixIndex()
    for _ in range(500):
        index.store("a", CHAINS[0])
        index.drop_node("a")
    index.store("b", CHAINS[1][:1])
    index.store("b", CHAINS[1][:1])
    assert list(index._masks) == CHAINS[1][:1]
    assert index._live_mask.bit_length() <= 4


@pytest.mark.parametrize("seed", range(20))
def test_prefix_index_long_prompts_are_searched_to_the_same_end(seed: int) -> None:
    chance = random.Random(seed)
    prompt = [place.to_bytes(16, "big") for place in range(3000)]
    index = PrefixIndex()
    num_told: dict[str, int] = {}
    num_expected: dict[str, int] = {}
    for number in range(chance.randint(1, 12)):
        node_id = f"node-{number}"
        num_expected[node_id] = chance.choice([0, 5, 63, 64, 65, 127, 128, 129, 3000, chance.randrange(3000)])
        num_told[node_id] = chance.randint(0, num_expected[node_id])
        index.store(node_id, prompt[: num_told[node_id]])
        index.expect(node_id, prompt[: num_expected[node_id]], now_s=0.0, num_known=num_told[node_id])
    for num_asked in (0, 1, 63, 64, 65, 127, 1000, 3000):
        for unknown in (0, 1, 500):
            asked = prompt[:num_asked] + [bytes([255]) * 15 + bytes([number % 256]) for number in range(unknown)]
            there = {node_id: min(told, num_asked) for node_id, told in num_told.items() if min(told, num_asked)}
            assert index.match(asked) == there
            for node_id, count in num_expected.items():
                shared = min(count, num_asked)
                believed = shared if shared <= _WALKED_BLOCKS else shared // _STRIDE * _STRIDE
                if believed > there.get(node_id, 0):
                    there[node_id] = believed
            assert index.match(asked, is_expecting=True) == there
