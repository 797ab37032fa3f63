"""A real Redis server as the slower tier that is dead, killed, stopped, full, slow or lying: the faster tier goes on as if alone,
no wrong byte arrives (Node compares all that is loaded), and the tier is used again soon after it is well.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.contract.contract import open_descriptors
from connectors.contract.node import LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.kv.connector import PrefixLookup, TransferOutcome
from tests.support.delaying_proxy import HOST, DelayingProxy
from tests.support.redis_server import EXECUTABLE, RedisProcess

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")

OP_TIMEOUT_S = 0.5
LOOKUP_WAIT_S = 0.2
RECOVERY_S = 5.0
IN_REDIS, IN_BOTH = chain(1, 8), chain(2, 8)


class Bench:
    """A server that holds IN_REDIS and IN_BOTH, behind a proxy, and a node with shared memory over it that holds IN_BOTH."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisProcess(folder / "redis")
        self.proxy = DelayingProxy(self.server.port)
        self._pool_name = f"{folder.parent.name[-12:]}-{folder.name[-30:]}"
        self.redis_options = {"url": f"redis://{HOST}:{self.proxy.port}/0", "op_timeout_s": OP_TIMEOUT_S}
        self._nodes: list[Node] = []
        filler = self._open("redis", dict(self.redis_options))
        assert filler.save(IN_REDIS).outcome is TransferOutcome.OK
        filler.connector.close()

    def open_tiered(self) -> Node:
        shm = {"name": self._pool_name, "capacity_bytes": "4MiB"}
        options = {
            "tiers": "shm,redis",
            "shm": shm,
            "redis": self.redis_options,
            "lookup_wait_s": LOOKUP_WAIT_S,
            "promote": False,
        }
        self.node = self._open("tiered", options)
        return self.node

    def open_filled(self) -> Node:
        node = self.open_tiered()
        assert node.save(IN_BOTH).outcome is TransferOutcome.OK
        assert node.lookup(IN_REDIS, request_id="healthy") == 8
        node.connector.poll_early_results()
        return node

    def check_fast_tier_serves(self) -> None:
        """Hits, loads and new saves, whatever becomes of the other tier."""
        for seed in range(100, 104):
            assert self.node.lookup(IN_BOTH, request_id=f"hit {seed}") == 8
            assert self.node.load(IN_BOTH).outcome is TransferOutcome.OK
            assert self.node.save(chain(seed, 4)).outcome is TransferOutcome.OK
            assert self.node.lookup(chain(seed, 4), request_id=f"saved {seed}") == 4

    def check_recovers(self) -> None:
        """Soon the slower tier is asked and written again."""
        started_s = time.monotonic()
        deadline_s = started_s + RECOVERY_S
        seed = 500
        while True:
            seed += 1
            assert time.monotonic() < deadline_s, "the tier is not used again"
            self.node.save(chain(seed, 2))
            with self.server.client() as client:
                if client.exists(*self._keys(client, chain(seed, 2)[0])):
                    break
        while self.node.lookup(chain(9, 2), request_id=f"recovered {seed}") != 0:
            seed += 1
        assert self.node.stats().tiers[1].is_reachable
        print(f"used after {time.monotonic() - started_s:.2f} s")

    def close(self) -> None:
        self.server.resume()
        for node in self._nodes:
            node.connector.close()
            assert node.stats().num_open_references == 0
        self._nodes.clear()
        self.proxy.close()
        self.server.end()

    def _open(self, name: str, options: dict[str, object]) -> Node:
        clock = SteppedClock()
        node = Node(create_connector(name, options, clock), clock)
        self._nodes.append(node)
        return node

    def _keys(self, client: object, block_hash: bytes) -> list[bytes]:
        return list(client.scan_iter(f"*{block_hash.hex()}", count=10_000)) or [b"absent"]  # type: ignore[attr-defined]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    gc.collect()
    num_threads, descriptors = threading.active_count(), open_descriptors()
    bench = Bench(tmp_path)
    yield bench
    bench.close()
    del bench.node
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert open_descriptors() - descriptors == Counter()


def ask(node: Node, request_id: str, hashes: list[bytes]) -> int | None:
    """One question of the step thread: blocks, or None."""
    answer = node.connector.get_num_new_matched_tokens(PrefixLookup(request_id, hashes, LAYOUT.block_size), 0)
    return None if answer is None else answer // LAYOUT.block_size


def test_tier_dead_at_start_is_skipped_and_used_when_it_comes(bench: Bench) -> None:
    bench.server.kill()
    node = bench.open_tiered()
    assert node.save(IN_BOTH).outcome is TransferOutcome.OK
    bench.check_fast_tier_serves()
    assert node.lookup(IN_REDIS) == 0
    assert node.load(IN_REDIS).outcome is TransferOutcome.MISS
    bench.server.start()
    bench.check_recovers()


