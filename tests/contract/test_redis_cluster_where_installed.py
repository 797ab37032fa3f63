"""The redis connector on a real Redis Cluster of three servers: where blocks lie, servers that fail, and slots that move."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from connectors.contract.node import LAYOUT, REAL_LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.registry import create_connector
from core.errors import ConfigError
from core.kv.connector import TransferOutcome
from core.kv.layout import KVLayout
from deploy.cli import main
from deploy.topology import find_free_ports
from tests.support.redis_server import EXECUTABLE, HOST, ClusterProcesses, RedisProcess

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")

PATIENCE_S = 20.0
SPLIT_LAYOUT = KVLayout(num_layers=16, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")  # 1 MiB: two values
# Refusals would be ERROR: nothing that a moved slot does may look like a fault of the store.
HARMLESS = {TransferOutcome.OK, TransferOutcome.MISS}


class Bench:
    """The cluster, and nodes of ours on it."""

    def __init__(self, cluster: ClusterProcesses) -> None:
        self.cluster = cluster
        self._nodes: list[Node] = []

    def open_node(self, layout: KVLayout = LAYOUT, **options: Any) -> Node:
        clock = SteppedClock()
        options = {"cluster_nodes": self.cluster.addresses, "op_timeout_s": 0.5, **options}
        node = Node(create_connector("redis", options, clock), clock, layout)
        self._nodes.append(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            started_s = time.monotonic()
            node.connector.close()
            assert time.monotonic() - started_s < PATIENCE_S
            assert node.stats().num_open_references == 0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcesses]:
    processes = ClusterProcesses(tmp_path_factory.mktemp("cluster"))
    yield processes
    processes.end()


@pytest.fixture
def bench(cluster: ClusterProcesses) -> Iterator[Bench]:
    for server in cluster.servers:
        with server.client() as client:
            client.flushall()
    bench = Bench(cluster)
    yield bench
    bench.close()


def owner_of(cluster: ClusterProcesses, block_hash: bytes) -> RedisProcess:
    """The server that has a block's slot before any was moved."""
    slot = key_slot(block_hash.hex().encode())
    return next(server for number, server in enumerate(cluster.servers) if slot < 16384 * (number + 1) // 3)


def is_replica(server: RedisProcess) -> bool:
    with server.client() as client:
        return bool(client.execute_command("ROLE")[0] == b"slave")


def wait_recovered(node: Node) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while node.save(chain(900, 8)).outcome is not TransferOutcome.OK:
        assert time.monotonic() < deadline_s, "the store is not used again"
        time.sleep(0.02)
    assert node.load(chain(900, 8)).num_blocks_ok == 8


def test_blocks_are_spread_over_all_servers_and_found_by_others(bench: Bench) -> None:
    (closed_port,) = find_free_ports(HOST, 1)
    node = bench.open_node(SPLIT_LAYOUT, cluster_nodes=f"{HOST}:{closed_port},{HOST}:{bench.cluster.servers[2].port}")
    hashes = chain(1, 24, SPLIT_LAYOUT)
    assert node.save(hashes).moved_bytes == 24 * SPLIT_LAYOUT.block_bytes
    for server in bench.cluster.servers:
        with server.client() as client:
            assert client.dbsize() > 0
    other = bench.open_node(SPLIT_LAYOUT)
    assert other.lookup([*hashes, *chain(2, 1, SPLIT_LAYOUT)]) == 24
    assert other.load(hashes).num_blocks_ok == 24
    assert other.save(hashes).moved_bytes == 0
    wait_until(lambda: other.stats().store_blocks == 24)
    with owner_of(bench.cluster, hashes[7]).client() as client:  # one of its two values
        client.delete(next(client.scan_iter(f"*{hashes[7].hex()}}}:1", count=1000)))
    assert node.load(hashes).num_blocks_ok == 7
    assert node.save(hashes).moved_bytes == SPLIT_LAYOUT.block_bytes


def test_damaged_block_is_replaced(bench: Bench) -> None:
    node = bench.open_node()
    hashes = chain(1, 8)
    node.save(hashes)
    with owner_of(bench.cluster, hashes[3]).client() as client:
        (key,) = client.scan_iter(f"*{hashes[3].hex()}*", count=1000)
        client.setrange(key, 500, b"damage")
    assert node.load(hashes).outcome is TransferOutcome.CORRUPT
    assert node.save(hashes).moved_bytes == LAYOUT.block_bytes
    assert node.load(hashes).num_blocks_ok == 8


def test_slot_on_its_way_is_a_miss_and_a_hit_again_where_it_arrives(bench: Bench) -> None:
    """As `redis-cli --cluster reshard` does it."""
    node = bench.open_node()
    hashes = chain(1, 12)
    node.save(hashes)
    source = owner_of(bench.cluster, hashes[5])
    target = next(server for server in bench.cluster.servers if server is not source)
    slot = key_slot(hashes[5].hex().encode())
    with source.client() as at_source, target.client() as at_target:
        source_id, target_id = at_source.execute_command("CLUSTER MYID"), at_target.execute_command("CLUSTER MYID")
        at_target.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source_id)
        at_source.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target_id)
        assert node.load(hashes).num_blocks_ok == 12
        (key,) = at_source.execute_command("CLUSTER GETKEYSINSLOT", slot, 10)
        at_source.execute_command("MIGRATE", HOST, target.port, key, 0, 5000)
        result = node.load(hashes)  # ASK
        assert (result.num_blocks_ok, result.outcome) == (5, TransferOutcome.MISS)
        assert node.save(hashes).outcome is TransferOutcome.MISS
        for client in (at_target, at_source):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", target_id)
    outcomes = [node.load(hashes).outcome]  # MOVED
    wait_until(lambda: outcomes.append(node.load(hashes).outcome) or outcomes[-1] is TransferOutcome.OK)
    assert set(outcomes) <= HARMLESS
    assert node.lookup(hashes, request_id="after") == 12
    assert bench.open_node().lookup(hashes) == 12
    with source.client() as at_source, target.client() as at_target:  # and back, without what was in it
        at_target.flushall()
        for client in (at_source, at_target):
            client.execute_command("CLUSTER SETSLOT", slot, "NODE", source_id)
    wait_until(lambda: node.save(hashes).outcome is TransferOutcome.OK)
    assert node.load(hashes).num_blocks_ok == 12


