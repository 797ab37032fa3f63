"""Several processes on one store: what one saves another loads, and one that is killed takes nothing with it."""

from __future__ import annotations

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import chain, wait_until
from core.kv.connector import TransferOutcome


class ProcessContract:
    def test_saved_blocks_are_visible_to_another_process_before_the_result(self, harness: ConnectorHarness) -> None:
        node, peer = harness.open_node(), harness.open_peer()
        for seed in range(5):
            node.save(chain(seed, 8))
            assert peer.ask("lookup", seed=seed, num_blocks=8) == 8
            assert peer.ask("load", seed=seed, num_blocks=8) == [8, "ok"]
        assert peer.ask("save", seed=50, num_blocks=8) == [8, "ok"]
        assert node.lookup(chain(50, 8)) == 8
        assert node.load(chain(50, 8)).num_blocks_ok == 8

    def test_far_behind_process_catches_up(self, harness: ConnectorHarness) -> None:
        node, peer = harness.open_node(num_blocks=2048), harness.open_peer(num_blocks=2048)
        assert peer.ask("lookup", seed=0, num_blocks=8) == 0
        for seed in range(24):
            node.save(chain(seed, 64))
        assert peer.ask("lookup", seed=23, num_blocks=64) == 64
        assert peer.ask("load", seed=0, num_blocks=64) == [64, "ok"]

    def test_two_processes_saving_the_same_blocks_both_succeed_and_keep_one_copy(self, harness: ConnectorHarness) -> None:
        first, second = harness.open_peer(), harness.open_peer()
        assert first.ask("ready") and second.ask("ready")
        for seed in range(8):
            for peer in (first, second):
                peer.send("save", seed=seed, num_blocks=16)
            assert [first.answer(), second.answer()] == [[16, "ok"]] * 2
        node = harness.open_node()
        assert [node.load(chain(seed, 16)).num_blocks_ok for seed in range(8)] == [16] * 8
        if harness.is_one_place:
            assert node.stats().store_blocks == 8 * 16

    def test_processes_saving_and_loading_under_pressure_never_see_wrong_bytes(self, harness: ConnectorHarness) -> None:
        peers = [harness.open_peer(num_blocks=100) for _ in range(2)]
        for number, peer in enumerate(peers):
            peer.send("save_for_ever", first_seed=1000 * number + 1)  # compares what it loads, and dies of a wrong byte
        node = harness.open_node(num_blocks=100)
        for _ in range(15):
            for peer in peers:
                seed = peer.answer()
                assert node.load(chain(seed, 32)).outcome in (TransferOutcome.OK, TransferOutcome.MISS)
        for peer in peers:
            peer.kill()
        self._check_whole_capacity_is_usable(harness, 100)

    def test_killed_writer_leaves_a_store_that_is_exact_and_whole(self, harness: ConnectorHarness) -> None:
        node = harness.open_node(num_blocks=100)
        for attempt in range(4):
            peer = harness.open_peer(num_blocks=100)
            peer.send("save_for_ever", first_seed=1000 * attempt + 1)
            seeds = [peer.answer() for _ in range(attempt + 1)]
            peer.kill()
            for seed in range(max(seeds[0], seeds[-1] - 2), seeds[-1] + 3):
                assert node.load(chain(seed, 32)).outcome in (TransferOutcome.OK, TransferOutcome.MISS)
        self._check_whole_capacity_is_usable(harness, 100)

    def test_store_after_all_its_processes_were_killed_starts_clean(self, harness: ConnectorHarness) -> None:
        peers = [harness.open_peer(num_blocks=100), harness.open_peer("other", num_blocks=100)]
        for peer in peers:
            peer.ask("save", seed=1, num_blocks=16)
            peer.send("save_for_ever", first_seed=2)
            peer.answer()
        for peer in peers:
            peer.kill()
        node = harness.open_node(num_blocks=100)
        assert node.load(chain(1, 16)).outcome in (TransferOutcome.OK, TransferOutcome.MISS)
        self._check_whole_capacity_is_usable(harness, 100)  # and, by the fixture: nothing of the other store is left either
        if harness.is_persistent:
            harness.open_node("other", num_blocks=100)

    def test_killed_reader_does_not_disturb_the_others(self, harness: ConnectorHarness) -> None:
        node, peer = harness.open_node(), harness.open_peer()
        node.save(chain(1, 16))
        peer.send("save_for_ever", first_seed=10)
        peer.answer()
        peer.kill()
        assert node.load(chain(1, 16)).outcome in (TransferOutcome.OK, TransferOutcome.MISS)  # a late kill lets it be evicted
        assert node.save(chain(1, 16)).outcome is TransferOutcome.OK
        assert node.load(chain(1, 16)).num_blocks_ok == 16

    def test_reopened_store_has_its_blocks_if_it_is_persistent(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 16))
        node.connector.close()
        reopened = harness.open_node()
        expected = 16 if harness.is_persistent else 0
        assert reopened.lookup(chain(1, 16)) == expected
        assert reopened.load(chain(1, 16)).num_blocks_ok == expected

    def test_store_lives_on_when_one_of_its_users_leaves(self, harness: ConnectorHarness) -> None:
        node, peer = harness.open_node(), harness.open_peer()
        node.save(chain(1, 16))
        assert peer.ask("load", seed=1, num_blocks=16) == [16, "ok"]
        node.connector.close()
        expected = [16, "ok"] if harness.is_one_place else [0, "miss"]
        assert peer.ask("load", seed=1, num_blocks=16) == expected
        assert peer.ask("save", seed=2, num_blocks=16) == [16, "ok"]
        peer.ask("close")

    def _check_whole_capacity_is_usable(self, harness: ConnectorHarness, num_blocks: int) -> None:
        """No slot is lost to the dead: the store takes as many blocks as a fresh one."""
        node, fresh = harness.open_node(num_blocks=num_blocks), harness.open_node("fresh", num_blocks=num_blocks)
        wait_until(lambda: fresh.stats().capacity_bytes > 0)
        num_stored = []
        for user in (node, fresh):
            for seed in range(500, 500 + num_blocks // 16 + 2):
                assert user.save(chain(seed, 16)).outcome is TransferOutcome.OK
            num_stored.append(user.stats().store_blocks)
        if num_stored[0] < num_stored[1]:
            pytest.fail(f"{num_stored[0]} blocks fit, {num_stored[1]} into a fresh store")
