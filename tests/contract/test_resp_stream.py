"""Whatever a server sends, a RespStream answers with a value, a refusal or a broken connection, in bounded time."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.redis.resp_stream import RespError, RespStream

TIMEOUT_S = 0.3


@contextlib.contextmanager
def connected(timeout_s: float = TIMEOUT_S) -> Iterator[tuple[RespStream, socket.socket]]:
    """A stream, and the socket of its server."""
    ours, theirs = socket.socketpair()
    stream = RespStream(ours, timeout_s, ours.close)
    try:
        yield stream, theirs
    finally:
        stream.close()
        theirs.close()


def test_receive_value_of_any_fragmentation_is_exact() -> None:
    rng = random.Random(1)
    values = [rng.randbytes(size) for size in (1, 100, 5000, 100, 70_000)]
    reply = b"".join(b"$%d\r\n%b\r\n$-1\r\n" % (len(value), value) for value in values)
    with connected(5.0) as (stream, server):

        def send() -> None:
            start = 0
            while start < len(reply):
                size = rng.choice([1, 2, 3, 7, 1000, 20_000])
                server.sendall(reply[start : start + size])
                start += size

        sender = threading.Thread(target=send)
        sender.start()
        for value in values:
            memory = bytearray(len(value))
            middle = len(value) // 3
            assert stream.receive_value([memoryview(memory)[:middle], memoryview(memory)[middle:]]) is True
            assert bytes(memory) == value
            assert stream.receive_value([memoryview(bytearray(10))]) is None
        sender.join()
        assert not stream.is_stale()


@pytest.mark.parametrize(
    ("reply", "expected"),
    [(b"$3\r\nabc\r\n", bytearray(b"abc")), (b"$0\r\n\r\n", bytearray()), (b"$-1\r\n", None)],
)
def test_receive_value_of_another_size_is_dropped_whole(reply: bytes, expected: bool | None) -> None:
    with connected() as (stream, server):
        server.sendall(reply + b"$5\r\nright\r\n")
        assert stream.receive_value([memoryview(bytearray(5))]) == expected
        memory = bytearray(5)
        assert stream.receive_value([memoryview(memory)]) is True
        assert memory == b"right"


@pytest.mark.parametrize(
    "reply", [b"$6\r\nlonger\r\n", b"$5\r\nwrongXX", b"$x\r\n", b"hello\r\n", b":5\r\n", b"$-7\r\n", b"\x00" * 9000]
)
def test_receive_value_of_anything_else_is_a_broken_connection(reply: bytes) -> None:
    with connected() as (stream, server):
        server.sendall(reply)
        with pytest.raises(OSError):
            stream.receive_value([memoryview(bytearray(5))])


def test_receive_value_refused_raises_the_servers_words() -> None:
    with connected() as (stream, server):
        server.sendall(b"-LOADING wait a little\r\n")
        with pytest.raises(RespError, match="wait a little") as caught:
            stream.receive_value([memoryview(bytearray(5))])
        assert caught.value.word == "LOADING"


def test_waits_end_when_nothing_comes_when_it_drips_and_when_nothing_is_taken() -> None:
    for case in ("silence", "drip", "full"):
        with connected() as (stream, server):
            is_over = threading.Event()

            def drip(server: socket.socket = server, is_over: threading.Event = is_over) -> None:
                server.sendall(b"$100000\r\n")
                while not is_over.wait(0.02):
                    with contextlib.suppress(OSError):
                        server.sendall(b"x")

            thread = threading.Thread(target=drip) if case == "drip" else None
            if thread is not None:
                thread.start()
            started_s = time.monotonic()
            with pytest.raises(OSError):
                if case == "full":
                    stream.send([bytes(64 * 1024 * 1024)])
                else:
                    stream.receive_value([memoryview(bytearray(100_000))])
            assert time.monotonic() - started_s < 20 * TIMEOUT_S
            is_over.set()
            if thread is not None:
                thread.join()


def test_abort_from_another_thread_ends_a_wait() -> None:
    with connected(60.0) as (stream, _server):
        threading.Timer(0.05, stream.abort).start()
        started_s = time.monotonic()
        with pytest.raises(OSError):
            stream.receive_value([memoryview(bytearray(5))])
        assert time.monotonic() - started_s < 30.0


def test_receive_digits_with_a_refusal_among_them_raises_it() -> None:
    with connected() as (stream, server):
        server.sendall(b":1\r\n:0\r\n:1\r\n+OK\r\n")
        assert stream.receive_digits(3) == b"101"
        assert stream.receive_replies(1) == [b"OK"]
        server.sendall(b":1\r\n-NOPERM no\r\n:1\r\n")
        with pytest.raises(RespError, match="NOPERM"):
            stream.receive_digits(3)
    with connected() as (stream, server):
        server.sendall(b":1\r\n:23\r\n:1\r\n")
        with pytest.raises(OSError):
            stream.receive_digits(3)


def test_redirection_counts_as_absent_where_a_cluster_is_expected_and_as_a_refusal_elsewhere() -> None:
    moved, redirections = b"-MOVED 7 127.0.0.1:7001\r\n", list[str]()
    with connected() as (stream, server):
        in_cluster = RespStream(stream._socket, TIMEOUT_S, stream.close, lambda refusal: redirections.append(refusal.word))
        server.sendall(b":1\r\n" + moved + moved + b"-TRYAGAIN later\r\n" + b"-ASK 7 127.0.0.1:7001\r\n+OK\r\n")
        assert in_cluster.receive_digits(2) == b"10"
        assert in_cluster.receive_value([memoryview(bytearray(5))]) is None
        assert [in_cluster.receive_status() for _ in range(3)] == [False, False, True]
        assert redirections == ["MOVED", "MOVED", "TRYAGAIN", "ASK"]
        server.sendall(moved)
        with pytest.raises(RespError, match="MOVED"):
            stream.receive_status()


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"$5\r\n",
                b"hello",
                b"\r\n",
                b"*2\r\n",
                b":1\r\n",
                b"-ERR x\r\n",
                b"$-1\r\n",
                b"+OK\r\n",
                b"\xff",
                b"$99999999\r\n",
                b"*-1\r\n",
            ]
        ),
        max_size=8,
    )
)
def test_any_bytes_give_a_value_a_refusal_or_a_broken_connection(pieces: list[bytes]) -> None:
    for receive in ("value", "replies", "digits", "status"):
        with connected() as (stream, server):
            server.sendall(b"".join(pieces))
            server.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError, RespError):
                if receive == "value":
                    stream.receive_value([memoryview(bytearray(5))])
                elif receive == "replies":
                    stream.receive_replies(2)
                elif receive == "digits":
                    stream.receive_digits(2)
                else:
                    stream.receive_status()
