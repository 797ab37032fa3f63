"""What Ray, its parts and other engines can do to a connector: real processes that are killed, stopped, full or lying.

In each case: no wrong byte (Node compares all that is loaded), no hang, no exception, one result per transfer, nothing written
to the pool after a result, and the store is used again soon after it is well.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import connectors.ray.server
from connectors.contract.commanded_process import CommandedProcess
from connectors.contract.contract import open_descriptors
from connectors.contract.node import HANG_S, LAYOUT, REAL_LAYOUT, Node, SteppedClock, chain, wait_until
from connectors.contract.peer import Peer
from connectors.ray.connector import RayConnector
from connectors.ray.messages import socket_address
from connectors.ray.server import BorrowedBlocks, DirectoryServer, Peers
from connectors.ray.slabs import ObjectMedium
from connectors.registry import create_connector
from connectors.stored_block import pack_block_header
from core.kv.connector import PrefixLookup, TransferOutcome
from core.kv.layout import KVLayout
from deploy.topology import find_free_ports
from tests.support.ray_node import MIB, RayNode
from tests.support.redis_server import make_certificate

OP_TIMEOUT_S = 1.0
LINGER_S = 2.0
# A machine with other work: what is bounded by OP_TIMEOUT_S, or takes Ray two seconds, must not take many times that.
PATIENCE_S = 30.0
# Once Ray is well, its store is used in half the time that Ray takes to start on this machine now, or two thirds (measured).
MAX_STARTS = 3
FAILURES = {TransferOutcome.ERROR, TransferOutcome.TIMEOUT}


class Bench:
    """A Ray node, and engines on it. Each test has a store of its own."""

    numbers = itertools.count()

    def __init__(self, ray: RayNode) -> None:
        self.ray = ray
        self._nodes: list[Node] = []
        self._options = {
            **ray.options,
            "namespace": f"fault{next(self.numbers)}",
            "op_timeout_s": OP_TIMEOUT_S,
            "linger_s": LINGER_S,
            "capacity_bytes": 32 * MIB,
        }

    def options(self, **options: Any) -> dict[str, Any]:
        return {**self._options, **options}

    def open_node(self, layout: KVLayout = LAYOUT, is_ready: bool = True, **options: Any) -> Node:
        clock = SteppedClock()
        node = Node(create_connector("ray", self.options(**options), clock), clock, layout)
        self._nodes.append(node)
        if is_ready:
            wait_recovered(node)
        return node

    def close(self) -> None:
        for node in self._nodes:
            started_s = time.monotonic()
            node.connector.close()
            assert time.monotonic() - started_s < PATIENCE_S
            assert node.stats().num_open_references == 0


class MemoryMedium(ObjectMedium):
    """One object store's worth of memory without a Ray."""

    num_bytes = 16 * MIB

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("store")
        os.ftruncate(self.descriptor, self.num_bytes)
        self.memory = np.frombuffer(mmap.mmap(self.descriptor, self.num_bytes), dtype=np.uint8)
        self._offset = 0

    def make(self, num_bytes: int) -> tuple[Any, int] | None:
        offset, self._offset = self._offset, self._offset + num_bytes
        return object(), offset

    def close(self) -> None:
        os.close(self.descriptor)


class NoPeers(Peers):
    def find(self, key: str, names: Sequence[bytes], timeout_s: float) -> set[bytes]:
        return set()

    def fetch(self, key: str, names: Sequence[bytes], timeout_s: float) -> BorrowedBlocks:
        return BorrowedBlocks({}, None)


@pytest.fixture(scope="module")
def ray_node() -> Iterator[RayNode]:
    node = RayNode()
    yield node
    node.end()


@pytest.fixture
def bench(ray_node: RayNode) -> Iterator[Bench]:
    gc.collect()
    num_threads, descriptors = threading.active_count(), open_descriptors()
    bench = Bench(ray_node)
    yield bench
    bench.close()
    del bench
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert open_descriptors() - descriptors == Counter()


def wait_recovered(node: Node, seed: int = 900, within_s: float = PATIENCE_S) -> None:
    """Until a save, a lookup and a load work, which must be soon."""
    started_s = time.monotonic()
    deadline_s = started_s + within_s
    while (
        node.save(chain(seed, 2, node.layout)).outcome is not TransferOutcome.OK or node.lookup(chain(seed, 2, node.layout)) != 2
    ):
        assert time.monotonic() < deadline_s, "the store is not used"
        time.sleep(0.02)
    assert node.load(chain(seed, 2, node.layout)).num_blocks_ok == 2
    print(f"used after {time.monotonic() - started_s:.2f} s")


