"""Write-back and prefetch over real stores: shared memory over files. Node compares every byte that is loaded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector
from connectors.slots.store import slot_bytes
from connectors.tiered.connector import TieredConnector
from core.errors import ConfigError
from core.kv.connector import TransferOutcome

NUM_UPPER_BLOCKS = 48


class Stores:
    """A store in shared memory over one on disk, and nodes on either or both."""

    def __init__(self, folder: Path) -> None:
        name = f"{folder.parent.name[-12:]}-{folder.name[-30:]}"
        self.upper = {"name": name, "capacity_bytes": self._capacity_bytes(NUM_UPPER_BLOCKS)}
        self.lower = {"path": str(folder / "kv"), "capacity_bytes": self._capacity_bytes(1024)}
        self._nodes: list[Node] = []

    def open_tiers(self, **options: Any) -> tuple[Node, TieredConnector]:
        """With room for 16 blocks on their way."""
        staging_bytes = 16 * LAYOUT.block_stride_bytes
        given = {"tiers": "shm,nvme", "shm": self.upper, "nvme": self.lower, "staging_bytes": staging_bytes, **options}
        node = self._open("tiered", given)
        assert isinstance(node.connector, TieredConnector)
        return node, node.connector

    def open_upper(self) -> Node:
        return self._open("shm", self.upper)

    def open_lower(self) -> Node:
        return self._open("nvme", self.lower)

    def close(self) -> None:
        for node in self._nodes:
            node.connector.close()

    def _open(self, name: str, options: dict[str, Any]) -> Node:
        clock = SteppedClock()
        self._nodes.append(Node(create_connector(name, options, clock), clock))
        return self._nodes[-1]

    def _capacity_bytes(self, num_blocks: int) -> int:
        return num_blocks * (slot_bytes(LAYOUT) + 64) + 72 * 1024


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path)
    yield stores
    stores.close()


class TestWriteBack:
    def test_blocks_go_down_when_they_get_cold_and_not_before(self, stores: Stores) -> None:
        node, connector = stores.open_tiers(write="back")
        node.save(chain(0, 8))
        lower = stores.open_lower()
        for seed in range(1, 5):
            node.save(chain(seed, 8))
        assert lower.stats().store_blocks == 0
        node.save(chain(5, 8))  # it is full now
        tail = chain(0, 8)[2:]  # an eighth
        wait_until(lambda: lower.lookup(tail, request_id="cold") == 6)
        assert lower.load(tail).outcome is TransferOutcome.OK
        assert lower.lookup(chain(5, 8), request_id="hot") == 0
        assert connector.stats().tiers[0].store_blocks == NUM_UPPER_BLOCKS

    @pytest.mark.parametrize("eviction", ["lru", "arc", "prefix"])
    def test_everything_saved_at_a_bearable_pace_is_hit_later(self, stores: Stores, eviction: str) -> None:
        stores.upper["eviction"] = eviction
        node, connector = stores.open_tiers(write="back")
        assert connector._mover is not None
        for seed in range(30):
            node.save(chain(seed, 4))
            if (seed + 1) * 4 >= NUM_UPPER_BLOCKS:  # until the coldest eighth is below, too
                wait_until(lambda: all(name in lower_names(connector) for name in coldest(connector)))
        assert [node.lookup(chain(seed, 4), request_id=f"later {seed}") for seed in range(30)] == [4] * 30
        assert [node.load(chain(seed, 4)).num_blocks_ok for seed in range(30)] == [4] * 30
        assert connector._mover.num_demoted_blocks < 130  # once each, more or less

    def test_cold_blocks_stay_cold_by_being_copied(self, stores: Stores) -> None:
        node, connector = stores.open_tiers(write="back")
        for seed in range(6):
            node.save(chain(seed, 8))
        before = coldest(connector)
        assert connector._mover is not None
        mover = connector._mover
        wait_until(lambda: mover.num_demoted_blocks >= len(before))
        assert coldest(connector) == before

    def test_last_user_hands_down_at_its_end_what_only_memory_has(self, stores: Stores) -> None:
        nodes = [stores.open_tiers(write="back")[0] for _ in range(3)]
        for seed in range(3):
            nodes[0].save(chain(seed, 8))
        lower = stores.open_lower()
        wait_until(lambda: all(is_ready_to_move(node) for node in nodes))
        nodes[0].connector.close()
        assert lower.stats().store_blocks == 0  # others have it still
        closing = [threading.Thread(target=node.connector.close) for node in nodes[1:]]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        again, connector = stores.open_tiers(write="back")
        assert connector.stats().tiers[0].store_blocks == 0
        assert [again.lookup(chain(seed, 8), request_id=f"again {seed}") for seed in range(3)] == [8] * 3
        assert all(again.load(chain(seed, 8)).outcome is TransferOutcome.OK for seed in range(3))

    def test_handing_down_ends_when_its_time_is_over(self, stores: Stores) -> None:
        node, connector = stores.open_tiers(write="back", hand_down_s=0.0)
        node.save(chain(0, 8))
        wait_until(lambda: is_ready_to_move(node))
        connector.close()
        assert stores.open_lower().stats().store_blocks == 0

    def test_write_back_from_a_store_that_cannot_say_what_it_evicts_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"connector\.options\.write.*through"):
            create_connector("tiered", {"tiers": "none,shm", "write": "back"}, SteppedClock())


class TestPrefetch:
    def test_what_a_waiting_request_needs_is_brought_up(self, stores: Stores) -> None:
        lower = stores.open_lower()
        lower.save(chain(1, 40))
        node, connector = stores.open_tiers(prefetch=True)
        upper = stores.open_upper()
        assert node.lookup(chain(1, 40), request_id="waiting") == 40
        wait_until(lambda: upper.lookup(chain(1, 40), request_id="there") == 40)
        assert node.load(chain(1, 40), "waiting").outcome is TransferOutcome.OK
        assert [tier.num_hit_blocks for tier in connector.stats().tiers] == [40, 0]

    def test_request_whose_turn_it_is_cancels_its_prefetch(self, stores: Stores) -> None:
        lower = stores.open_lower()
        lower.save(chain(1, 8))
        lower.save(chain(2, 8))
        node, connector = stores.open_tiers(prefetch=True, promote=False)
        mover = connector._mover
        assert mover is not None
        assert node.lookup(chain(1, 8), request_id="now") == 8
        mover.prefetch("now", chain(1, 8))  # however long the lookup took: it is not due yet
        transfer = node.start_load(chain(1, 8), "now")
        assert "now" not in mover._queue
        assert node.results([transfer])[0].outcome is TransferOutcome.OK
        mover.prefetch("later", chain(2, 8))
        wait_until(lambda: mover.num_prefetched_blocks in (8, 16) and not mover._queue)

    def test_nothing_is_moved_for_what_the_first_tier_has(self, stores: Stores) -> None:
        node, connector = stores.open_tiers(prefetch=True)
        node.save(chain(1, 8))
        assert node.lookup(chain(1, 9), request_id="there") == 8
        assert connector._mover is not None
        assert not connector._mover._queue


def is_ready_to_move(node: Node) -> bool:
    """Whether the thread that moves blocks has opened its tiers."""
    assert isinstance(node.connector, TieredConnector) and node.connector._mover is not None
    return None not in node.connector._mover._children


def coldest(connector: TieredConnector) -> list[bytes]:
    """What the first tier would evict next."""
    return [name for run in connector._find_coldest(0) for name in run]


def lower_names(connector: TieredConnector) -> Any:
    """What the second tier has, once it has been asked, so that it knows what others have done."""
    child = connector._tiers.tiers[1].connector
    store = child._held.store  # type: ignore[union-attr]
    store.index.catch_up()
    return store.index.mirror
