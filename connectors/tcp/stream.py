"""A connection of which every wait has an end. Bytes go between the socket and the caller's memory, without a copy between."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence

from connectors.tcp.frames import (
    CHALLENGE_BYTES,
    HEAD_BYTES,
    NONCE_BYTES,
    EndPoint,
    Kind,
    check_challenge,
    pack_hello,
    pack_proof,
    parse_head,
)

_MAX_PARTS = 512  # of one sendmsg: the kernel takes at most 1024


class BlockStream:
    """A connected socket. Used by one thread at a time; abort() by any.

    A wait longer than timeout_s raises TimeoutError, a broken connection ConnectionError; both are OSErrors. After any of them
    the connection is out of step: close it.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connected.settimeout(None)  # blocking, with the kernel's own timeouts: one call then receives a whole block
        timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def wait_readable(self) -> None:
        """Until something has come, or the connection has ended. Without a limit: abort() ends it."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.poll()

    def is_stale(self) -> bool:
        """Whether something came, or the connection ended, while nothing was asked: it must not be used then."""
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
        self._socket.close()

    def send(self, parts: Sequence[bytes | memoryview]) -> None:
        """Send these bytes, one after the other."""
        for start in range(0, len(parts), _MAX_PARTS):
            self._send([memoryview(part) for part in parts[start : start + _MAX_PARTS]])

    def _send(self, views: list[memoryview]) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while views:
            try:
                num_sent = self._socket.sendmsg(views)
            except BlockingIOError as error:
                raise TimeoutError("it takes nothing") from error
            views = _without_first(views, num_sent)
            if views and time.monotonic() > deadline_s:
                raise TimeoutError("it takes too long to read")

    def receive(self, num_bytes: int) -> bytes:
        """Exactly so many bytes, of a small frame."""
        received = bytearray(num_bytes)
        if num_bytes:
            self.fill([memoryview(received)])
        return bytes(received)

    def receive_head(self, expected: Kind | None = None) -> tuple[Kind, int]:
        """The beginning of a frame: kind and count."""
        return parse_head(self.receive(HEAD_BYTES), expected)

    def fill(self, views: list[memoryview]) -> None:
        """Receive exactly these bytes."""
        deadline_s = time.monotonic() + self._timeout_s
        while views:
            try:
                num_bytes = self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise TimeoutError("it does not answer") from error
            if not num_bytes:
                raise ConnectionError("it closed the connection")
            views = _without_first(views, num_bytes)
            if views and time.monotonic() > deadline_s:
                raise TimeoutError("it takes too long to send")


def greet_source(stream: BlockStream, end: EndPoint) -> bytes:
    """The puller's part of the handshake; the source's process_id. Raises OSError."""
    hello = pack_hello(end, os.urandom(NONCE_BYTES))
    stream.send([hello])
    head = stream.receive(HEAD_BYTES)
    parse_head(head, Kind.CHALLENGE)
    challenge = head + stream.receive(CHALLENGE_BYTES - HEAD_BYTES)
    process_id = check_challenge(end, hello, challenge)
    if process_id == end.process_id:
        raise ConnectionError("it is this node itself")
    stream.send([pack_proof(end, hello, challenge)])
    stream.receive_head(Kind.WELCOME)
    return process_id


def _without_first(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of these views after their first num_bytes bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