def test_server_killed_in_the_middle_costs_misses_until_it_is_back(bench: Bench) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    victim = bench.cluster.servers[1]
    transfers = [node.start_load(hashes, first_block=16 * number) for number in range(3)]
    transfers.append(node.start_save(chain(2, 16, REAL_LAYOUT), first_block=48))
    victim.kill()
    outcomes = {result.outcome for result in node.results(transfers)}
    assert outcomes <= {TransferOutcome.OK, TransferOutcome.ERROR, TransferOutcome.MISS}
    wait_until(lambda: node.lookup(hashes, request_id="dead") == 0)
    started_s = time.monotonic()
    assert node.load(hashes).num_blocks_ok < 16
    assert time.monotonic() - started_s < PATIENCE_S
    before = bytes(node.pool.buffer)
    victim.start()  # empty
    bench.cluster.wait_served()
    assert bytes(node.pool.buffer) == before
    wait_until(lambda: node.save(hashes).outcome is TransferOutcome.OK)
    assert node.load(hashes).num_blocks_ok == 16


def test_replica_of_a_killed_primary_takes_its_place_with_the_blocks_that_were_stored(tmp_path: Path) -> None:
    cluster = ClusterProcesses(tmp_path)
    bench = Bench(cluster)
    try:
        victim, replica = cluster.servers[1], cluster.add_replica(cluster.servers[1])
        node, other = bench.open_node(REAL_LAYOUT), bench.open_node(REAL_LAYOUT)
        hashes = chain(1, 16, REAL_LAYOUT)
        assert node.save(hashes).outcome is TransferOutcome.OK
        assert other.lookup(hashes) == 16
        assert len({owner_of(cluster, name).port for name in hashes}) == 3
        with victim.client() as client:
            assert client.wait(1, 5000) == 1
        transfers = [node.start_load(hashes, first_block=16 * number) for number in range(3)]
        transfers.append(node.start_save(chain(2, 16, REAL_LAYOUT), first_block=48))
        victim.kill()
        outcomes = {result.outcome for result in node.results(transfers)}
        assert outcomes <= {TransferOutcome.OK, TransferOutcome.ERROR, TransferOutcome.MISS}
        wait_until(lambda: node.load(hashes).num_blocks_ok == 16)  # of which a third can only come from the replica
        with replica.client() as client:
            assert client.execute_command("ROLE")[0] == b"master"
        wait_until(lambda: other.lookup(hashes, request_id="after") == 16)
        assert other.load(hashes).num_blocks_ok == 16
        wait_until(lambda: node.save(chain(3, 16, REAL_LAYOUT)).outcome is TransferOutcome.OK)
        victim.start()  # now a replica itself
        wait_until(lambda: is_replica(victim))
        assert node.load(chain(3, 16, REAL_LAYOUT)).num_blocks_ok == 16
    finally:
        bench.close()
        cluster.end()


