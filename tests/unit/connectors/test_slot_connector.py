"""The connector over slots with media that fail and hang, which real ones do too seldom."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from connectors.contract.node import Node, SteppedClock, chain, wait_until
from connectors.slots.connector import SlotConnector
from connectors.slots.nvme import create_connector
from connectors.slots.store import SlotStore
from core.kv.connector import KVConnector, TransferOutcome
from core.kv.layout import KVLayout
from tests.support.faulty_medium import FaultyMedium


class FaultyNode(Node):
    """A node on nvme whose medium and whose opening can be made to fail."""

    def __init__(self, directory: Path) -> None:
        clock = SteppedClock()
        connector: KVConnector = create_connector({"path": str(directory), "capacity_bytes": "4MiB"}, clock)
        assert isinstance(connector, SlotConnector)
        self.open_fault: OSError | None = None
        original = connector._open_store

        def open_store(layout: KVLayout) -> SlotStore:
            if self.open_fault is not None:
                raise self.open_fault
            store = original(layout)
            self.medium = store.medium = FaultyMedium(store.medium)
            return store

        connector._open_store = open_store  # type: ignore[method-assign]
        super().__init__(connector, clock)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_load_from_a_failing_medium_is_an_error_and_recovers(tmp_path: Path, number: int) -> None:
    node = FaultyNode(tmp_path)
    node.save(chain(1, 4))
    node.medium.fault = OSError(number, "fault")
    assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert node.stats().num_errors == 1
    node.medium.fault = None
    assert node.load(chain(1, 4)).num_blocks_ok == 4
    node.connector.close()


def test_save_to_a_failing_medium_leaks_no_slot_and_recovers(tmp_path: Path) -> None:
    node = FaultyNode(tmp_path)
    node.medium.fault = OSError(errno.EIO, "fault")
    for seed in range(10):
        assert node.save(chain(seed, 60)).outcome is TransferOutcome.ERROR
    assert node.stats().num_open_references == 0 and node.stats().store_blocks == 0
    node.medium.fault = None
    for seed in range(8):
        assert node.save(chain(seed, 60)).outcome is TransferOutcome.OK
    assert node.stats().num_evictions == 0
    node.connector.close()


def test_close_while_the_medium_hangs_returns_and_the_late_end_is_silent(tmp_path: Path) -> None:
    node = FaultyNode(tmp_path)
    node.save(chain(1, 4))
    node.medium.may_go_on.clear()
    transfers = [node.start_load(chain(1, 4)), node.start_save(chain(2, 4), first_block=8)]
    wait_until(lambda: len(node.medium.waiting) == 2)
    node.connector.close()
    assert len(node.medium.waiting) == 2
    assert [result.outcome for result in node.results(transfers)] == [TransferOutcome.CANCELLED] * 2
    node.medium.may_go_on.set()
    wait_until(lambda: not any(thread.name.startswith("kv-nvme") for thread in threading.enumerate()))
    assert node.connector.poll_transfers() == []
    node.connector.close()


def test_deadline_that_passes_during_a_transfer_ends_it_as_a_timeout(tmp_path: Path) -> None:
    node = FaultyNode(tmp_path)
    node.save(chain(1, 4))
    node.save(chain(2, 4))
    node.medium.may_go_on.clear()
    running = [node.start_load(chain(1, 4), first_block=4 * number) for number in range(4)]  # one per worker
    waiting = node.start_load(chain(2, 4), first_block=32)
    wait_until(lambda: len(node.medium.waiting) == 4)
    node.clock.offset_s = 1000.0
    node.medium.may_go_on.set()
    outcomes = [result.outcome for result in node.results([*running, waiting])]
    assert outcomes[-1] is TransferOutcome.TIMEOUT
    node.connector.close()


def test_medium_that_is_broken_at_start_is_opened_later(tmp_path: Path) -> None:
    node = FaultyNode.__new__(FaultyNode)
    original_init = Node.__init__

    def init_with_fault(self: Node, *arguments: object) -> None:
        node.open_fault = OSError(errno.EIO, "no disk yet")
        original_init(self, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Node, "__init__", init_with_fault)
        node.__init__(tmp_path)  # type: ignore[misc]
    assert node.lookup(chain(1, 2)) == 0
    assert node.save(chain(1, 2)).outcome is TransferOutcome.ERROR
    node.open_fault = None
    node.clock.offset_s = 10.0
    assert node.save(chain(1, 2)).outcome is TransferOutcome.OK
    assert node.lookup(chain(1, 2)) == 2
    node.connector.close()
