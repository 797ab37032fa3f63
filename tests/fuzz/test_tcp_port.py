"""Garbage on the port at which a node serves its KV: it neither crashes nor hangs nor grows, and honest pullers do not notice."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.contract.node import Node, chain, wait_until
from connectors.tcp.frames import (
    HEAD_BYTES,
    ITEM_BYTES,
    MAX_ITEMS,
    MAX_PULLED,
    Kind,
    pack_head,
    pack_hello,
    pack_question,
    parse_head,
    split_items,
)
from tests.contract.tcp_bench import HOST, OP_TIMEOUT_S, TcpBench, connector_of, end_point, open_puller
from tests.fuzz.examples import num_examples

NUM_BLOCKS = 16


@pytest.fixture(scope="module")
def bench() -> Iterator[TcpBench]:
    bench = TcpBench()
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def source(bench: TcpBench) -> Node:
    """With some blocks."""
    source = bench.open_node(max_connections=64)
    source.save(chain(1, NUM_BLOCKS))
    return source


def assert_serves(bench: TcpBench, source: Node, before: bytes) -> None:
    """An honest puller gets everything, nothing of the source has changed, and nothing is held."""
    node = bench.open_node(source.connector.kv_address)
    assert node.lookup(chain(1, NUM_BLOCKS)) == NUM_BLOCKS
    assert node.load(chain(1, NUM_BLOCKS)).num_blocks_ok == NUM_BLOCKS
    node.connector.close()
    assert bytes(source.pool.buffer) == before
    assert source.stats().store_blocks == NUM_BLOCKS
    wait_until(lambda: source.stats().num_open_references == 0)
    server = connector_of(source)._server
    assert server is not None
    wait_until(lambda: not server._threads)


def connect(source: Node) -> socket.socket:
    return socket.create_connection((HOST, int(source.connector.kv_address.rpartition(":")[2])), 5.0)


def garbage() -> list[bytes]:
    """What strangers send."""
    hello = pack_hello(end_point(), bytes(32))
    rng = random.Random(5)
    flipped = []
    for _ in range(30):
        damaged = bytearray(hello)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        flipped.append(bytes(damaged) + os.urandom(44))
    return [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        bytes(100_000),
        hello,
        hello[:7],
        hello + pack_head(Kind.PROOF) + bytes(32),
        hello + os.urandom(200),
        pack_question(Kind.PULL, chain(1, 4)),
        pack_head(Kind.LOOKUP, 2**32 - 1),
        *(pack_head(kind) for kind in Kind),
        *(os.urandom(size) for size in (1, 11, 12, 13, 5000)),
        *flipped,
    ]


def test_source_fed_with_garbage_serves_on(bench: TcpBench, source: Node) -> None:
    before = bytes(source.pool.buffer)
    for payload in garbage():
        with connect(source) as connection, contextlib.suppress(OSError):
            connection.sendall(payload)
    assert_serves(bench, source, before)


def test_source_with_silent_strangers_drops_the_oldest_and_serves_on(bench: TcpBench) -> None:
    source = bench.open_node(max_connections=64, op_timeout_s=60.0)
    source.save(chain(1, NUM_BLOCKS))
    silent = [connect(source) for _ in range(200)]
    for connection in silent:
        with contextlib.suppress(OSError):
            connection.sendall(b"K")
    node = bench.open_node(source.connector.kv_address)
    assert node.lookup(chain(1, NUM_BLOCKS)) == NUM_BLOCKS
    assert node.load(chain(1, NUM_BLOCKS)).num_blocks_ok == NUM_BLOCKS
    silent[0].settimeout(20.0)
    with contextlib.suppress(ConnectionError):
        assert silent[0].recv(1) == b""
    for connection in silent:
        connection.close()


def test_stranger_that_says_nothing_is_dropped_in_time(source: Node) -> None:
    with connect(source) as connection:
        connection.settimeout(20.0)
        assert connection.recv(1) == b""


QUESTIONS = st.one_of(
    st.builds(
        lambda kind, count, payload: pack_head(kind, count) + payload,
        st.sampled_from(list(Kind)),
        st.sampled_from([0, 1, 2, MAX_PULLED, MAX_PULLED + 1, MAX_ITEMS, MAX_ITEMS + 1, 2**31, 2**32 - 1]),
        st.binary(max_size=100),
    ),
    st.builds(
        pack_question,
        st.sampled_from([Kind.LOOKUP, Kind.PULL, Kind.RENEW, Kind.RELEASE, Kind.SUSPECT]),
        st.lists(
            st.one_of(st.binary(min_size=ITEM_BYTES, max_size=ITEM_BYTES), st.sampled_from(chain(1, NUM_BLOCKS))), max_size=20
        ),
    ),
    st.binary(max_size=60),
)


def test_source_asked_anything_by_an_admitted_peer_serves_on(bench: TcpBench, source: Node) -> None:
    """A peer with the secret may be broken, too."""
    before = bytes(source.pool.buffer)

    @settings(max_examples=num_examples(60), deadline=None)
    @given(st.lists(QUESTIONS, max_size=6), st.booleans())
    def run(questions: list[bytes], reads: bool) -> None:
        stream = open_puller(source.connector.kv_address, end_point())
        with contextlib.suppress(OSError):
            for question in questions:
                stream.send([question])
            if reads:
                stream._socket.settimeout(0.01)
                while stream._socket.recv(65536):
                    pass
        stream.close()

    run()
    assert_serves(bench, source, before)


def test_puller_that_reads_nothing_is_given_up(bench: TcpBench, source: Node) -> None:
    before = bytes(source.pool.buffer)
    stream = open_puller(source.connector.kv_address, end_point())
    with contextlib.suppress(OSError):
        for _ in range(2000):
            stream.send([pack_question(Kind.PULL, chain(1, NUM_BLOCKS))])
            time.sleep(OP_TIMEOUT_S / 500)
    wait_until(lambda: source.stats().num_open_references == 0)
    stream.close()
    assert_serves(bench, source, before)


@settings(max_examples=num_examples(200), deadline=None)
@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_head_of_any_bytes_is_a_frame_or_a_connection_error(head: bytes) -> None:
    with contextlib.suppress(ConnectionError):
        kind, count = parse_head(head)
        assert kind in Kind and 0 <= count < 2**32


def test_items_of_a_question_come_back() -> None:
    items = chain(1, 5)
    assert split_items(pack_question(Kind.PULL, items)[HEAD_BYTES:]) == items
