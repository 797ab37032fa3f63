"""One connection that speaks RESP2, for values that go straight between a socket and the pool's memory.

Client libraries copy a value at least twice on its way. Here a reply's payload is received where it belongs, and a command's is
sent from where it lies. Knows commands and replies only as bytes; nothing of blocks, connecting or authentication.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence

Reply = int | bytes | list["Reply"] | None

CRLF = b"\r\n"
_READ_BYTES = 65536
_MAX_LINE_BYTES = 4096  # of an error, or of the length before a value
_MAX_SMALL_BYTES = 1024 * 1024  # of a reply that is no value of ours
_MAX_ITEMS = 64


class RespError(Exception):
    """The server refused a command; the text is its own, and begins with a word like OOM, NOAUTH or LOADING."""

    @property
    def word(self) -> str:
        """The first word of the server's text."""
        return str(self).partition(" ")[0]


class RespStream:
    """A connected, blocking socket on which nothing is outstanding. Used by one thread at a time; abort() by any.

    Every wait is bounded by timeout_s and raises TimeoutError; a broken connection or bytes that are no RESP raise OSError. After
    any exception but those of the socket's owner the connection is out of step: close it.
    """

    def __init__(self, connected: socket.socket, timeout_s: float, close: Callable[[], None]) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._close = close
        self._ahead = b""  # received, but not asked for yet
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        if self._is_tls:
            connected.settimeout(timeout_s)
        else:  # blocking, with the kernel's own timeouts: one call then receives a whole value
            connected.settimeout(None)
            timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def is_stale(self) -> bool:
        """Whether something came, or the connection ended, while nothing was asked: it must not be used then."""
        if self._ahead:
            return True
        if self._is_tls:  # what can be read may be TLS's own
            self._socket.settimeout(0.0)
            try:
                self._socket.recv(1)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
            except OSError:
                return True
            finally:
                self._socket.settimeout(self._timeout_s)
            return True
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        return bool(poller.poll(0))

    def abort(self) -> None:
        """Make every wait on this connection fail, now and later. Any thread; does not raise."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # is closed already
            return

    def close(self) -> None:
        """Let go of the socket. Does not raise."""
        self._close()

    # -- small commands ------------------------------------------------------------------------------------------------
    def exchange(self, commands: bytes, num_replies: int) -> list[Reply | RespError]:
        """Send commands and collect their replies; a refusal stands in its command's place."""
        self.send([commands])
        return [self._read_reply() for _ in range(num_replies)]

    def exchange_digits(self, commands: bytes, num_replies: int) -> bytes:
        """The same for commands that answer with one digit each, such as EXISTS: the digits. Raises RespError for a refusal,
        when all replies are read."""
        self.send([commands])
        received, deadline_s = self._take_ahead(), time.monotonic() + self._timeout_s
        while len(received) < 4 * num_replies and b"-" not in received:  # a reply is a colon, a digit, CR, LF
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server takes too long to answer")
            received += self._receive(_READ_BYTES)
        if len(received) == 4 * num_replies and received[0::4].count(b":") == num_replies:
            return received[1::4]
        self._ahead = received
        replies = [self._read_reply() for _ in range(num_replies)]
        for reply in replies:
            if isinstance(reply, RespError):
                raise reply
        raise ConnectionError("a reply is not the digit that was expected")

    def _read_reply(self, *, is_item: bool = False) -> Reply | RespError:
        line = self._read_line(_READ_BYTES)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RespError(rest.decode(errors="replace"))
        length = _parse_number(line)
        if kind == b":":
            return length
        if length == -1:
            return None
        if length > (_MAX_SMALL_BYTES if kind == b"$" else _MAX_ITEMS) or (kind == b"*" and is_item):
            raise ConnectionError(f"the server's reply is none that was asked for: {line[:40]!r}")
        if kind == b"$":
            payload = bytearray(length + len(CRLF))
            self._fill([memoryview(payload)])
            return bytes(payload[:length])
        replies = [self._read_reply(is_item=True) for _ in range(length)]
        for reply in replies:
            if isinstance(reply, RespError):
                return reply
        return [reply for reply in replies if not isinstance(reply, RespError)]

    # -- values --------------------------------------------------------------------------------------------------------
    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send these bytes, one after the other, without a copy of large ones."""
        if self._is_tls:
            for part in parts:
                self._socket.sendall(part)
            return
        views = [memoryview(part) for part in parts]
        deadline_s = time.monotonic() + self._timeout_s
        while views:
            try:
                num_sent = self._socket.sendmsg(views)
            except BlockingIOError as error:
                raise TimeoutError("the server takes nothing") from error
            views = _without_first(views, num_sent)
            if views and time.monotonic() > deadline_s:
                raise TimeoutError("the server takes too long to read a command")

    def receive_value(self, views: Sequence[memoryview], max_bytes: int = 0) -> bytearray | bool | None:
        """Receive the reply of a GET into memory: True when it is a value of exactly that size, None when there is none.

        A value of another size is returned instead, where it is smaller or has at most max_bytes. Raises RespError.
        """
        expected = sum(len(view) for view in views)
        header = b"$%d" % expected
        line = self._read_line(len(header) + len(CRLF))
        if line == header:
            end = bytearray(len(CRLF))
            self._fill([*views, memoryview(end)])
            if end != CRLF:
                raise ConnectionError("a value does not end where it should")
            return True
        if line == b"$-1":
            return None
        if line[:1] == b"-":
            raise RespError(line[1:].decode(errors="replace"))
        length = _parse_number(line)
        if line[:1] != b"$" or length > max(expected, max_bytes):
            raise ConnectionError(f"expected a value of {expected} bytes, got {line[:40]!r}")
        value = bytearray(length + len(CRLF))
        self._fill([memoryview(value)])
        return value[:length]

    def receive_status(self) -> None:
        """Receive the reply of a SET. Raises RespError for a refusal."""
        reply = self._read_reply()
        if isinstance(reply, RespError):
            raise reply

    # -- inside --------------------------------------------------------------------------------------------------------
    def _take_ahead(self) -> bytes:
        ahead, self._ahead = self._ahead, b""
        return ahead

    def _read_line(self, num_expected: int) -> bytes:
        """The next line, without its end. Asks for num_expected bytes at a time, so as not to take what follows it."""
        deadline_s = time.monotonic() + self._timeout_s
        received = self._take_ahead()
        while (end := received.find(CRLF)) < 0:
            if len(received) > _MAX_LINE_BYTES:
                raise ConnectionError("the server's reply is no RESP")
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server takes too long to answer")
            received += self._receive(num_expected)
        self._ahead = received[end + len(CRLF) :]
        return received[:end]

    def _receive(self, num_bytes: int) -> bytes:
        try:
            received = self._socket.recv(num_bytes)
        except BlockingIOError as error:
            raise TimeoutError("the server does not answer") from error
        if not received:
            raise ConnectionError("the server closed the connection")
        return received

    def _fill(self, views: Sequence[memoryview]) -> None:
        """Receive exactly these bytes."""
        remaining = list(views)
        deadline_s = time.monotonic() + self._timeout_s
        while remaining and self._ahead:
            ahead, first = self._take_ahead(), remaining[0]
            num_bytes = min(len(ahead), len(first))
            first[:num_bytes] = ahead[:num_bytes]
            self._ahead = ahead[num_bytes:]
            remaining = _without_first(remaining, num_bytes)
        while remaining:
            try:
                if self._is_tls:
                    num_bytes = self._socket.recv_into(remaining[0])
                else:
                    num_bytes = self._socket.recvmsg_into(remaining, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise TimeoutError("the server does not answer") from error
            if not num_bytes:
                raise ConnectionError("the server closed the connection")
            remaining = _without_first(remaining, num_bytes)
            if remaining and time.monotonic() > deadline_s:
                raise TimeoutError("the server takes too long to send a value")


def pack_command(*parts: bytes) -> bytes:
    """A command as RESP."""
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def _parse_number(line: bytes) -> int:
    try:
        number = int(line[1:])
    except ValueError:
        number = -2
    if line[:1] not in (b":", b"$", b"*") or (number < -1 and line[:1] != b":"):
        raise ConnectionError(f"the server's reply is no RESP: {line[:40]!r}")
    return number


def _without_first(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of these views after their first num_bytes bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
