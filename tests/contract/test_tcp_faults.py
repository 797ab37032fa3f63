"""What only other nodes can do to a node: sources that are away, killed, stopped, slow, lying, strangers, or of another version.

In each case: no wrong byte (Node compares all that is loaded), no hang, no exception, one result per transfer, nothing written to
the pool after a result, and the source is used again soon after it is well.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from connectors.contract.contract import open_descriptors
from connectors.contract.node import PAGES_LAYOUT, Node, chain, content_of, wait_until
from connectors.contract.peer import Peer
from connectors.stored_block import BLOCK_HEADER_BYTES
from connectors.tcp.frames import (
    CHALLENGE_BYTES,
    HEAD_BYTES,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    VERSION,
    Kind,
    Refusal,
    pack_head,
    pack_hello,
    pack_question,
)
from connectors.tcp.stream import BlockStream
from core.errors import ConfigError
from core.kv.connector import TransferOutcome
from deploy.topology import find_free_ports
from tests.contract.tcp_bench import PATIENCE_S, TcpBench, ask, block_value, connector_of, end_point, free_port
from tests.support.delaying_proxy import HOST

RECOVERY_S = 5.0
NOTHING = {TransferOutcome.MISS, TransferOutcome.CORRUPT}


@pytest.fixture
def bench() -> Iterator[TcpBench]:
    gc.collect()
    num_threads, descriptors = threading.active_count(), open_descriptors()
    bench = TcpBench()
    yield bench
    bench.close()
    wait_until(lambda: threading.active_count() <= num_threads)
    gc.collect()
    assert open_descriptors() - descriptors == Counter()


def wait_used(node: Node, source: Peer, seed: int) -> None:
    """Until blocks that this source saves now are loaded from it, which must be soon."""
    assert source.ask("save", seed=seed, num_blocks=4) == [4, "ok"]
    deadline_s = time.monotonic() + RECOVERY_S
    while node.load(chain(seed, 4), f"used {time.monotonic()}").num_blocks_ok < 4:
        assert time.monotonic() < deadline_s, "the source is not used again"
        time.sleep(0.02)
    assert node.lookup(chain(seed, 4), request_id=f"used {seed}") == 4


def assert_pool_is_left_alone(node: Node, meanwhile: Callable[[], object]) -> None:
    """Nobody writes to the pool while no transfer is in flight."""
    before = bytes(node.pool.buffer)
    meanwhile()
    time.sleep(0.2)
    assert bytes(node.pool.buffer) == before


# -- a source that is not there ---------------------------------------------------------------------------------------------
def test_source_down_at_start_is_a_miss_and_used_when_it_comes(bench: TcpBench) -> None:
    port = free_port()
    node = bench.open_node(f"{HOST}:{port}")
    assert node.lookup(chain(1, 4)) == 0
    assert node.load(chain(1, 4)).outcome is TransferOutcome.MISS
    assert node.save(chain(2, 4)).outcome is TransferOutcome.OK
    assert node.load(chain(2, 4)).num_blocks_ok == 4
    wait_used(node, bench.open_process(port), seed=3)


def test_source_killed_in_the_middle_gives_one_result_each_and_a_new_one_is_used(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_process(port)
    proxy = bench.open_proxy(port)
    node = bench.open_node(f"{HOST}:{proxy.port}", op_timeout_s=5.0)
    assert source.ask("save", seed=1, num_blocks=16) == [16, "ok"]
    assert node.lookup(chain(1, 16)) == 16
    proxy.bytes_per_s = 20_000.0
    loads = [node.start_load(chain(1, 16), first_block=16 * number) for number in range(3)]
    time.sleep(0.1)
    source.kill()
    assert {result.outcome for result in node.results(loads)} <= {TransferOutcome.OK, TransferOutcome.MISS}
    proxy.bytes_per_s = 0.0
    wait_until(lambda: ask(node, "after", chain(1, 16)) == 0)
    assert_pool_is_left_alone(node, lambda: bench.open_process(port))
    assert node.load(chain(1, 16)).num_blocks_ok == 0  # it was started empty


def test_source_restarted_empty_is_a_miss_and_used_again(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_process(port)
    node = bench.open_node(f"{HOST}:{port}")
    wait_used(node, source, seed=1)
    assert node.lookup(chain(1, 4), request_id="before and after") == 4
    source.kill()
    source = bench.open_process(port)
    wait_until(lambda: ask(node, "before and after", chain(1, 4)) == 0)
    assert node.load(chain(1, 4)).num_blocks_ok == 0
    wait_used(node, source, seed=2)


def test_hung_source_delays_nobody_for_long_and_is_used_again(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_process(port)
    node = bench.open_node(f"{HOST}:{port}", lookup_wait_s=0.3)
    wait_used(node, source, seed=1)
    source.signal(signal.SIGSTOP)
    started_s = time.monotonic()
    assert node.lookup(chain(5, 4), request_id="while it hangs") == 0
    loads = [node.start_load(chain(1, 4), first_block=4 * number) for number in range(4)]
    assert {result.outcome for result in node.results(loads)} <= {TransferOutcome.MISS, TransferOutcome.OK}
    wait_until(lambda: ask(node, f"later {time.monotonic()}", chain(1, 4)) == 0)
    assert time.monotonic() - started_s < PATIENCE_S
    assert_pool_is_left_alone(node, lambda: source.signal(signal.SIGCONT))
    wait_used(node, source, seed=2)


def test_slow_source_answers_late_and_right(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_process(port)
    proxy = bench.open_proxy(port)
    proxy.latency_s = 0.1
    node = bench.open_node(f"{HOST}:{proxy.port}", op_timeout_s=3.0)
    source.ask("save", seed=1, num_blocks=8)
    assert node.lookup(chain(1, 8)) == 8
    assert node.load(chain(1, 8)).num_blocks_ok == 8


def test_hundred_dropped_connections_in_a_row_cost_transfers_and_nothing_else(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_process(port)
    proxy = bench.open_proxy(port)
    node = bench.open_node(f"{HOST}:{proxy.port}")
    source.ask("save", seed=1, num_blocks=8)
    num_cut = 0
    for _ in range(100):
        load = node.start_load(chain(1, 8))
        num_cut += proxy.cut()
        assert node.results([load])[0].outcome in (TransferOutcome.OK, TransferOutcome.MISS)
    assert num_cut > 0
    wait_used(node, source, seed=2)


def test_named_source_is_used_and_a_dead_one_beside_it_costs_nothing(bench: TcpBench) -> None:
    sources = [bench.open_node(), bench.open_node()]
    addresses = [source.connector.kv_address for source in sources]
    dead = f"{HOST}:{free_port()}"
    hashes = chain(1, 12)
    sources[0].save(hashes[:5])
    sources[1].save(hashes[5:])
    node = bench.open_node()
    assert ask(node, "unnamed", hashes) == 0
    answers: list[int | None] = []
    wait_until(lambda: answers.append(ask(node, "named", hashes, dead, *addresses)) or answers[-1] is not None)
    assert answers[-1] == 12
    assert node.load(hashes, "named").num_blocks_ok == 12


def test_node_serves_what_it_has_pulled_after_its_source_is_gone(bench: TcpBench) -> None:
    source = bench.open_node()
    source.save(chain(1, 8))
    middle = bench.open_node(source.connector.kv_address)
    pulled = middle.load(chain(1, 8))
    assert pulled.outcome is TransferOutcome.OK and pulled.wants_save
    middle.save(chain(1, 8))  # as the engine does then, of the same blocks
    assert not middle.load(chain(1, 8)).wants_save  # it has them itself
    source.connector.close()
    other = bench.open_node(middle.connector.kv_address)
    assert other.lookup(chain(1, 8)) == 8
    assert other.load(chain(1, 8)).outcome is TransferOutcome.OK


def test_node_that_shall_not_serve_what_it_has_pulled_asks_for_no_copy(bench: TcpBench) -> None:
    source = bench.open_node()
    source.save(chain(1, 8))
    assert not bench.open_node(source.connector.kv_address, serve_pulled=False).load(chain(1, 8)).wants_save


def test_source_that_nobody_names_any_more_is_forgotten(bench: TcpBench, monkeypatch: pytest.MonkeyPatch) -> None:
    node = bench.open_node(lookup_wait_s=0.3)
    peer = bench.open_node()
    peer.save(chain(1, 4))
    num_threads = threading.active_count()
    addresses = [f"{HOST}:{port}" for port in find_free_ports(HOST, 4)]
    for number, address in enumerate(addresses):
        wait_until(lambda address=address, number=number: ask(node, f"request {number}", chain(1, 4), address) == 0)  # type: ignore[misc]
    assert threading.active_count() == num_threads + len(addresses)
    monkeypatch.setattr("connectors.tcp.connector._FORGET_AFTER_S", 0.0)
    wait_until(lambda: ask(node, "last", chain(1, 4), peer.connector.kv_address) == 4)
    wait_until(lambda: not any(thread.name == f"kv-tcp-{address}" for thread in threading.enumerate() for address in addresses))


@pytest.mark.parametrize("address", ["nonsense", "203.0.113.7:9", "127.0.0.1:0", "127.0.0.1:99999", ":", "[::1", "x" * 200])
def test_named_source_that_is_no_place_is_a_miss(bench: TcpBench, address: str) -> None:
    """203.0.113.7 is on another machine, where nobody goes without a secret."""
    node = bench.open_node(lookup_wait_s=0.3)
    wait_until(lambda: ask(node, "request", chain(1, 4), address) == 0)
    assert node.load(chain(1, 4), "request").num_blocks_ok == 0


# -- a source that lies -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["header", "payload"])
def test_block_damaged_at_its_source_ends_the_prefix_and_is_dropped_there(bench: TcpBench, place: str) -> None:
    source = bench.open_node()
    node = bench.open_node(source.connector.kv_address)
    hashes = chain(1, 6)
    source.save(hashes)
    memory = connector_of(source)._memory
    slot = memory._slot_by_hash[hashes[2]]
    if place == "payload":
        memory._payload(slot)[100] ^= 1
    else:
        memory._header_by_slot[slot] = bytes(BLOCK_HEADER_BYTES - 1) + b"\1"
    result = node.load(hashes)
    assert (result.num_blocks_ok, result.outcome) == (2, TransferOutcome.CORRUPT)
    wait_until(lambda: hashes[2] not in memory.stored)
    assert node.lookup(hashes) == 2
    source.save(hashes)
    assert node.load(hashes).num_blocks_ok == 6


def _truncated(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.BLOCKS, len(hashes)), block_value(hashes[0]), block_value(hashes[1])[:500]])
    raise ConnectionError


def _hanging(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.BLOCKS, len(hashes)), block_value(hashes[0]), block_value(hashes[1])[:500]])
    stream.receive(1)


def _dripping(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.BLOCKS, len(hashes))])
    for byte in block_value(hashes[0]):
        stream.send([bytes([byte])])
        time.sleep(0.05)


def _flipped(stream: BlockStream, hashes: list[bytes]) -> None:
    value = bytearray(b"".join(block_value(block_hash) for block_hash in hashes))
    value[len(block_value(hashes[0])) + 700] ^= 4
    stream.send([pack_head(Kind.BLOCKS, len(hashes)), bytes(value)])


def _of_another_block(stream: BlockStream, hashes: list[bytes]) -> None:
    others = chain(77, len(hashes))
    stream.send([pack_head(Kind.BLOCKS, len(hashes)), *(block_value(block_hash) for block_hash in others)])


def _of_another_model(stream: BlockStream, hashes: list[bytes]) -> None:
    values = [block_value(block_hash, PAGES_LAYOUT)[:BLOCK_HEADER_BYTES] + content_of(block_hash) for block_hash in hashes]
    stream.send([pack_head(Kind.BLOCKS, len(hashes)), *values])


def _too_many(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.BLOCKS, len(hashes) + 5), *(block_value(block_hash) for block_hash in chain(1, len(hashes) + 5))])


def _none(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.BLOCKS, 0)])


def _garbage(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20])


def _of_another_kind(stream: BlockStream, hashes: list[bytes]) -> None:
    stream.send([pack_head(Kind.FOUND, len(hashes)), bytes(10_000)])


LIES = (
    _truncated,
    _hanging,
    _dripping,
    _flipped,
    _of_another_block,
    _of_another_model,
    _too_many,
    _none,
    _garbage,
    _of_another_kind,
)


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.removeprefix("_"))
def test_lying_source_is_a_miss_and_writes_nothing_afterwards(
    bench: TcpBench, lie: Callable[[BlockStream, list[bytes]], None]
) -> None:
    liar = bench.open_liar(lie)
    node = bench.open_node(liar.address)
    hashes = chain(1, 8)
    assert node.lookup(hashes) == 8
    for position in range(8, 12):
        node.pool.block(position)[:] = content_of(hashes[0])
    started_s = time.monotonic()
    result = node.load(hashes)
    assert time.monotonic() - started_s < PATIENCE_S
    assert result.outcome in NOTHING and result.num_blocks_ok < 8
    assert_pool_is_left_alone(node, lambda: None)
    assert all(bytes(node.pool.block(position)) == content_of(hashes[0]) for position in range(8, 12))
    assert node.save(hashes).outcome is TransferOutcome.OK
    assert node.load(hashes).num_blocks_ok == 8


# -- strangers --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ours", "theirs"), [(b"a" * 32, b"b" * 32), (b"", b"b" * 32), (b"a" * 32, b"")])
def test_other_secret_is_a_miss_and_never_shown(
    bench: TcpBench, caplog: pytest.LogCaptureFixture, ours: bytes, theirs: bytes
) -> None:
    source = bench.open_node(secret=theirs)
    source.save(chain(1, 4))
    with caplog.at_level(logging.INFO):
        node = bench.open_node(source.connector.kv_address, secret=ours)
        assert node.lookup(chain(1, 4)) == 0
        assert node.load(chain(1, 4)).num_blocks_ok == 0
    assert "another secret" in caplog.text
    for secret in (ours, theirs):
        assert not secret or (secret.decode() not in caplog.text and secret.hex() not in caplog.text)
    friend = bench.open_node(source.connector.kv_address, secret=theirs)
    assert friend.load(chain(1, 4)).num_blocks_ok == 4


@pytest.mark.parametrize("proof", [bytes(MAC_BYTES), b"", b"reflected"])
def test_puller_without_the_secret_gets_no_byte_of_a_block(bench: TcpBench, proof: bytes) -> None:
    source = bench.open_node(secret=b"a" * 32)
    source.save(chain(1, 4))
    port = int(source.connector.kv_address.rpartition(":")[2])
    with socket.create_connection((HOST, port), 5.0) as connection:
        connection.sendall(pack_hello(end_point(), bytes(NONCE_BYTES)))
        challenge = connection.recv(CHALLENGE_BYTES, socket.MSG_WAITALL)
        if proof:
            connection.sendall(pack_head(Kind.PROOF) + (proof if proof != b"reflected" else challenge[-MAC_BYTES:]))
        with contextlib.suppress(ConnectionError):
            connection.sendall(pack_question(Kind.PULL, chain(1, 4)))
        received = b""
        with contextlib.suppress(ConnectionError):
            while chunk := connection.recv(65536):
                received += chunk
    assert received in (b"", pack_head(Kind.REFUSED, Refusal.SECRET))


def test_source_of_another_layout_is_a_miss(bench: TcpBench, caplog: pytest.LogCaptureFixture) -> None:
    source = bench.open_node(layout=PAGES_LAYOUT)
    node = bench.open_node(source.connector.kv_address)
    source.save(chain(1, 4))
    assert node.lookup(chain(1, 4)) == 0
    assert node.load(chain(1, 4)).num_blocks_ok == 0
    assert "another layout" in caplog.text


def test_puller_of_another_version_is_told_so(bench: TcpBench) -> None:
    source = bench.open_node()
    port = int(source.connector.kv_address.rpartition(":")[2])
    with socket.create_connection((HOST, port), 5.0) as connection:
        hello = bytearray(pack_head(Kind.HELLO))
        hello[len(MAGIC)] = VERSION + 1
        connection.sendall(hello)
        answer = connection.recv(HEAD_BYTES, socket.MSG_WAITALL)
        assert answer == pack_head(Kind.REFUSED, Refusal.VERSION)
        assert connection.recv(1) == b""


def test_source_of_another_version_is_a_miss_that_says_so(bench: TcpBench, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> None:
            connection, _peer = listener.accept()
            with connection:
                head = bytearray(pack_head(Kind.CHALLENGE))
                head[len(MAGIC)] = VERSION + 1
                connection.sendall(head)
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        node = bench.open_node(f"{HOST}:{listener.getsockname()[1]}")
        assert node.lookup(chain(1, 4)) == 0
        thread.join()
    assert f"it speaks version {VERSION + 1} of the protocol, this process version {VERSION}" in caplog.text


def test_own_address_among_the_peers_is_not_asked(bench: TcpBench, caplog: pytest.LogCaptureFixture) -> None:
    port = free_port()
    node = bench.open_node(f"{HOST}:{port}", f"localhost:{port}", port=port)
    node.save(chain(1, 4))
    assert node.lookup(chain(1, 8)) == 4
    assert node.load(chain(1, 8)).num_blocks_ok == 4
    assert "it is this node itself" in caplog.text


def test_port_in_use_is_refused_and_leaves_nothing(bench: TcpBench) -> None:
    port = int(bench.open_node().connector.kv_address.rpartition(":")[2])
    num_threads = threading.active_count()
    with pytest.raises(ConfigError, match=rf"connector\.options\.host, port: got '127\.0\.0\.1:{port}'"):
        bench.open_node(port=port)
    assert threading.active_count() == num_threads


def test_node_beyond_loopback_with_a_secret_is_pulled_from_at_its_advertised_address(bench: TcpBench) -> None:
    secret = b"s" * 32
    source = bench.open_node(secret=secret, host="0.0.0.0", advertise=HOST)
    source.save(chain(1, 4))
    node = bench.open_node(source.connector.kv_address, secret=secret)
    assert node.lookup(chain(1, 4)) == 4
    assert node.load(chain(1, 4)).num_blocks_ok == 4


# -- leases -----------------------------------------------------------------------------------------------------------------
def test_lookup_leases_blocks_until_they_are_loaded(bench: TcpBench) -> None:
    source = bench.open_node(capacity_bytes=40 * 4160)
    node = bench.open_node(source.connector.kv_address)
    source.save(chain(1, 8))
    assert node.lookup(chain(1, 8), request_id="coming") == 8
    assert source.stats().num_open_references == 8
    for seed in range(2, 12):
        source.save(chain(seed, 10))
        ask(node, "coming", chain(1, 8))
    assert source.stats().num_evictions > 0
    assert node.load(chain(1, 8), "coming").num_blocks_ok == 8
    wait_until(lambda: source.stats().num_open_references == 0)


def test_killed_puller_loses_its_leases_at_once(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_node(port=port, lease_s=60.0)
    puller = bench.open_process(free_port(), peers=[f"{HOST}:{port}"])
    source.save(chain(1, 8))
    assert puller.ask("lookup", seed=1, num_blocks=8) == 8
    assert source.stats().num_open_references == 8
    puller.kill()
    wait_until(lambda: source.stats().num_open_references == 0)


def test_lease_of_a_hung_puller_runs_out(bench: TcpBench) -> None:
    port = free_port()
    source = bench.open_node(port=port, lease_s=1.0)
    puller = bench.open_process(free_port(), peers=[f"{HOST}:{port}"])
    source.save(chain(1, 8))
    assert puller.ask("lookup", seed=1, num_blocks=8) == 8
    puller.signal(signal.SIGSTOP)
    assert source.stats().num_open_references == 8
    wait_until(lambda: source.stats().num_open_references == 0)
    puller.signal(signal.SIGCONT)


def test_lease_of_a_request_that_nobody_asks_about_is_given_back(bench: TcpBench) -> None:
    source = bench.open_node(lease_s=60.0)
    node = bench.open_node(source.connector.kv_address)
    source.save(chain(1, 8))
    assert node.lookup(chain(1, 8)) == 8
    wait_until(lambda: source.stats().num_open_references == 0)


def test_leases_never_keep_a_source_from_saving(bench: TcpBench) -> None:
    source = bench.open_node(capacity_bytes=40 * 4160)
    node = bench.open_node(source.connector.kv_address)
    for seed in range(8):
        source.save(chain(seed, 10))
        node.lookup(chain(seed, 10), request_id=f"request {seed}")
    assert source.stats().num_open_references <= 20
    assert source.save(chain(50, 10)).outcome is TransferOutcome.OK


# -- close ------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("state", ["pulling", "hung", "away"])
def test_close_whatever_the_source_does_is_quick_and_gives_every_result(bench: TcpBench, state: str) -> None:
    port = free_port()
    source = bench.open_process(port)
    node = bench.open_node(f"{HOST}:{port}", op_timeout_s=30.0, lookup_wait_s=10.0)
    wait_used(node, source, seed=1)
    if state == "hung":
        source.signal(signal.SIGSTOP)
    elif state == "away":
        source.kill()
    loads = [node.start_load(chain(1, 4), first_block=4 * number) for number in range(8)]
    started_s = time.monotonic()
    node.connector.close()
    assert time.monotonic() - started_s < PATIENCE_S
    assert Counter(result.transfer_id for result in node.connector.poll_transfers()) == Counter(
        transfer.transfer_id for transfer in loads
    )
    if state == "hung":
        source.signal(signal.SIGCONT)
