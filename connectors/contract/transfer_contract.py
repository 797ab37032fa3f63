"""Every started transfer ends with exactly one result, in whatever order things happen, and close() always returns."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable

import pytest

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import HANG_S, NUM_POOL_BLOCKS, Node, chain, wait_result
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult

EVENTS = ("load_hit", "load_miss", "save", "duplicate", "expired", "poll", "close")
# Every order of four events out of the seven: 840. Each third one is tried, from another start in each of three tests.
ORDERS = list(itertools.permutations(EVENTS, 4))


class TransferContract:
    @pytest.mark.parametrize("start", range(3))
    def test_any_order_of_events_gives_one_result_each(self, harness: ConnectorHarness, start: int) -> None:
        saver = harness.open_node()
        saver.save(chain(1, 4))
        for order in ORDERS[start::21]:
            play(harness.open_node(), order)

    def test_many_transfers_at_once_end_once_each(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        chains = [chain(seed, 2) for seed in range(16)]
        saves = [node.start_save(hashes, first_block=2 * seed) for seed, hashes in enumerate(chains)]
        assert {result.outcome for result in node.results(saves)} == {TransferOutcome.OK}
        loads = [node.start_load(hashes, first_block=2 * seed) for seed, hashes in enumerate(chains)]
        assert {result.num_blocks_ok for result in node.results(loads)} == {2}
        assert node.connector.poll_transfers() == []
        assert node.stats().num_open_references == 0

    def test_transfer_of_no_blocks_is_ok(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        assert node.load([]).outcome is node.save([]).outcome is TransferOutcome.OK

    def test_transfer_past_its_deadline_is_not_begun(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        hashes = chain(1, 4)
        late = node.transfer(TransferDirection.SAVE, hashes, timeout_s=-1.0)
        node.connector.start_save(late)
        assert node.results([late])[0].outcome is TransferOutcome.TIMEOUT
        assert node.lookup(hashes) == 0
        node.save(hashes)
        node.clock.offset_s = 2 * HANG_S
        late = node.transfer(TransferDirection.LOAD, hashes, timeout_s=-1.0)
        node.connector.start_load(late)
        assert node.results([late])[0].outcome is TransferOutcome.TIMEOUT

    def test_duplicate_start_does_no_harm(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 4))
        transfer = node.start_load(chain(1, 4))
        for _ in range(3):
            node.connector.start_load(transfer)
        found: list[TransferResult] = []
        wait_result(node, found, lambda: bool(found))
        assert node_goes_on(node, found)
        assert {result.transfer_id for result in found} == {transfer.transfer_id}
        assert {result.outcome for result in found} == {TransferOutcome.OK}
        assert 1 <= len(found) <= 4

    def test_start_after_close_is_cancelled(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 4))
        node.connector.close()
        results = node.results([node.start_load(chain(1, 4)), node.start_save(chain(2, 4), first_block=8)])
        assert [result.outcome for result in results] == [TransferOutcome.CANCELLED] * 2

    def test_lookup_after_close_matches_nothing(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 4))
        node.connector.close()
        assert node.lookup(chain(1, 4)) == 0

    def test_close_during_transfers_gives_every_result_and_leaves_the_pool_alone(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 16))
        transfers = [node.start_load(chain(1, 16), first_block=16 * (number % 4)) for number in range(24)]
        transfers += [node.start_save(chain(100 + number, 16), first_block=16) for number in range(8)]
        within_a_hang(node.connector.close)
        before = bytes(node.pool.buffer)
        found = Counter(result.transfer_id for result in node.connector.poll_transfers())
        assert found == Counter(transfer.transfer_id for transfer in transfers)
        assert node.connector.poll_transfers() == []
        assert bytes(node.pool.buffer) == before
        assert node.stats().num_open_references == 0

    def test_close_twice_and_from_two_threads_returns(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.start_save(chain(1, 16))
        threads = [threading.Thread(target=node.connector.close, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG_S)
        within_a_hang(node.connector.close)
        assert not any(thread.is_alive() for thread in threads)
        assert len(node.connector.poll_transfers()) == 1

    def test_close_of_an_unused_connector_returns(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        within_a_hang(node.connector.close)
        assert node.connector.poll_transfers() == []

    def test_block_ids_outside_the_pool_are_an_error_result(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        node.save(chain(1, 1))
        wild = Transfer(900, TransferDirection.LOAD, "wild", (NUM_POOL_BLOCKS,), tuple(chain(1, 1)), node.clock.now_s() + HANG_S)
        node.connector.start_load(wild)
        found: list[TransferResult] = []
        wait_result(node, found, lambda: bool(found))
        assert found[0].outcome is TransferOutcome.ERROR
        assert node_goes_on(node, [])

    def test_on_result_is_called_after_the_result_is_there(self, harness: ConnectorHarness) -> None:
        node = harness.open_node()
        found: list[TransferResult] = []
        is_called = threading.Event()

        def wake() -> None:
            found.extend(node.connector.poll_transfers())
            is_called.set()

        node.connector.on_result = wake
        transfer = node.start_save(chain(1, 2))
        assert is_called.wait(HANG_S)
        assert [result.transfer_id for result in found] == [transfer.transfer_id]


def play(node: Node, order: tuple[str, ...]) -> None:
    """One order of events on one node, then close: each id has its one result, a duplicated one perhaps another."""
    started: list[Transfer] = []
    found: Counter[int] = Counter()

    def start(direction: TransferDirection, seed: int, timeout_s: float = HANG_S) -> None:
        transfer = node.transfer(direction, chain(seed, 4), timeout_s=timeout_s, first_block=4 * len(started))
        node.fill(transfer)
        started.append(transfer)
        (node.connector.start_load if direction is TransferDirection.LOAD else node.connector.start_save)(transfer)

    actions: dict[str, Callable[[], object]] = {
        "load_hit": lambda: start(TransferDirection.LOAD, 1),
        "load_miss": lambda: start(TransferDirection.LOAD, 999),
        "save": lambda: start(TransferDirection.SAVE, 2),
        "duplicate": lambda: node.connector.start_load(started[-1]) if started else None,
        "expired": lambda: start(TransferDirection.LOAD, 1, timeout_s=-1.0),
        "poll": lambda: found.update(result.transfer_id for result in node.connector.poll_transfers()),
        "close": node.connector.close,
    }
    for event in order:
        actions[event]()
    node.connector.close()
    found.update(result.transfer_id for result in node.connector.poll_transfers())
    assert set(found) == {transfer.transfer_id for transfer in started}, order
    assert sum(found.values()) <= len(started) + ("duplicate" in order), order
    assert node.stats().num_open_references == 0, order


def node_goes_on(node: Node, found: list[TransferResult]) -> bool:
    """Whether a node still serves: a further transfer ends; results of earlier ones are added to found."""
    transfer = node.start_save(chain(77, 1), first_block=40)
    wait_result(node, found, lambda: any(result.transfer_id == transfer.transfer_id for result in found))
    (result,) = [result for result in found if result.transfer_id == transfer.transfer_id]
    found.remove(result)
    return result.outcome is TransferOutcome.OK


def within_a_hang(call: Callable[[], None]) -> None:
    """Call, on a thread of its own, so that a hang fails the test instead of stopping the suite."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "close() hangs"
