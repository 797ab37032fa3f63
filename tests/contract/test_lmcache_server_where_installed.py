"""The contract, and what only a server can do to a connector, for lmcache's server mode: a real `lmcache server`."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from connectors.contract.contract import ConnectorContract, open_descriptors
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.lmcache.object_directory import StoredObject
from connectors.registry import create_connector
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConfigError
from core.kv.connector import PrefixLookup, TransferOutcome
from tests.support.lmcache_server import LMCacheServerProcess

IS_INSTALLED = importlib.util.find_spec("lmcache") is not None
pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="lmcache is not installed")

UNIT_BYTES = BLOCK_HEADER_BYTES + LAYOUT.block_bytes
OP_TIMEOUT_S = 0.5
RECOVERY_S = 5.0
PATIENCE_S = 20.0  # a machine with other work: what is bounded by OP_TIMEOUT_S must not take many times that


class LMCacheServerHarness(ConnectorHarness):
    """One server for all tests: each store is a namespace in it."""

    connector_name = "lmcache"
    is_persistent = True
    server: ClassVar[LMCacheServerProcess]

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {
            "mode": "server",
            "server": self.server.address,
            "http": self.server.http_address,
            "namespace": hashlib.md5(str(self.directory).encode()).hexdigest() + store,
            "capacity_bytes": num_blocks * UNIT_BYTES if num_blocks < 1024 else 0,
        }

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        offset = {"header": 20, "payload": BLOCK_HEADER_BYTES + 100, "end": UNIT_BYTES - 1}[where]
        with self._block(store, block_hash) as block:
            block[offset] ^= 1

    def truncate(self, store: str, block_hash: bytes) -> None:
        with self._block(store, block_hash) as block:
            block[UNIT_BYTES // 2 :] = 0

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        with self._block(store, first_hash) as first, self._block(store, second_hash) as second:
            first[:], second[:] = second.copy(), first.copy()

    def delete(self, store: str, block_hash: bytes) -> None:
        with self._block(store, block_hash) as block:
            block[:] = 0

    def wipe(self, store: str) -> None:
        self.server.kill()
        self.server.start()

    def damage_index(self, store: str) -> None:
        with self.objects(store) as objects:
            for path in objects.index.folder.iterdir():
                path.rename(path.with_name(f"damaged-{path.name}"))

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        server = LMCacheServerProcess(self.directory / "full", 0.002, "--eviction-trigger-watermark", "1.0")
        try:
            options = {**self.options("full", 512), "server": server.address, "http": server.http_address}
            with self.objects("filler", server) as filler:
                objects = [StoredObject(bytes([number]) * 96) for number in range(90)]  # 1.4 of 2 MiB
                for batch in filler.batches(objects):
                    assert filler.write(batch, lambda several: None, lambda: False) == list(batch)[::-1]
                yield options, lambda: filler.delete([stored.name for stored in objects])
        finally:
            server.end()

    @contextlib.contextmanager
    def objects(self, store: str, server: LMCacheServerProcess | None = None) -> Iterator[Any]:
        """The store's objects, past the connector."""
        from connectors.lmcache.server_objects import ServerObjects

        server = server or self.server
        namespace = self.options(store, 16)["namespace"]
        objects = ServerObjects(server.address, server.http_address, namespace, LAYOUT, 0, 5.0, SteppedClock())
        objects.refresh()
        assert objects.why_away is None
        try:
            yield objects
        finally:
            objects.close()

    @contextlib.contextmanager
    def _block(self, store: str, block_hash: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """A block's bytes in the server's memory."""
        with self.objects(store) as objects:
            stored = objects.directory.find(block_hash)
            (started,) = objects.read_steps([stored])
            with objects.reading(started, lambda: False) as views:
                start = stored.block_hashes.index(block_hash) * UNIT_BYTES
                yield views[stored][start : start + UNIT_BYTES]


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServerProcess]:
    server = LMCacheServerHarness.server = LMCacheServerProcess(tmp_path_factory.mktemp("server"))
    yield server
    server.end()


