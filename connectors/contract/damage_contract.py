"""Bytes that are not what was stored are misses, and never block their key."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import Node, chain
from core.kv.connector import TransferOutcome

Damage = Callable[[ConnectorHarness, list[bytes]], None]

DAMAGES: dict[str, Damage] = {
    "header_bit": lambda harness, hashes: harness.flip_bit("store", hashes[2], "header"),
    "payload_bit": lambda harness, hashes: harness.flip_bit("store", hashes[2], "payload"),
    "last_bit": lambda harness, hashes: harness.flip_bit("store", hashes[2], "end"),
    "truncated": lambda harness, hashes: harness.truncate("store", hashes[2]),
    "swapped": lambda harness, hashes: harness.swap("store", hashes[2], hashes[4]),
    "deleted": lambda harness, hashes: harness.delete("store", hashes[2]),
}


class DamageContract:
    @pytest.mark.parametrize("kind", DAMAGES)
    def test_damaged_block_ends_the_prefix(self, harness: ConnectorHarness, kind: str) -> None:
        node, hashes = self._saved(harness)
        DAMAGES[kind](harness, hashes)
        result = node.load(hashes)
        assert result.num_blocks_ok in ({0, 1, 2} if kind == "truncated" else {2})  # a cut store may lose more than that block
        assert result.outcome in (TransferOutcome.MISS, TransferOutcome.CORRUPT)

    @pytest.mark.parametrize("kind", DAMAGES)
    def test_damaged_block_is_forgotten_and_can_be_saved_again(self, harness: ConnectorHarness, kind: str) -> None:
        node, hashes = self._saved(harness)
        DAMAGES[kind](harness, hashes)
        first_missing = node.load(hashes).num_blocks_ok
        assert node.lookup(hashes) <= first_missing
        while node.lookup(hashes) < 6:  # what else was damaged is found out one load at a time
            num_known = node.lookup(hashes)
            assert node.save(hashes).outcome is TransferOutcome.OK
            assert node.load(hashes).num_blocks_ok > num_known
        assert node.load(hashes).outcome is TransferOutcome.OK

    def test_damage_to_a_persistent_store_while_nobody_has_it_open_is_a_miss(self, harness: ConnectorHarness) -> None:
        if not harness.is_persistent:
            pytest.skip("this store ends with its last user")
        node, hashes = self._saved(harness)
        node.connector.close()
        harness.flip_bit("store", hashes[0], "payload")
        harness.swap("store", hashes[2], hashes[3])
        reopened = harness.open_node()
        assert reopened.load(hashes[1:]).num_blocks_ok == 1
        assert reopened.load(hashes).num_blocks_ok == 0

    def test_damage_of_one_chain_leaves_others_alone(self, harness: ConnectorHarness) -> None:
        node, hashes = self._saved(harness)
        others = chain(2, 6)
        node.save(others)
        harness.flip_bit("store", hashes[0], "payload")
        assert node.load(hashes).num_blocks_ok == 0
        assert node.load(others).num_blocks_ok == 6

    def _saved(self, harness: ConnectorHarness) -> tuple[Node, list[bytes]]:
        node = harness.open_node()
        hashes = chain(1, 6)
        assert node.save(hashes).outcome is TransferOutcome.OK
        return node, hashes
