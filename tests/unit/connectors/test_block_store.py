"""BlockStoreConnector over a store that fails: misses and errors that are told, and never an exception for the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from connectors.block_store import BlockStore, BlockStoreConnector
from connectors.contract.node import HANG_S, Node, SteppedClock, chain
from connectors.stored_block import Payload
from core.kv.connector import TransferOutcome
from core.kv.layout import KVLayout

MAX_BLOCKS = 16


class DictStore(BlockStore):
    """In this process's memory, least recently used first; fails while is_broken."""

    name = "dict"

    def __init__(self) -> None:
        self.data: dict[bytes, bytes] = {}
        self.is_broken = False
        self.on_call: Callable[[], object] = lambda: None

    def open(self, layout: KVLayout) -> int:
        return MAX_BLOCKS

    def count_stored(self, block_hashes: Sequence[bytes]) -> int:
        self._check()
        return next((count for count, name in enumerate(block_hashes) if name not in self.data), len(block_hashes))

    def read(self, block_hash: bytes) -> Payload | None:
        self._check()
        return self.data.get(block_hash)

    def write(self, block_hash: bytes, header: bytes, payload: memoryview) -> bool:
        self._check()
        return self.data.setdefault(block_hash, value := header + bytes(payload)) is value

    def remove(self, block_hash: bytes) -> None:
        self.data.pop(block_hash, None)

    def use(self, chain: Sequence[bytes]) -> Sequence[bytes]:
        self.data |= {name: self.data.pop(name) for name in reversed(chain) if name in self.data}
        evicted = list(self.data)[: max(0, len(self.data) - MAX_BLOCKS)]
        for name in evicted:
            del self.data[name]
        return evicted

    def num_blocks(self) -> int:
        return len(self.data)

    def close(self) -> None:
        self.data.clear()

    def _check(self) -> None:
        self.on_call()
        if self.is_broken:
            raise RuntimeError("the client library is at a loss")


@pytest.fixture
def store() -> DictStore:
    return DictStore()


@pytest.fixture
def node(store: DictStore) -> Iterator[Node]:
    clock = SteppedClock()
    node = Node(BlockStoreConnector(store, clock), clock)
    yield node
    node.connector.close()


def test_store_that_raises_is_an_error_and_a_miss_until_it_works_again(node: Node, store: DictStore) -> None:
    node.save(chain(1, 4))
    store.is_broken = True
    assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert node.save(chain(2, 4)).outcome is TransferOutcome.ERROR
    assert not node.stats().is_reachable
    assert node.lookup(chain(3, 4), request_id="while broken") == 0
    store.is_broken = False
    assert node.load(chain(1, 4)).num_blocks_ok == 4
    assert node.stats().is_reachable
    assert node.stats().num_errors == 3
    assert node.lookup(chain(1, 5), request_id="after") == 4


def test_damaged_block_is_removed_from_the_store(node: Node, store: DictStore) -> None:
    hashes = chain(1, 4)
    node.save(hashes)
    store.data[hashes[2]] = store.data[hashes[2]][:-1] + b"!"
    result = node.load(hashes)
    assert (result.num_blocks_ok, result.outcome) == (2, TransferOutcome.CORRUPT)
    assert hashes[2] not in store.data
    store.data[hashes[3]] = b"short"
    assert node.load(hashes[3:]).outcome is TransferOutcome.CORRUPT


def test_evicted_blocks_are_no_longer_known(node: Node, store: DictStore) -> None:
    node.save(chain(1, MAX_BLOCKS), "first")
    assert node.lookup(chain(1, MAX_BLOCKS), request_id="first") == MAX_BLOCKS
    node.save(chain(2, 4), "second")
    assert node.lookup(chain(1, MAX_BLOCKS), request_id="later") == MAX_BLOCKS - 4
    assert node.stats().num_evictions == 4


def test_save_of_blocks_that_are_stored_moves_nothing(node: Node) -> None:
    assert node.save(chain(1, 4)).moved_bytes == 4 * node.layout.block_bytes
    assert node.save(chain(1, 4)).moved_bytes == 0


def test_close_while_the_store_hangs_returns_and_leaves_the_store_open(store: DictStore) -> None:
    clock = SteppedClock()
    node = Node(BlockStoreConnector(store, clock), clock)
    node.save(chain(1, 1))
    has_begun, may_end = threading.Event(), threading.Event()
    store.on_call = lambda: (has_begun.set(), may_end.wait(HANG_S))
    transfer = node.start_load(chain(1, 1))
    assert has_begun.wait(HANG_S)
    node.connector.close()
    assert [result.outcome for result in node.results([transfer])] == [TransferOutcome.CANCELLED]
    assert store.data  # not closed under the thread that still uses it
    may_end.set()