def test_hung_server_is_given_up_in_time_and_used_again(bench: Bench) -> None:
    node = bench.open_node()
    hashes = chain(1, 16)
    node.save(hashes)
    bench.cluster.servers[0].pause()
    try:
        started_s = time.monotonic()
        transfers = [node.start_load(hashes), node.start_save(chain(2, 16), first_block=16)]
        assert TransferOutcome.OK not in {result.outcome for result in node.results(transfers)}
        wait_until(lambda: node.lookup(hashes, request_id="hung") == 0)
        assert time.monotonic() - started_s < PATIENCE_S
    finally:
        bench.cluster.servers[0].resume()
    bench.cluster.wait_served()
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 16


def test_wrong_password_is_a_miss_and_never_shown(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for server in bench.cluster.servers:
        with server.client() as client:
            client.config_set("requirepass", "right-secret")
        server.password = "right-secret"
    try:
        wrong, right = bench.open_node(password="wrong-secret"), bench.open_node(password="right-secret")
        wait_until(lambda: wrong.lookup(chain(1, 4), request_id="missed") == 0)
        assert wrong.save(chain(1, 4)).outcome is TransferOutcome.ERROR
        assert right.save(chain(1, 4)).outcome is TransferOutcome.OK
    finally:
        for server in bench.cluster.servers:
            with server.client() as client:
                client.config_set("requirepass", "")
            server.password = ""
    assert "secret" not in caplog.text
    assert "password" in caplog.text  # but it says what is the matter


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"cluster_nodes": "no-port"}, "cluster_nodes"),
        ({"url": "redis:///1"}, "cluster_nodes"),
        ({"url": "unix:///tmp/socket"}, "cluster_nodes"),
        ({"sentinels": "a:1"}, "cluster_nodes"),
    ],
)
def test_wrong_options_of_a_cluster_are_refused_by_name(options: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        create_connector("redis", {"cluster_nodes": "a:1", **options}, SteppedClock())


def test_cluster_that_is_not_named_as_one_says_so(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    node = bench.open_node(cluster_nodes="", url=f"redis://{HOST}:{bench.cluster.servers[0].port}/0")
    assert node.save(chain(1, 16)).outcome is TransferOutcome.ERROR
    assert "MOVED" in caplog.text


def test_cache_command_lists_verifies_and_prunes_a_cluster(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    node = bench.open_node(SPLIT_LAYOUT)
    hashes = chain(1, 12, SPLIT_LAYOUT)
    node.save(hashes)
    with owner_of(bench.cluster, hashes[3]).client() as client:
        client.setrange(next(client.scan_iter(f"*{hashes[3].hex()}}}", count=1000)), 500, b"damage")
    store = ["--connector", "redis", "--connector-option", f"cluster_nodes={bench.cluster.addresses}"]
    assert main(["cache", "ls", *store]) == 0
    listed = capsys.readouterr().out
    assert all(name.hex() in listed for name in hashes)
    assert main(["cache", "verify", *store, "--remove"]) != 0
    assert node.load(hashes).num_blocks_ok == 3
    assert main(["cache", "verify", *store]) == 0
    assert main(["cache", "prune", *store, "--all", "--yes"]) == 0
    assert node.load(hashes).num_blocks_ok == 0