class TestLMCacheServer(ConnectorContract):
    harness_type = LMCacheServerHarness


class Bench:
    """Nodes on the server, in a namespace of their own. A test that ends the server starts it again."""

    def __init__(self, server: LMCacheServerProcess, namespace: str) -> None:
        self.server, self._namespace = server, namespace
        self._nodes: list[Node] = []

    def open_node(self, **options: Any) -> Node:
        settings = {"mode": "server", "server": self.server.address, "http": self.server.http_address}
        settings["namespace"] = self._namespace
        clock = SteppedClock()
        node = Node(create_connector("lmcache", {**settings, "op_timeout_s": OP_TIMEOUT_S, **options}, clock), clock)
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            started_s = time.monotonic()
            node.connector.close()
            assert time.monotonic() - started_s < PATIENCE_S
            assert node.stats().num_open_references == 0
        self._nodes.clear()


@pytest.fixture
def bench(tmp_path: Path, server: LMCacheServerProcess) -> Iterator[Bench]:
    gc.collect()
    num_threads, descriptors = threading.active_count(), open_descriptors()
    bench = Bench(server, hashlib.md5(str(tmp_path).encode()).hexdigest())
    yield bench
    bench.close()
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert open_descriptors() - descriptors == Counter()


def wait_recovered(node: Node, seed: int) -> None:
    """Until a save and a load work again, which must be soon; nobody asks for a second attempt in vain."""
    deadline_s = time.monotonic() + RECOVERY_S
    while node.save(chain(seed, 8)).outcome is not TransferOutcome.OK:
        assert time.monotonic() < deadline_s, "the server is not used again"
    assert node.load(chain(seed, 8)).num_blocks_ok == 8


def assert_only_misses(node: Node, seed: int) -> None:
    """Neither a hit nor a hang; the step thread is never kept waiting."""
    for attempt in range(3):
        started_s = time.monotonic()
        lookup = PrefixLookup(f"away {seed} {attempt}", chain(seed, 8), LAYOUT.block_size)
        node.connector.get_num_new_matched_tokens(lookup, 0)
        assert time.monotonic() - started_s < 0.5
        assert node.load(chain(seed, 8)).num_blocks_ok == 0
        assert node.save(chain(seed + 1, 8)).num_blocks_ok == 0
        assert time.monotonic() - started_s < PATIENCE_S
    assert node.lookup(chain(seed, 8), request_id=f"away {seed}") == 0
    assert node.stats().num_errors > 0


def test_server_down_at_start_costs_misses_and_is_used_when_it_comes(bench: Bench) -> None:
    bench.server.kill()
    node = bench.open_node()
    assert_only_misses(node, 1)
    bench.server.start()
    wait_recovered(node, 1)


def test_server_killed_and_restarted_empty_costs_misses_and_is_used_again(bench: Bench) -> None:
    node = bench.open_node()
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    bench.server.kill()
    assert_only_misses(node, 1)
    bench.server.start()
    wait_until(lambda: node.load(chain(1, 8)).outcome is TransferOutcome.MISS)  # what was there is not believed in any longer
    wait_recovered(node, 1)
    assert node.lookup(chain(1, 8)) == 8


def test_server_killed_in_the_middle_of_transfers_ends_each_with_one_result(bench: Bench) -> None:
    node = bench.open_node()
    node.save(chain(0, 12))
    transfers = [node.start_save(chain(seed, 12), first_block=12 * (seed - 1)) for seed in range(1, 4)]
    transfers += [node.start_load(chain(0, 12), first_block=40)]
    bench.server.kill()
    node.results(transfers)  # compares what was loaded
    bench.server.start()
    wait_recovered(node, 1)