def wait_missed(node: Node, hashes: list[bytes]) -> None:
    """Until every block is a miss. What was found before is believed until the link sees that the directory has gone."""
    question = PrefixLookup("missed", hashes, node.layout.block_size)
    wait_until(lambda: node.connector.get_num_new_matched_tokens(question, 0) == 0)


# -- a Ray that is not there --------------------------------------------------------------------------------------------------
def test_ray_down_at_start_is_a_miss_and_used_soon_after_it_comes(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.ray.kill()
    node = bench.open_node(is_ready=False)
    wait_missed(node, chain(1, 4))
    assert node.save(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert not node.stats().is_reachable
    wait_until(lambda: "`ray start" in node.stats().complaint)
    for _ in range(3):
        assert node.save(chain(1, 4)).outcome is TransferOutcome.ERROR
    assert caplog.text.count("directory actor") == 1  # not once per save
    bench.ray.start()
    wait_recovered(node, within_s=MAX_STARTS * bench.ray.start_s)


@pytest.mark.parametrize("part", ["all", "raylet", "gcs_server", "directory"])
def test_ray_or_a_part_of_it_killed_in_the_middle_gives_one_result_each_and_is_used_again_soon(bench: Bench, part: str) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    assert node.save(hashes).outcome is TransferOutcome.OK
    transfers = [node.start_load(hashes, first_block=16 * number) for number in range(3)]
    transfers.append(node.start_save(chain(2, 16, REAL_LAYOUT), first_block=48))
    if part == "all":
        bench.ray.kill()
    else:
        bench.ray.kill_one(part)
    outcomes = {result.outcome for result in node.results(transfers)}
    assert outcomes <= {TransferOutcome.OK, *FAILURES}
    if part == "raylet":
        wait_until(lambda: "directory actor" in node.stats().complaint and "`ray start" in node.stats().complaint)
    before = bytes(node.pool.buffer)
    if part != "directory":  # that one is made again by whoever misses it
        bench.ray.kill()
        wait_missed(node, hashes)
        bench.ray.start()
    assert bytes(node.pool.buffer) == before
    wait_recovered(node, within_s=MAX_STARTS * bench.ray.start_s)
    assert node.load(hashes).num_blocks_ok == 0  # it was started empty
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 16


def test_ray_that_wants_tls_or_a_token_is_a_miss_and_used_once_it_does_not(bench: Bench, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"RAY_USE_TLS": "1", "RAY_TLS_SERVER_CERT": certificate, "RAY_TLS_SERVER_KEY": key, "RAY_TLS_CA_CERT": certificate}
    node: Node | None = None
    try:
        for environment in (tls, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a-secret-of-thirty-two-characters"}):
            bench.ray.kill()
            bench.ray.environment = environment
            bench.ray.start()
            node = node or bench.open_node(is_ready=False)
            wait_missed(node, chain(1, 4))
            assert node.save(chain(1, 4)).outcome is TransferOutcome.ERROR
            assert node.load(chain(1, 4)).outcome is TransferOutcome.ERROR
    finally:
        bench.ray.kill()
        bench.ray.environment = {}
        bench.ray.start()
    wait_recovered(node)


def test_many_lost_connections_in_a_row_cost_transfers_and_nothing_else(bench: Bench) -> None:
    node = bench.open_node(REAL_LAYOUT)
    assert isinstance(node.connector, RayConnector) and node.connector._door is not None
    hashes = chain(1, 8, REAL_LAYOUT)
    node.save(hashes)
    outcomes: Counter[TransferOutcome] = Counter()
    for number in range(100):
        transfer = node.start_load(hashes) if number % 2 else node.start_save(chain(2 + number, 4, REAL_LAYOUT))
        for stream in list(node.connector._door._streams):
            stream.shut_down()
        outcomes[node.results([transfer])[0].outcome] += 1
    assert set(outcomes) <= {TransferOutcome.OK, TransferOutcome.MISS, *FAILURES}
    assert outcomes.total() > outcomes[TransferOutcome.OK]
    wait_recovered(node)
    node.save(hashes)
    assert node.load(hashes).num_blocks_ok == 8


# -- a Ray that does not answer ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_hung_part_of_ray_costs_room_at_most_and_what_is_stored_is_still_loaded(bench: Bench, part: str) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 8, REAL_LAYOUT)
    node.save(hashes)
    bench.ray.pause(part)
    try:
        assert node.load(hashes).num_blocks_ok == 8
        saves = [node.start_save(chain(2 + number, 8, REAL_LAYOUT), first_block=8 + 8 * number) for number in range(4)]
        assert {result.outcome for result in node.results(saves)} <= {TransferOutcome.OK, TransferOutcome.MISS, *FAILURES}
        assert node.save(hashes).outcome is TransferOutcome.OK  # in the memory that there is
        assert node.load(hashes).num_blocks_ok == 8
        assert node.lookup(chain(9, 8, REAL_LAYOUT), request_id="never stored") == 0
    finally:
        bench.ray.resume(part)
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 8


@pytest.mark.parametrize("is_closed_meanwhile", [False, True], ids=["resumed", "closed"])
def test_hung_directory_is_given_up_in_time_and_used_again(bench: Bench, is_closed_meanwhile: bool) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 16, REAL_LAYOUT)
    node.save(hashes)
    bench.ray.pause("directory")
    try:
        transfers = [node.start_load(hashes), node.start_save(chain(2, 16, REAL_LAYOUT), first_block=16)]
        if is_closed_meanwhile:
            time.sleep(0.05)
            node.connector.close()
            assert len(node.connector.poll_transfers()) == 2
        else:
            assert {result.outcome for result in node.results(transfers)} <= FAILURES
            wait_missed(node, hashes)
        before = bytes(node.pool.buffer)
    finally:
        bench.ray.resume("directory")
    if is_closed_meanwhile:
        time.sleep(0.3)
        assert bytes(node.pool.buffer) == before
        node = bench.open_node(REAL_LAYOUT)
    wait_recovered(node)
    assert node.load(hashes).num_blocks_ok == 16


# -- other users of it --------------------------------------------------------------------------------------------------------
def test_producer_killed_after_its_result_loses_nothing(bench: Bench) -> None:
    node = bench.open_node()
    peer = Peer("ray", bench.options())
    try:
        wait_until(lambda: peer.ask("save", seed=1, num_blocks=16) == [16, "ok"])
        peer.ask("save", seed=2, num_blocks=16)
    finally:
        peer.kill()
    assert [node.load(chain(seed, 16)).num_blocks_ok for seed in (1, 2)] == [16, 16]


def test_object_store_full_of_others_objects_leaves_what_is_ours_and_the_store_grows_when_there_is_room(bench: Bench) -> None:
    node = bench.open_node(REAL_LAYOUT)
    hashes = chain(1, 8, REAL_LAYOUT)
    node.save(hashes)
    hog = CommandedProcess("tests.support.ray_hog", bench.ray.address, bench.ray.ip)
    try:
        assert hog.ask("fill") > 0
        assert node.load(hashes).num_blocks_ok == 8
        outcomes = {node.save(chain(seed, 64, REAL_LAYOUT)).outcome for seed in (2, 3)}
        assert outcomes <= {TransferOutcome.MISS, *FAILURES}
        assert node.save(hashes).outcome is TransferOutcome.OK  # in place of others
        assert node.load(hashes).num_blocks_ok == 8
    finally:
        hog.kill()
    wait_recovered(node)
    wait_until(lambda: node.save(chain(4, 64, REAL_LAYOUT)).outcome is TransferOutcome.OK)
    assert node.load(chain(4, 64, REAL_LAYOUT)).num_blocks_ok == 64


def test_value_of_another_model_under_our_name_is_never_loaded_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A directory names what it stores by the layout of who stores it: only a wrong one, as ours here, can have such a value."""
    address, memory = f"127.0.0.9:{find_free_ports('127.0.0.9', 1)[0]}", MemoryMedium()
    has_ended = threading.Event()
    server = DirectoryServer(memory, NoPeers(), 0.1, has_ended.set)
    server.listen(socket_address(address, ""))
    clock = SteppedClock()
    node = Node(create_connector("ray", {"address": address, "linger_s": 0.1}, clock), clock)
    try:
        hashes = chain(1, 6)
        with monkeypatch.context() as patched:
            patched.setattr(
                connectors.ray.server,
                "pack_block_header",
                lambda _, name, payload: pack_block_header(b"another layout..", name, payload),
            )
            assert node.save(hashes).outcome is TransferOutcome.OK
        assert node.load(hashes).num_blocks_ok == 0
        assert node.save(hashes).outcome is TransferOutcome.OK
        assert node.load(hashes).num_blocks_ok == 6
        assert caplog.text.count("capacity_bytes is 1.0 GiB, but Ray's object store on this host has 16.0 MiB") == 1
        assert "at most 12.8 MiB" in caplog.text
    finally:
        node.connector.close()
        assert has_ended.wait(HANG_S)
        memory.close()


def test_program_that_makes_a_directory_ends_when_ray_does_instead_of_waiting_for_it() -> None:
    options: dict[str, Any] = {"node_ip": "", "auth": "disabled", "linger_s": 1.0}
    with socket.create_server(("127.0.0.9", 0)) as listener:
        options["address"] = f"127.0.0.9:{listener.getsockname()[1]}"
        program = subprocess.Popen(
            [sys.executable, "-m", "connectors.ray.directory", json.dumps(options)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        probe, _ = listener.accept()
    probe.close()
    with program:
        assert program.stdout is not None
        assert program.stdout.read() == b"Ray has ended\n"
        assert program.wait(HANG_S) == 1


def test_garbage_on_the_directorys_socket_does_not_disturb_the_others(bench: Bench) -> None:
    node = bench.open_node()
    node.save(chain(1, 8))
    head = b"KVRY"
    for garbage in (
        b"",
        b"G",
        b"GET / HTTP/1.1\r\n\r\n",
        head + bytes(8),
        head + b"\x01\0\0\0\xff\xff\xff\xff",
        head + b"\x01\0\0\0\x02\0\0\0[]",
        head + b"\x04\0\0\0\x00\0\0\0",
        head + b"\x01\0\0\0\xff\0\0\0half",
    ):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(socket_address(bench.ray.address, bench.ray.ip))
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(PATIENCE_S)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(64) == b""  # it ends the connection
    assert node.load(chain(1, 8)).num_blocks_ok == 8


def test_another_ray_node_has_the_blocks_brought_by_ray(bench: Bench) -> None:
    second = RayNode(ip="127.0.0.3", head=bench.ray.address)
    try:
        node = bench.open_node(REAL_LAYOUT, op_timeout_s=10.0)
        hashes = chain(1, 16, REAL_LAYOUT)
        node.save(hashes)
        other = bench.open_node(REAL_LAYOUT, is_ready=False, node_ip=second.ip, op_timeout_s=10.0)
        wait_until(lambda: other.save(chain(5, 4, REAL_LAYOUT)).outcome is TransferOutcome.OK)
        numbers = itertools.count()
        wait_until(lambda: other.lookup(hashes, request_id=f"request {next(numbers)}") == 16)  # directories look for each other
        assert other.load(hashes).num_blocks_ok == 16
        wait_until(lambda: node.lookup(chain(5, 4, REAL_LAYOUT), request_id=f"request {next(numbers)}") == 4)
        assert node.load([*hashes, *chain(5, 4, REAL_LAYOUT)]).num_blocks_ok == 20
        second.kill()
        assert other.load(hashes).num_blocks_ok == 0
        assert node.load(chain(5, 4, REAL_LAYOUT)).num_blocks_ok == 0
        assert node.load(hashes).num_blocks_ok == 16
    finally:
        second.end()


def test_one_ray_under_two_addresses_is_one_store(bench: Bench) -> None:
    node = bench.open_node()
    node.save(chain(1, 8))
    port = bench.ray.address.rpartition(":")[2]
    other = bench.open_node(address=f"localhost:{port}")
    assert other.load(chain(1, 8)).num_blocks_ok == 8
    assert bench.ray.num_directories() == 1


def test_engines_started_together_share_a_directory_that_ends_after_the_last_of_them(bench: Bench) -> None:
    wait_until(lambda: bench.ray.num_directories() == 0)  # that of earlier tests has ended by itself
    peers = [Peer("ray", bench.options()) for _ in range(2)]
    try:
        for seed, peer in enumerate(peers):
            wait_until(lambda peer=peer, seed=seed: peer.ask("save", seed=seed, num_blocks=8) == [8, "ok"])  # type: ignore[misc]
        assert bench.ray.num_directories() == 1
        assert peers[0].ask("load", seed=1, num_blocks=8) == [8, "ok"]
    finally:
        for peer in peers:
            peer.kill()
    wait_until(lambda: bench.ray.num_directories() == 0)
