"""Hits are the longest prefix and nothing else, keys partition, and bytes come back as they went."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import EIGHT_BIT_LAYOUT, LAYOUT, PAGES_LAYOUT, REAL_LAYOUT, block_hashes, chain, content_of
from core.kv.connector import PrefixLookup, TransferOutcome
from core.kv.layout import KVLayout

BLOCK = LAYOUT.block_size


class PrefixContract:
    def test_lookup_empty_store_matches_nothing(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        assert node.lookup(chain(1, 4)) == 0
        assert node.lookup([]) == 0

    @pytest.mark.parametrize("num_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK + 3])
    def test_prompt_of_any_length_saved_matches_its_full_blocks(self, harness: ConnectorHarness, num_tokens: int) -> None:
        node = harness.open_node()
        hashes = block_hashes(1, num_tokens)
        assert len(hashes) == num_tokens // BLOCK
        assert node.save(hashes).outcome is TransferOutcome.OK
        assert node.lookup(hashes) == len(hashes)
        assert node.load(hashes).num_blocks_ok == len(hashes)

    def test_lookup_longer_prompt_matches_the_common_prefix(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 9)
        node.save(hashes[:5])
        assert node.lookup(hashes) == 5
        assert node.lookup(hashes[:3]) == 3

    def test_lookup_hole_in_the_middle_ends_the_prefix(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 6)
        node.save([*hashes[:2], *hashes[3:]])
        assert node.lookup(hashes) == 2

    def test_lookup_first_block_missing_matches_nothing(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 4)
        node.save(hashes[1:])
        assert node.lookup(hashes) == 0

    def test_lookup_after_computed_tokens_counts_only_what_is_new(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 6)
        node.save([*hashes[:2], *hashes[3:5]])
        assert [node.lookup(hashes, num_computed) for num_computed in range(7)] == [2, 1, 0, 2, 1, 0, 0]

    def test_lookup_other_block_size_matches_nothing(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 4)
        node.save(hashes)
        assert node.connector.get_num_new_matched_tokens(PrefixLookup("request", hashes, 2 * BLOCK), 0) in (0, None)

    @pytest.mark.parametrize(
        "parts",
        [{"model_fingerprint": b"other"}, {"cache_salt": "tenant"}, {"adapter_fingerprint": b"lora"}],
        ids=lambda parts: next(iter(parts)),
    )
    def test_same_tokens_in_another_namespace_match_nothing(self, harness: ConnectorHarness, parts: dict[str, Any]) -> None:
        node = harness.open_node()
        ours, theirs = block_hashes(1, 4 * BLOCK), block_hashes(1, 4 * BLOCK, **parts)
        node.save(ours)
        assert node.lookup(theirs) == 0
        assert node.load(theirs).num_blocks_ok == 0
        node.save(theirs)
        assert node.load(ours).num_blocks_ok == node.load(theirs).num_blocks_ok == 4

    @pytest.mark.parametrize(
        "other",
        [
            KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=32, dtype="bfloat16"),
            KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=32, dtype="float16"),
            KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=64, dtype="fp8"),
            KVLayout(num_layers=2, block_size=4, num_kv_heads=2, head_dim=60, dtype="int8"),
            KVLayout(num_layers=1, block_size=4, num_kv_heads=4, head_dim=16, dtype="float32"),
            KVLayout(num_layers=2, block_size=4, num_kv_heads=4, head_dim=16, dtype="float32"),
        ],
        ids=["bfloat16", "float16", "fp8", "int8", "heads", "larger"],
    )
    def test_same_hash_under_another_layout_is_never_loaded(self, harness: ConnectorHarness, other: KVLayout) -> None:
        """Hashes hold the layout already; should one be forged or miscomputed, the store must still not hand the bytes over."""
        if not harness.takes(other):
            return
        node, stranger = harness.open_node(), harness.open_node(layout=other)
        hashes = chain(1, 4)
        node.save(hashes)
        assert stranger.load(hashes).num_blocks_ok == 0
        assert stranger.save(hashes).outcome is TransferOutcome.OK
        assert node.load(hashes).num_blocks_ok == stranger.load(hashes).num_blocks_ok == 4

    @pytest.mark.parametrize(
        "layout", [LAYOUT, PAGES_LAYOUT, EIGHT_BIT_LAYOUT, REAL_LAYOUT], ids=["padded", "pages", "scales", "smollm2"]
    )
    def test_save_then_load_is_bit_exact(self, harness: ConnectorHarness, layout: KVLayout) -> None:
        if not harness.takes(layout):
            return
        node = harness.open_node(num_blocks=2048, layout=layout)
        hashes = chain(1, 20, layout)
        assert node.save(hashes).moved_bytes == 20 * layout.block_bytes
        result = node.load(hashes)  # compares every byte
        assert (result.outcome, result.num_blocks_ok, result.moved_bytes) == (TransferOutcome.OK, 20, 20 * layout.block_bytes)

    def test_load_writes_only_into_its_own_blocks(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 8)
        node.save(hashes)
        marker = bytes(range(256)) * (LAYOUT.block_bytes // 256)
        for block_id in (0, 1, 10, 11):
            node.pool.block(block_id)[:] = marker
        node.results([node.start_load(hashes, first_block=2)])
        assert [bytes(node.pool.block(block_id)) == marker for block_id in (0, 1, 10, 11)] == [True] * 4

    def test_load_and_save_of_scattered_blocks_are_exact(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 6)
        positions = [5, 0, 3, 1, 4, 2]
        node.save([hashes[position] for position in positions])
        assert node.load(hashes).num_blocks_ok == 6
        assert node.load(hashes[::-1]).num_blocks_ok == 6

    def test_load_with_a_hole_ends_there_as_a_miss(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 6)
        node.save([*hashes[:3], *hashes[4:]])
        result = node.load(hashes)
        assert (result.num_blocks_ok, result.outcome) == (3, TransferOutcome.MISS)

    def test_save_of_stored_blocks_moves_nothing(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 6)
        node.save(hashes[:4])
        again, longer = node.save(hashes[:4]), node.save(hashes)
        assert (again.outcome, again.moved_bytes) == (TransferOutcome.OK, 0)
        assert (longer.outcome, longer.moved_bytes) == (TransferOutcome.OK, 2 * LAYOUT.block_bytes)
        assert node.load(hashes).num_blocks_ok == 6

    def test_save_of_one_block_twice_in_a_transfer_keeps_one(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        first, second = chain(1, 2)
        assert node.save([first, first, second]).outcome is TransferOutcome.OK
        assert node.load([first, second, first]).num_blocks_ok == 3

    def test_contents_of_distinct_blocks_differ(self) -> None:
        """The suite's own footing: were contents alike, swapped blocks would pass unseen."""
        assert len({content_of(name) for name in chain(1, 50)}) == 50
