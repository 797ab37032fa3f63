"""A store that is too small: bounded, least recently used out first, whole prefixes kept. And any history against a dict."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import Node, chain
from core.kv.connector import TransferOutcome

CAPACITY = 48
STORE_NUMBERS = itertools.count()

operations = st.lists(
    st.tuples(st.sampled_from(["save", "load", "lookup", "reopen"]), st.integers(0, 5), st.integers(0, 10), st.integers(1, 12)),
    max_size=25,
)


class PressureContract:
    def test_saving_more_than_fits_stays_within_capacity(self, harness: ConnectorHarness) -> None:
        node = harness.open_node(num_blocks=CAPACITY)
        for seed in range(12):
            assert node.save(chain(seed, 16)).outcome is TransferOutcome.OK
            stats = node.stats()
            assert stats.store_bytes <= stats.capacity_bytes
        assert node.stats().num_evictions > 0
        assert node.load(chain(11, 16)).num_blocks_ok == 16

    def test_recently_used_blocks_survive_pressure(self, harness: ConnectorHarness) -> None:
        node = harness.open_node(num_blocks=CAPACITY)
        node.save(chain(0, 8), "favourite")
        for seed in range(1, 20):
            node.save(chain(seed, 8), f"request {seed}")
            assert node.load(chain(0, 8), "favourite").num_blocks_ok == 8
        assert node.lookup(chain(1, 8)) == 0

    def test_chain_longer_than_the_store_keeps_its_head(self, harness: ConnectorHarness) -> None:
        node = harness.open_node(num_blocks=CAPACITY)
        hashes = chain(1, 2 * CAPACITY)
        for start in range(0, len(hashes), 8):
            result = node.save(hashes[start : start + 8], "long")
            assert result.outcome in (TransferOutcome.OK, TransferOutcome.MISS)
        num_stored = node.stats().store_blocks
        assert num_stored >= CAPACITY // 2
        assert node.lookup(hashes) >= harness.min_usable_fraction * num_stored

    def test_chunked_saves_under_pressure_keep_usable_prefixes(self, harness: ConnectorHarness) -> None:
        """Saved chunk by chunk and turn by turn, as engines do: what survives must still be reached from its first block."""
        node = harness.open_node(num_blocks=CAPACITY)
        chains = [chain(seed, 12) for seed in range(12)]
        for first in range(0, len(chains), 3):
            for start in range(0, 12, 3):
                for seed in range(first, first + 3):
                    node.lookup(chains[seed], start, request_id=f"request {seed}")
                    node.save(chains[seed][start : start + 3], f"request {seed}")
        num_usable = sum(node.lookup(hashes) for hashes in chains)
        assert num_usable >= harness.min_usable_fraction * node.stats().store_blocks
        assert num_usable >= CAPACITY // 2

    def test_transfers_of_evicted_blocks_at_once_are_exact_or_misses(self, harness: ConnectorHarness) -> None:
        node, other = harness.open_node(num_blocks=CAPACITY), harness.open_node(num_blocks=CAPACITY)
        for seed in range(30):
            save = node.start_save(chain(seed, 16))
            loads = [other.start_load(chain(max(0, seed - back), 16), first_block=16 * back) for back in range(4)]
            node.results([save])
            other.results(loads)  # compares what was loaded
        assert node.lookup(chain(29, 16)) > 0

    @pytest.mark.parametrize("capacity", [200, 20], ids=["roomy", "tight"])
    def test_any_history_agrees_with_a_plain_dict(self, harness: ConnectorHarness, capacity: int) -> None:
        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operations)
        def run(history: list[tuple[str, int, int, int]]) -> None:
            replay(harness, f"store{next(STORE_NUMBERS)}", capacity, history)

        run()


def replay(harness: ConnectorHarness, store: str, capacity: int, history: list[tuple[str, int, int, int]]) -> None:
    """Play a history. In a roomy store hits must equal the oracle's; in a tight one they may be fewer, never more."""
    saved: set[bytes] = set()
    is_roomy = capacity > 100
    keeper = harness.open_node(store, capacity)  # keeps the store alive, where it ends with its last user
    node: Node = harness.open_node(store, capacity)
    for name, seed, start, num_blocks in history:
        hashes = chain(seed, 22)
        if name == "save":
            part = hashes[start : start + num_blocks]
            num_ok = node.save(part, f"request {seed}").num_blocks_ok
            assert num_ok == len(part) or not is_roomy
            saved.update(part[:num_ok])
        elif name == "reopen":
            node.connector.close()
            node = harness.open_node(store, capacity)
        else:
            expected = len(list(itertools.takewhile(saved.__contains__, hashes[start:])))
            found = node.lookup(hashes, start) if name == "lookup" else node.load(hashes[start:]).num_blocks_ok
            assert found == expected if is_roomy else found <= expected
    for open_node in (node, keeper):
        assert open_node.stats().num_open_references == 0
        open_node.connector.close()
