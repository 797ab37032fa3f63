"""What only a server far away can do to a connector: real servers that are stopped, killed, full, slow, locked or lying.

In each case: no wrong byte (Node compares all that is loaded), no hang, no exception, one result per transfer, nothing written
to the pool after a result, and the store is used again soon after it is well.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from connectors.contract.contract import open_descriptors
from connectors.contract.node import LAYOUT, REAL_LAYOUT, Node, SteppedClock, chain, content_of, wait_until
from connectors.registry import create_connector, open_browser
from connectors.stored_block import BLOCK_HEADER_BYTES, pack_block_header
from core.errors import ConfigError
from core.kv.connector import PrefixLookup, TransferOutcome, TransferResult
from core.kv.layout import KVLayout
from deploy.cache_blocks import Progress, verify_blocks
from deploy.topology import find_free_ports
from tests.contract.small_disk import fill_up, mounted_tmpfs
from tests.support.delaying_proxy import HOST, DelayingProxy
from tests.support.redis_server import EXECUTABLE, RedisProcess, SentinelProcess

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")

OP_TIMEOUT_S = 0.5
RECOVERY_S = 5.0
# A machine with other work: what is bounded by OP_TIMEOUT_S must not take many times that.
PATIENCE_S = 20.0
SPLIT_LAYOUT = KVLayout(num_layers=16, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 1 MiB: two values


class Bench:
    """A server, and nodes on it."""

    def __init__(self, folder: Path, server: RedisProcess | None = None) -> None:
        self.folder = folder
        self.server = server or RedisProcess(folder / "redis")
        self.proxy: DelayingProxy | None = None
        self._nodes: list[Node] = []

    def open_node(self, layout: KVLayout = LAYOUT, **options: Any) -> Node:
        url = self.server.url if self.proxy is None else f"redis://{HOST}:{self.proxy.port}/0"
        clock = SteppedClock()
        node = Node(create_connector("redis", {"url": url, "op_timeout_s": OP_TIMEOUT_S, **options}, clock), clock, layout)
        self._nodes.append(node)
        return node

    def add_proxy(self) -> DelayingProxy:
        """Further nodes go through it."""
        self.proxy = DelayingProxy(self.server.port)
        return self.proxy

    def close(self) -> None:
        for node in self._nodes:
            started_s = time.monotonic()
            node.connector.close()
            assert time.monotonic() - started_s < PATIENCE_S
            assert node.stats().num_open_references == 0
        self._nodes.clear()
        if self.proxy is not None:
            self.proxy.close()
        self.server.resume()
        self.server.end()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    gc.collect()
    num_threads, descriptors = threading.active_count(), open_descriptors()
    bench = Bench(tmp_path)
    yield bench
    bench.close()
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert open_descriptors() - descriptors == Counter()


def wait_recovered(node: Node, seed: int = 900) -> None:
    """Until a save, a lookup and a load work again, which must be soon."""
    started_s = time.monotonic()
    deadline_s = started_s + RECOVERY_S
    while (
        node.save(chain(seed, 2, node.layout)).outcome is not TransferOutcome.OK or node.lookup(chain(seed, 2, node.layout)) != 2
    ):
        assert time.monotonic() < deadline_s, "the store is not used again"
        time.sleep(0.02)
    assert node.load(chain(seed, 2, node.layout)).num_blocks_ok == 2
    print(f"used after {time.monotonic() - started_s:.2f} s")


def ask(node: Node, request_id: str, hashes: list[bytes]) -> int | None:
    """One question of the step thread: blocks, or None."""
    question = PrefixLookup(request_id, hashes, node.layout.block_size)
    answer = node.connector.get_num_new_matched_tokens(question, 0)
    return None if answer is None else answer // node.layout.block_size


def wait_missed(node: Node, hashes: list[bytes]) -> None:
    """Until every block is a miss. What was found before is believed until the link sees that the server has gone."""
    wait_until(lambda: ask(node, "missed", hashes) == 0)


def assert_pool_is_left_alone(node: Node, meanwhile: Callable[[], object]) -> None:
    """Nobody writes to the pool while no transfer is in flight."""
    before = bytes(node.pool.buffer)
    meanwhile()
    time.sleep(0.2)
    assert bytes(node.pool.buffer) == before


# -- a server that is not there ---------------------------------------------------------------------------------------------
def test_server_down_at_start_is_a_miss_and_used_when_it_comes(bench: Bench) -> None:
    bench.server.kill()
    node = bench.open_node()
    assert node.lookup(chain(1, 4)) == 0
    assert node.save(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR
    bench.server.start()
    wait_recovered(node)


def test_server_killed_in_the_middle_gives_one_result_each(bench: Bench) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    transfers = [node.start_load(hashes, first_block=16 * number) for number in range(3)]
    transfers.append(node.start_save(chain(2, 16, REAL_LAYOUT), first_block=48))
    bench.server.kill()
    outcomes = {result.outcome for result in node.results(transfers)}
    assert outcomes <= {TransferOutcome.OK, TransferOutcome.ERROR}
    wait_missed(node, hashes)
    assert_pool_is_left_alone(node, bench.server.start)
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 0  # it was started empty


def test_server_restarted_with_its_data_is_hit_again(bench: Bench) -> None:
    node = bench.open_node()
    node.save(chain(1, 8))
    bench.server.save_to_disk()
    bench.server.kill()
    wait_missed(node, chain(1, 8))
    bench.server.start()
    wait_recovered(node)
    assert node.lookup(chain(1, 8), request_id="another") == 8
    assert node.load(chain(1, 8)).num_blocks_ok == 8


def test_many_dropped_connections_in_a_row_cost_transfers_and_nothing_else(bench: Bench) -> None:
    proxy = bench.add_proxy()
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 8, REAL_LAYOUT)
    assert node.save(hashes).outcome is TransferOutcome.OK
    num_cut = 0
    outcomes: Counter[TransferOutcome] = Counter()
    while num_cut < 100:
        transfer = node.start_load(hashes) if outcomes.total() % 2 else node.start_save(chain(2 + num_cut, 4, REAL_LAYOUT))
        num_cut += proxy.cut()
        outcomes[node.results([transfer])[0].outcome] += 1
    assert set(outcomes) <= {TransferOutcome.OK, TransferOutcome.ERROR, TransferOutcome.TIMEOUT}
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 8


def test_primary_killed_behind_a_sentinel_its_replica_is_found_and_used(bench: Bench) -> None:
    replica = RedisProcess(
        bench.folder / "replica", "--replicaof", f"{HOST} {bench.server.port}", "--repl-diskless-sync-delay", "0"
    )
    sentinel = SentinelProcess(bench.folder / "sentinel", bench.server.port)
    try:
        with bench.server.client() as client:
            wait_until(lambda: client.info("replication").get("slave0", {}).get("state") == "online")
        wait_until(lambda: sentinel.num_replicas() == 1)
        node = bench.open_node(url="redis:///0", sentinels=f"{HOST}:{_closed_port()},{HOST}:{sentinel.port}")
        assert node.save(chain(1, 8)).outcome is TransferOutcome.OK
        with bench.server.client() as client:
            client.wait(1, 5000)
        bench.server.kill()
        wait_until(lambda: node.save(chain(2, 8)).outcome is TransferOutcome.OK)
        assert node.lookup(chain(1, 9), request_id="after") == 8  # replicated
        assert node.load(chain(1, 8)).num_blocks_ok == 8
        with replica.client() as client:
            assert client.info("replication")["role"] == "master"
    finally:
        sentinel.end()
        replica.end()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"sentinels": "no-port"}, "sentinels"),
        ({"sentinels": "a:1,b:99999"}, "sentinels"),
        ({"sentinels": "a:1", "url": "unix:///tmp/socket"}, "sentinels"),
    ],
)
def test_wrong_sentinels_are_refused_by_name(bench: Bench, options: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        bench.open_node(**options)


def _closed_port() -> int:
    (port,) = find_free_ports(HOST, 1)
    return port


# -- a server that does not answer ------------------------------------------------------------------------------------------
def test_hung_server_is_given_up_in_time_and_used_again(bench: Bench) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    bench.server.pause()
    transfers = [node.start_load(hashes), node.start_save(chain(2, 16, REAL_LAYOUT), first_block=16)]
    started_s = time.monotonic()
    results = node.results(transfers)
    assert {result.outcome for result in results} == {TransferOutcome.TIMEOUT}
    assert time.monotonic() - started_s < PATIENCE_S
    wait_missed(node, hashes)
    queued = [node.start_load(hashes, first_block=16 * number) for number in range(4)]
    started_s = time.monotonic()
    assert {result.outcome for result in node.results(queued)} <= {TransferOutcome.TIMEOUT, TransferOutcome.ERROR}
    assert time.monotonic() - started_s < PATIENCE_S
    assert_pool_is_left_alone(node, bench.server.resume)  # what the server now sends has nowhere to go
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 16


def test_server_that_hangs_in_the_middle_of_a_value_is_given_up_in_time(bench: Bench) -> None:
    proxy = bench.add_proxy()
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    proxy.bytes_per_s = 10e6
    transfer = node.start_load(hashes)
    time.sleep(0.1)
    proxy.is_stalled = True
    (result,) = node.results([transfer])
    assert result.outcome is TransferOutcome.TIMEOUT
    assert result.num_blocks_ok < 16

    def go_on() -> None:
        proxy.is_stalled = False
        proxy.bytes_per_s = 0.0

    assert_pool_is_left_alone(node, go_on)
    wait_recovered(node)


def test_server_that_drips_a_value_byte_by_byte_is_given_up_in_time(bench: Bench) -> None:
    proxy = bench.add_proxy()
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 4, REAL_LAYOUT)
    node.save(hashes)
    proxy.bytes_per_s = 100e3  # 3.6 s per block: each wait of a receive ends in time, the block never would
    started_s = time.monotonic()
    result = node.load(hashes)
    assert result.outcome in (TransferOutcome.TIMEOUT, TransferOutcome.ERROR)
    assert time.monotonic() - started_s < PATIENCE_S


def test_slow_server_answers_late_and_right(bench: Bench) -> None:
    proxy = bench.add_proxy()
    node = bench.open_node(op_timeout_s=5.0)
    node.save(chain(1, 8))
    proxy.latency_s = 0.2
    slowest_s = 0.0
    answer = None
    while answer is None:  # a step's question never waits, however slow the server is
        started_s = time.monotonic()
        answer = ask(node, "slow", chain(1, 9))
        slowest_s = max(slowest_s, time.monotonic() - started_s)
        time.sleep(0.001)
    assert answer == 8
    assert slowest_s < 0.2
    assert node.load(chain(1, 8)).num_blocks_ok == 8
    assert node.save(chain(2, 8)).outcome is TransferOutcome.OK
    assert node.lookup(chain(2, 9), request_id="second") == 8


@pytest.mark.parametrize("state", ["paused", "killed", "slow"])
def test_close_whatever_the_server_does_is_quick_and_gives_every_result(bench: Bench, state: str) -> None:
    proxy = bench.add_proxy()
    node = bench.open_node(REAL_LAYOUT, op_timeout_s=30.0)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    if state == "slow":
        proxy.latency_s = 3.0
    else:
        (bench.server.pause if state == "paused" else bench.server.kill)()
    transfers = [node.start_load(hashes, first_block=16 * (number % 3)) for number in range(6)]
    transfers.append(node.start_save(chain(2, 8, REAL_LAYOUT), first_block=48))
    time.sleep(0.05)
    started_s = time.monotonic()
    node.connector.close()
    assert time.monotonic() - started_s < 5.0  # far below op_timeout_s
    results: list[TransferResult] = node.connector.poll_transfers()
    assert sorted(result.transfer_id for result in results) == [transfer.transfer_id for transfer in transfers]
    assert_pool_is_left_alone(node, lambda: None)


# -- a server that refuses --------------------------------------------------------------------------------------------------
def test_full_server_that_evicts_nothing_says_so_and_keeps_serving(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 8, REAL_LAYOUT)
    node.save(hashes)
    with bench.server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", client.info("memory")["used_memory"])
        assert node.save(chain(2, 8, REAL_LAYOUT)).outcome is TransferOutcome.MISS
        assert "is full" in node.stats().complaint
        node.save(chain(3, 8, REAL_LAYOUT))
        assert caplog.text.count("is full") == 1
        assert node.load(hashes).num_blocks_ok == 8
        assert node.lookup(chain(2, 8, REAL_LAYOUT)) == 0
        client.config_set("maxmemory", 0)
    wait_recovered(node)
    assert node.stats().complaint == ""


def test_server_that_turns_into_a_read_only_replica_is_read_and_written_again_later(bench: Bench) -> None:
    node = bench.open_node()
    node.save(chain(1, 8))
    with bench.server.client() as client:
        client.replicaof(HOST, str(_closed_port()))
        assert node.load(chain(1, 8)).num_blocks_ok == 8
        assert node.save(chain(2, 8)).outcome is TransferOutcome.ERROR
        assert "cannot be written" in node.stats().complaint
        assert node.lookup(chain(2, 8)) == 0
        client.replicaof("NO", "ONE")
    wait_recovered(node)
    assert node.stats().complaint == ""


def test_server_whose_disk_is_full_is_read_and_written_again_later_skipped_where_mounting_is_forbidden(tmp_path: Path) -> None:
    with mounted_tmpfs(tmp_path / "disk", 4 * 1024 * 1024) as disk:
        server = RedisProcess(disk / "redis", "--save", "3600 1")  # a server that writes snapshots refuses to go on without
        bench = Bench(tmp_path, server)
        try:
            node = bench.open_node()
            node.save(chain(1, 8))
            with bench.server.client() as client:
                filler = fill_up(disk)
                with contextlib.suppress(redis.ResponseError):
                    client.bgsave()
                wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
                assert node.load(chain(1, 8)).num_blocks_ok == 8
                assert node.save(chain(2, 8)).outcome is TransferOutcome.ERROR
                filler.unlink()
                client.bgsave()
                wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "ok")
            wait_recovered(node)
        finally:
            bench.close()


def test_wrong_password_is_a_miss_and_never_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    bench.server.kill()
    bench.server.password = "right-secret"
    bench.server.start()
    node = bench.open_node(password="wrong-secret")
    wait_missed(node, chain(1, 4))
    assert [node.save(chain(1, 4)).outcome for _ in range(3)] == 3 * [TransferOutcome.ERROR]
    wait_until(lambda: "password" in node.stats().complaint)
    assert "wrong-secret" not in node.stats().complaint
    assert len(caplog.records) == len({record.getMessage() for record in caplog.records})  # not once per save
    with bench.server.client() as client:  # whoever runs the server repairs it
        client.config_set("requirepass", "wrong-secret")
        wait_recovered(node)
        client.config_set("requirepass", "right-secret")
    assert "wrong-secret" not in caplog.text
    assert "password" in caplog.text  # but it says what is the matter


def test_missing_password_is_a_miss(bench: Bench) -> None:
    bench.server.kill()
    bench.server.password = "right-secret"
    bench.server.start()
    node = bench.open_node()
    wait_missed(node, chain(1, 4))
    assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR


def test_acl_user_without_the_right_to_write_loads_and_cannot_save(bench: Bench) -> None:
    writer = bench.open_node()
    writer.save(chain(1, 4))
    with bench.server.client() as client:
        client.acl_setuser("reader", enabled=True, passwords=["+secret"], keys=["kvrelay:*"], commands=["+@all", "-psetex"])
    node = bench.open_node(username="reader", password="secret")
    assert node.load(chain(1, 4)).num_blocks_ok == 4
    assert node.save(chain(2, 4)).outcome is TransferOutcome.ERROR
    assert node.lookup(chain(2, 4)) == 0


def test_tls_server_is_served_over_tls_and_missed_without(tmp_path: Path) -> None:
    tls = RedisProcess(tmp_path / "tls", is_tls=True)
    bench = Bench(tmp_path, tls)
    try:
        for layout in (LAYOUT, REAL_LAYOUT, SPLIT_LAYOUT):
            node = bench.open_node(layout)
            assert node.save(chain(1, 8, layout)).outcome is TransferOutcome.OK
            assert node.lookup(chain(1, 9, layout)) == 8
            assert node.load(chain(1, 8, layout)).num_blocks_ok == 8
            node.load(chain(1, 8, layout))  # over a connection that was idle
        without = bench.open_node(url=f"redis://{HOST}:{tls.port}/0")
        wait_missed(without, chain(1, 4))
        assert without.load(chain(1, 4)).outcome in (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
        stranger = bench.open_node(url=f"rediss://{HOST}:{tls.port}/0")  # does not know who has signed its certificate
        wait_missed(stranger, chain(1, 4))
        assert stranger.load(chain(1, 4)).outcome in (TransferOutcome.ERROR, TransferOutcome.TIMEOUT)
        tls.kill()
        tls.is_tls = False
        tls.start()
        wait_missed(node, chain(1, 4, SPLIT_LAYOUT))  # now it is the server that does not speak it
        wait_recovered(without)
        tls.kill()
        tls.is_tls = True
        tls.start()
        wait_recovered(node)
    finally:
        bench.close()


# -- a server whose values are not what they should be -------------------------------------------------------------------------
@pytest.mark.parametrize("layout", [LAYOUT, SPLIT_LAYOUT], ids=["one value", "two values"])
@pytest.mark.parametrize("damage", ["append", "list", "huge"])
def test_value_too_long_or_of_another_type_ends_the_prefix_and_is_replaced(bench: Bench, layout: KVLayout, damage: str) -> None:
    node = bench.open_node(layout)
    hashes = chain(1, 8, layout)
    node.save(hashes)
    with bench.server.client() as client:
        (key,) = client.keys(f"*{hashes[4].hex()}" + (":1" if layout is SPLIT_LAYOUT else ""))
        if damage == "list":
            client.delete(key)
            client.rpush(key, *range(1000))
        else:
            client.append(key, b"x" * (5000 if damage == "append" else 64_000_000))
        result = node.load(hashes)
        assert (result.outcome, result.num_blocks_ok) == (TransferOutcome.CORRUPT, 4)
        assert not client.exists(key)
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 8


def test_browser_sees_and_removes_values_too_long_or_of_another_type(bench: Bench) -> None:
    node = bench.open_node()
    hashes = chain(1, 8)
    node.save(hashes)
    with bench.server.client() as client:
        keys = [client.keys(f"*{name.hex()}")[0] for name in hashes[:2]]
        client.append(keys[0], b"x" * 5000)
        client.delete(keys[1])
        client.rpush(keys[1], "a")
        browser = open_browser("redis", {"url": bench.server.url})
        report = verify_blocks(browser, browser.entries(), Progress("verified"))
        assert {entry.place.encode() for entry, _fault in report.faults} == set(keys)
        assert browser.remove([entry for entry, _fault in report.faults]) == 2
        browser.close()
        assert client.exists(*keys) == 0


def test_value_of_another_model_under_our_key_is_never_loaded(bench: Bench) -> None:
    """Keys hold the layout; should somebody copy values between keys, header and checksum still say no."""
    node = bench.open_node()
    (name,) = hashes = chain(1, 1)
    node.save(hashes)
    payload = content_of(name)
    with bench.server.client() as client:
        (key,) = client.scan_iter("*", count=1000)
        client.set(key, pack_block_header(b"another layout!!", name, payload) + payload)
        result = node.load(hashes)
        assert (result.num_blocks_ok, result.outcome) == (0, TransferOutcome.CORRUPT)
        assert client.exists(key) == 0  # does not block its key
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 1


def test_other_version_on_the_same_server_is_left_alone(bench: Bench) -> None:
    node = bench.open_node()
    hashes = chain(1, 2)
    node.save(hashes)
    with bench.server.client() as client:
        ours = sorted(client.scan_iter("*", count=1000))
        theirs = [key.replace(b"kvrelay:1:", b"kvrelay:2:") for key in ours]
        for key in theirs:
            client.set(key, b"of another version")
        for key in ours:
            client.delete(key)
        assert node.load(hashes).num_blocks_ok == 0
        assert node.save(hashes).outcome is TransferOutcome.OK
        assert [client.get(key) for key in theirs] == [b"of another version"] * 2


def test_namespaces_separate_stores_on_one_server(bench: Bench) -> None:
    node, other = bench.open_node(), bench.open_node(namespace="other")
    node.save(chain(1, 4))
    assert other.lookup(chain(1, 4)) == 0
    assert other.load(chain(1, 4)).num_blocks_ok == 0
    assert node.load(chain(1, 4)).num_blocks_ok == 4


# -- values and expiry ---------------------------------------------------------------------------------------------------------
def test_block_just_above_a_size_class_is_stored_in_two_values_and_whole_or_not_at_all(bench: Bench) -> None:
    node = bench.open_node(SPLIT_LAYOUT)
    hashes = chain(1, 8, SPLIT_LAYOUT)
    assert node.save(hashes).moved_bytes == 8 * SPLIT_LAYOUT.block_bytes
    assert node.load(hashes).num_blocks_ok == 8
    with bench.server.client() as client:
        assert client.dbsize() == 16
        used_bytes = sum(client.memory_usage(key) for key in client.scan_iter("*", count=1000))
        assert used_bytes < 1.05 * 8 * (SPLIT_LAYOUT.block_bytes + BLOCK_HEADER_BYTES)  # as one value each: 1.25
        assert node.stats().store_blocks == 8
        for number, end in ((2, ""), (5, ":1")):
            client.delete(f"{next(client.scan_iter(f'*{hashes[number].hex()}', count=1000)).decode()}{end}")
    assert bench.open_node(SPLIT_LAYOUT).lookup(hashes[3:]) == 2
    assert node.load(hashes).num_blocks_ok == 2
    assert node.save(hashes).moved_bytes == 2 * SPLIT_LAYOUT.block_bytes
    assert node.load(hashes).num_blocks_ok == 8


def test_expiry_falls_with_depth_and_is_renewed_by_use(bench: Bench) -> None:
    node = bench.open_node(expiry_s=1000.0)
    hashes = chain(1, 60)
    for start in range(0, 60, 20):  # in chunks, as engines save
        node.save(hashes[start : start + 20], "request")
    node.save(chain(2, 4), "later")
    with bench.server.client() as client:

        def expiries() -> list[int]:
            return [client.pexpiretime(f"{prefix}{name.hex()}") for name in hashes]

        prefix = next(client.scan_iter("*", count=1000)).decode().rpartition(":")[0] + ":"
        first = expiries()
        assert first == sorted(first, reverse=True)
        assert first[0] - first[-1] == 7
        assert 900_000 < client.pttl(f"{prefix}{hashes[0].hex()}") <= 1_000_000
        time.sleep(0.02)
        node.load(hashes[40:], "request 2")  # an ancestor that is known only by its lookup is renewed, too
        node.lookup(hashes, request_id="request 3")
        node.load(hashes[40:], "request 3")
        second = expiries()
        assert second == sorted(second, reverse=True)
        assert all(after > before for before, after in zip(first, second, strict=True))


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lfu", "volatile-ttl"])
def test_eviction_policy_that_makes_holes_is_warned_of(bench: Bench, caplog: pytest.LogCaptureFixture, policy: str) -> None:
    with bench.server.client() as client:
        client.config_set("maxmemory-policy", policy)
    node = bench.open_node()
    assert node.save(chain(1, 2)).outcome is TransferOutcome.OK
    assert (f"maxmemory-policy {policy}" in caplog.text) == (policy != "volatile-ttl")


def test_unix_socket_and_other_database_are_reached_by_url(bench: Bench) -> None:
    node = bench.open_node(url=f"unix://{bench.server.folder / 'socket'}?db=3")
    assert node.save(chain(1, 4)).outcome is TransferOutcome.OK
    assert node.load(chain(1, 4)).num_blocks_ok == 4
    with bench.server.client() as client:
        assert client.info("keyspace")["db3"]["keys"] == 4
    assert bench.open_node().lookup(chain(1, 4)) == 0


# -- lookups -------------------------------------------------------------------------------------------------------------------
def test_lookup_of_a_waiting_request_stays_answered_after_evictions(bench: Bench) -> None:
    """A request may wait long between its lookup and its turn: it is not sent back to "not known yet" meanwhile."""
    node = bench.open_node()
    hashes = chain(1, 6)
    node.save(hashes[:4])
    assert node.lookup(hashes, request_id="waits") == 4
    with bench.server.client() as client:
        client.set("foreign", b"x", px=1)
        time.sleep(0.01)
        client.get("foreign")  # expires: a new epoch
    node.save(chain(2, 2))
    assert ask(node, "waits", hashes) == 4
    assert ask(node, "new", hashes) is None


def test_lookups_of_many_requests_and_long_prompts_are_exact(bench: Bench) -> None:
    node = bench.open_node(lookup_batch_size=8)
    lengths = [0, 1, 7, 8, 9, 16, 40, 64]
    for seed, length in enumerate(lengths):
        node.save(chain(seed, length)[:64])
    other = bench.open_node(lookup_batch_size=8)
    wait_until(lambda: ask(other, "warm", []) == 0)
    answers: dict[int, int] = {}

    def ask_all() -> bool:
        for seed in range(len(lengths)):
            if seed not in answers and (answer := ask(other, f"request {seed}", chain(seed, 64))) is not None:
                answers[seed] = answer
        return len(answers) == len(lengths)

    wait_until(ask_all)
    assert [answers[seed] for seed in range(len(lengths))] == lengths


def test_user_who_may_not_look_is_a_miss_and_not_a_storm(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    with bench.server.client() as client:
        client.acl_setuser("blind", enabled=True, passwords=["+secret"], keys=["kvrelay:*"], commands=["+@all", "-exists"])
        node = bench.open_node(username="blind", password="secret")
        num_before = client.info("stats")["total_connections_received"]
        started_s = time.monotonic()
        number = 0
        while time.monotonic() - started_s < 0.5:
            number += 1
            assert ask(node, f"request {number}", chain(number, 4)) in (None, 0)
            time.sleep(0.001)
        assert client.info("stats")["total_connections_received"] - num_before < 30
    assert caplog.text.count("NOPERM") < 5