def test_tier_killed_in_the_middle_costs_its_own_blocks(bench: Bench) -> None:
    node = bench.open_filled()
    transfers = [node.start_load(IN_REDIS), node.start_load(IN_BOTH, first_block=8), node.start_save(chain(3, 8), first_block=16)]
    bench.server.kill()
    results = node.results(transfers)
    assert results[0].outcome in (TransferOutcome.OK, TransferOutcome.MISS)
    assert [result.outcome for result in results[1:]] == [TransferOutcome.OK] * 2
    bench.check_fast_tier_serves()
    wait_until(lambda: not node.stats().tiers[1].is_reachable)
    assert ask(node, "killed", IN_REDIS) == 0
    bench.server.start()
    bench.check_recovers()


def test_tier_that_wants_a_password_is_skipped_and_used_once_it_does_not(bench: Bench) -> None:
    bench.open_filled()
    bench.server.save_to_disk()
    bench.server.kill()
    bench.server.password = "secret"
    bench.server.start()
    bench.check_fast_tier_serves()
    wait_until(lambda: not bench.node.stats().tiers[1].is_reachable)
    with bench.server.client() as client:
        client.config_set("requirepass", "")
    bench.check_recovers()
    assert bench.node.load(IN_REDIS).num_blocks_ok == 8  # it was restarted with all that it had


def test_tier_that_loses_its_connections_a_hundred_times_costs_its_own_blocks(bench: Bench) -> None:
    node = bench.open_filled()
    num_cut = 0
    while num_cut < 100:
        load = node.start_load([*IN_BOTH, *IN_REDIS])
        num_cut += bench.proxy.cut()
        (result,) = node.results([load])
        assert result.num_blocks_ok >= 8 and result.outcome in (TransferOutcome.OK, TransferOutcome.MISS)
    bench.check_fast_tier_serves()
    bench.check_recovers()


def test_tier_that_is_stopped_delays_only_what_it_had_begun(bench: Bench) -> None:
    node = bench.open_filled()
    bench.server.pause()
    begun = node.start_load(IN_REDIS)
    save = node.start_save(chain(3, 8), first_block=8)
    early = []
    wait_until(lambda: early.extend(node.connector.poll_early_results()) or bool(early))
    assert early[0].transfer_id == save.transfer_id  # a handoff does not wait for the tier that hangs
    assert [result.outcome for result in node.results([begun, save])] == [TransferOutcome.MISS, TransferOutcome.OK]
    bench.check_fast_tier_serves()
    wait_until(lambda: ask(node, f"stopped {time.monotonic()}", IN_REDIS) == 0)
    bench.server.resume()
    bench.check_recovers()
    assert node.load(IN_REDIS).num_blocks_ok == 8


def test_tier_that_answers_late_is_waited_for_only_so_long(bench: Bench) -> None:
    node = bench.open_filled()
    bench.proxy.latency_s = 3 * LOOKUP_WAIT_S / 2
    slowest_s = 0.0
    waited_s = []
    for number in range(6):
        started_s = time.monotonic()
        answer = None
        hashes = [*IN_BOTH, *chain(50 + number, 4)]
        while answer is None:
            asked_s = time.monotonic()
            answer = ask(node, f"late {number}", hashes)
            slowest_s = max(slowest_s, time.monotonic() - asked_s)
            time.sleep(0.001)
        waited_s.append(time.monotonic() - started_s)
        assert answer == 8
    assert slowest_s < LOOKUP_WAIT_S  # no question waits for the tier within a step
    assert sum(waited >= LOOKUP_WAIT_S for waited in waited_s) == 3  # then nobody waits for it at all
    assert min(waited_s) < LOOKUP_WAIT_S / 2
    bench.proxy.latency_s = 0.0
    bench.check_recovers()


def test_tier_that_is_full_costs_its_own_blocks(bench: Bench) -> None:
    node = bench.open_filled()
    with bench.server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        bench.check_fast_tier_serves()
        assert node.load(IN_REDIS).num_blocks_ok == 8
        client.config_set("maxmemory", 0)
    bench.check_recovers()


def test_tier_that_lies_is_found_out_and_served_from_elsewhere(bench: Bench) -> None:
    node = bench.open_filled()
    with bench.server.client() as client:
        for block_hash in (IN_REDIS[3], IN_BOTH[3]):
            (key,) = client.scan_iter(f"*{block_hash.hex()}", count=10_000)
            value = client.get(key)
            client.set(key, value[: BLOCK_HEADER_BYTES + 7] + b"?" + value[BLOCK_HEADER_BYTES + 8 :], keepttl=True)
    result = node.load(IN_REDIS)
    assert (result.num_blocks_ok, result.outcome) == (3, TransferOutcome.CORRUPT)
    assert node.load(IN_BOTH).num_blocks_ok == 8
    bench.check_fast_tier_serves()
    bench.check_recovers()
