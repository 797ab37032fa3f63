"""One connection that speaks RESP2, for values that go straight between a socket and the pool's memory.

Client libraries copy a value at least twice on its way. Here a reply's payload is received where it belongs, and a command's is
sent from where it lies. Knows commands and replies only as bytes; nothing of blocks, connecting or authentication.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

from connectors.socket_stream import SocketStream, without_first

Reply = int | bytes | list["Reply"] | None

CRLF = b"\r\n"
_OK = b"+OK\r\n"
_READ_BYTES = 65536
_MAX_LINE_BYTES = 4096  # of an error, or of the length before a value
_MAX_SMALL_BYTES = 1024 * 1024  # of a reply that is no value of ours
_MAX_ITEMS = 64
_REDIRECTIONS = ("MOVED", "ASK", "TRYAGAIN")


class RespError(Exception):
    """The server refused a command; the text is its own, and begins with a word like OOM, NOAUTH or LOADING."""

    @property
    def word(self) -> str:
        """The first word of the server's text."""
        return str(self).partition(" ")[0]


class WrongValueError(ConnectionError):
    """What a key holds cannot be the value that was asked for: it is too long, or no string. The connection is out of step."""


class RespStream(SocketStream):
    """A connection on which nothing is outstanding. Bytes that are no RESP are a ConnectionError.

    close() is what its owner wants done with the socket. on_redirect: takes the words of a cluster's server that another has a
    key, which then counts as not there; without it they are a refusal like others.
    """

    def __init__(
        self,
        connected: socket.socket,
        timeout_s: float,
        close: Callable[[], None],
        on_redirect: Callable[[RespError], None] | None = None,
    ) -> None:
        super().__init__(connected, timeout_s)
        self._close = close
        self._on_redirect = on_redirect
        self._ahead = b""  # received, but not asked for yet

    def is_stale(self) -> bool:
        """Whether something came, or the connection ended, while nothing was asked: it must not be used then."""
        return bool(self._ahead) or super().is_stale()

    def close(self) -> None:
        """Let go of the socket. Does not raise."""
        self._close()

    def fill(self, views: Sequence[memoryview]) -> None:
        """Receive exactly these bytes."""
        remaining = list(views)
        while remaining and self._ahead:
            ahead, first = self._take_ahead(), remaining[0]
            num_bytes = min(len(ahead), len(first))
            first[:num_bytes] = ahead[:num_bytes]
            self._ahead = ahead[num_bytes:]
            remaining = without_first(remaining, num_bytes)
        super().fill(remaining)

    # -- small commands ------------------------------------------------------------------------------------------------
    def receive_replies(self, num_replies: int) -> list[Reply | RespError]:
        """Of commands that were sent; a refusal stands in its command's place."""
        return [self._read_reply() for _ in range(num_replies)]

    def receive_digits(self, num_replies: int) -> bytes:
        """The same for commands that answer with one digit each, such as EXISTS: the digits. Raises RespError for a refusal,
        when all replies are read."""
        received, deadline_s = self._take_ahead(), time.monotonic() + self._timeout_s
        while len(received) < 4 * num_replies and b"-" not in received:  # a reply is a colon, a digit, CR, LF
            if time.monotonic() > deadline_s:
                raise TimeoutError("the server takes too long to answer")
            received += self._receive(_READ_BYTES)
        digits = received[: 4 * num_replies]
        if len(digits) == 4 * num_replies and digits[0::4].count(b":") == digits[2::4].count(b"\r") == num_replies:
            self._ahead = received[len(digits) :]
            return digits[1::4]
        self._ahead = received
        replies = [self._read_reply() for _ in range(num_replies)]
        return b"".join(self._digit_of(reply) for reply in replies)

    def _digit_of(self, reply: Reply | RespError) -> bytes:
        if isinstance(reply, RespError):
            if not self._is_elsewhere(reply):
                raise reply
            return b"0"
        if not isinstance(reply, int) or not 0 <= reply <= 9:
            raise ConnectionError("a reply is not the digit that was expected")
        return b"%d" % reply

    def _is_elsewhere(self, refusal: RespError) -> bool:
        if self._on_redirect is None or refusal.word not in _REDIRECTIONS:
            return False
        self._on_redirect(refusal)
        return True

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
            self.fill([memoryview(payload)])
            return bytes(payload[:length])
        replies = [self._read_reply(is_item=True) for _ in range(length)]
        for reply in replies:
            if isinstance(reply, RespError):
                return reply
        return [reply for reply in replies if not isinstance(reply, RespError)]

    # -- values --------------------------------------------------------------------------------------------------------
    def receive_value(self, views: Sequence[memoryview], max_bytes: int = 0) -> bytearray | bool | None:
        """Receive the reply of a GET into memory: True when it is a value of exactly that size, None when there is none.

        A value of another size is returned instead, where it is smaller or has at most max_bytes; what is still longer is not
        read: WrongValueError. Raises RespError.
        """
        expected = sum(len(view) for view in views)
        header = b"$%d" % expected
        line = self._read_line(len(header) + len(CRLF))
        if line == header:
            end = bytearray(len(CRLF))
            self.fill([*views, memoryview(end)])
            if end != CRLF:
                raise ConnectionError("a value does not end where it should")
            return True
        if line == b"$-1":
            return None
        if line[:1] == b"-":
            refusal = RespError(line[1:].decode(errors="replace"))
            if self._is_elsewhere(refusal):
                return None
            if refusal.word == "WRONGTYPE":
                raise WrongValueError(str(refusal))
            raise refusal
        length = _parse_number(line)
        if line[:1] != b"$":
            raise ConnectionError(f"expected a value of {expected} bytes, got {line[:40]!r}")
        if length > max(expected, max_bytes):
            raise WrongValueError(f"expected a value of {expected} bytes, got one of {length}")
        value = bytearray(length + len(CRLF))
        self.fill([memoryview(value)])
        return value[:length]

    def receive_status(self) -> bool:
        """Receive the reply of a SET; False when another server has the key. Raises RespError for a refusal."""
        self._ahead = self._ahead or self._receive(len(_OK))
        if self._ahead.startswith(_OK):
            self._ahead = self._ahead[len(_OK) :]
            return True
        reply = self._read_reply()
        if not isinstance(reply, RespError):
            return True
        if self._is_elsewhere(reply):
            return False
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
