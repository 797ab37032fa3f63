"""The medium fails, is full, or vanishes: misses, counted errors, no exception, and it serves again once the medium does."""

from __future__ import annotations

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import Node, chain, wait_until
from core.errors import ConfigError
from core.kv.connector import TransferOutcome


def wait_saved(node: Node, hashes: list[bytes]) -> None:
    """Save until it works: that the store was gone may still have to be noticed."""
    wait_until(lambda: node.save(hashes).outcome is TransferOutcome.OK)


class MediumContract:
    def test_full_medium_where_it_can_be_filled_keeps_what_fits_and_goes_on_when_there_is_room(
        self, harness: ConnectorHarness
    ) -> None:
        with harness.full_medium() as (options, make_room):
            node = harness.open_node_with(options)
            for seed in range(20):
                node.save(chain(seed, 20))  # any result, no exception
                node.load(chain(seed, 20))  # compared byte by byte
            num_stored_when_full = node.stats().store_blocks
            assert num_stored_when_full < 400
            make_room()
            node.clock.offset_s += 60.0
            for seed in range(100, 120):
                node.save(chain(seed, 20))
            assert node.load(chain(119, 20)).num_blocks_ok == 20
            assert node.stats().store_blocks > num_stored_when_full
            assert node.stats().num_open_references == 0
            harness.close_nodes()

    def test_file_size_limit_of_a_store_with_files_costs_blocks_and_nothing_else(self, harness: ConnectorHarness) -> None:
        if not harness.max_file_bytes:
            pytest.skip("this store has no files")
        peer = harness.open_peer(num_blocks=512, max_file_bytes=harness.max_file_bytes)
        for seed in range(12):
            assert peer.ask("save", seed=seed, num_blocks=50)[1] in ("ok", "miss", "error")
        stats = peer.ask("stats")
        assert stats["num_errors"] > 0
        assert 0 < stats["store_blocks"] < 512
        assert peer.ask("load", seed=11, num_blocks=50) == [50, "ok"]
        assert peer.ask("stats")["num_open_references"] == 0
        peer.ask("close")

    def test_store_removed_while_open_is_a_miss_and_is_made_anew(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 8))
        harness.wipe("store")
        assert node.load(chain(1, 8)).num_blocks_ok == 0
        node.clock.offset_s += 60.0
        wait_saved(node, chain(1, 8))
        assert node.lookup(chain(1, 8)) == 8
        assert node.load(chain(1, 8)).num_blocks_ok == 8
        assert node.stats().num_errors > 0

    def test_store_removed_while_two_have_it_open_is_shared_again(self, harness: ConnectorHarness) -> None:
        node, peer = harness.open_node(), harness.open_peer()
        assert peer.ask("ready")
        node.save(chain(1, 8))
        harness.wipe("store")
        wait_until(lambda: node.lookup(chain(1, 8)) == 0)
        peer.ask("load", seed=1, num_blocks=8)
        wait_saved(node, chain(2, 8))
        assert peer.ask("load", seed=2, num_blocks=8) == [8, "ok"]
        peer.ask("close")

    def test_damaged_index_of_a_persistent_store_starts_an_empty_store(self, harness: ConnectorHarness) -> None:
        if not harness.is_persistent:
            pytest.skip("this store ends with its last user")
        node = harness.open_node()
        node.save(chain(1, 8))
        node.connector.close()
        harness.damage_index("store")
        reopened = harness.open_node()
        assert reopened.lookup(chain(1, 8)) == 0
        assert reopened.save(chain(1, 8)).outcome is TransferOutcome.OK
        assert reopened.load(chain(1, 8)).num_blocks_ok == 8

    def test_unknown_option_is_refused_by_name(self, harness: ConnectorHarness) -> None:
        with pytest.raises(ConfigError, match="no_such_option"):
            harness.open_node_with({**harness.options("store", 16), "no_such_option": 1})