def test_server_that_hangs_costs_bounded_waits_and_is_used_again_when_it_goes_on(bench: Bench) -> None:
    node, other = bench.open_node(), bench.open_node()
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    bench.server.pause()
    assert_only_misses(node, 1)
    assert_only_misses(other, 1)
    bench.server.resume()
    wait_recovered(node, 2)  # the very blocks that were tried in vain: what it was asked meanwhile must not block them
    wait_recovered(other, 1)
    wait_until(lambda: node.load(chain(1, 8)).num_blocks_ok == 8)  # a server that only hung has lost nothing


def test_server_that_forgot_its_clients_is_told_again(bench: Bench) -> None:
    """As it does with who has been silent for two minutes."""
    node = bench.open_node()
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    link = node.connector._objects._link  # type: ignore[attr-defined]
    for instance, _known_s in link._instances.values():
        link._client.unregister_kv_cache_engine_driven_context(instance).result(5.0)
    wait_recovered(node, 2)


def test_objects_that_the_server_evicted_are_misses_and_can_be_saved_again(bench: Bench) -> None:
    node = bench.open_node()
    assert node.save(chain(1, 12)).outcome is TransferOutcome.OK
    objects = node.connector._objects  # type: ignore[attr-defined]
    objects._link.delete([objects.directory.find(chain(1, 12)[7])])
    assert node.lookup(chain(1, 12)) == 12  # nobody has told
    result = node.load(chain(1, 12))
    assert (result.num_blocks_ok, result.outcome) == (6, TransferOutcome.MISS)
    assert node.lookup(chain(1, 12)) == 6
    assert node.save(chain(1, 12)).outcome is TransferOutcome.OK
    assert node.load(chain(1, 12)).num_blocks_ok == 12


def test_object_that_a_dead_client_had_begun_costs_itself_and_no_other(bench: Bench) -> None:
    node, other = bench.open_node(), bench.open_node()
    assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
    link, begun = other.connector._objects._link, StoredObject(b"".join(chain(2, 4)))  # type: ignore[attr-defined]
    assert link.wait(link.start_store(link.key(begun), 4)).context["slots"]
    assert node.save(chain(2, 4)).num_blocks_ok == 0
    assert node.save(chain(3, 8)).outcome is TransferOutcome.OK
    assert node.load(chain(1, 8)).num_blocks_ok == 8
    other.connector.close()  # and then the server takes what was never written for an object
    assert node.save(chain(2, 4)).outcome is TransferOutcome.OK
    assert node.load(chain(2, 4)).num_blocks_ok == 4


def test_server_smaller_than_what_is_saved_goes_on_taking_what_is_new(tmp_path: Path) -> None:
    server = LMCacheServerProcess(tmp_path / "small", 0.004)
    small = Bench(server, "small")
    try:
        node = small.open_node(capacity_bytes=1024**3)
        for seed in range(60):  # twice what the server has
            node.save(chain(seed, 60))
            node.load(chain(seed // 2, 60))  # compares what was loaded
        assert node.save(chain(999, 60)).outcome is TransferOutcome.OK
        assert node.load(chain(999, 60)).num_blocks_ok == 60
        small.close()
    finally:
        server.end()


@pytest.mark.parametrize(
    ("name", "value"), [("server", "nowhere"), ("http", "127.0.0.1:0"), ("namespace", "a/b"), ("namespace", "")]
)
def test_server_option_outside_what_is_allowed_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        create_connector("lmcache", {"mode": "server", name: value}, SteppedClock())


def test_server_without_shared_memory_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    server = LMCacheServerProcess(tmp_path / "plain", 0.05, "--shm-name", "")
    clock = SteppedClock()
    settings = {"mode": "server", "server": server.address, "http": server.http_address}
    node = Node(create_connector("lmcache", settings, clock), clock)
    try:
        result = node.save(chain(1, 2))
        assert (result.outcome, "--shm-name" in result.detail) == (TransferOutcome.ERROR, True)
    finally:
        node.connector.close()
        server.end()
