"""A connected socket of which every wait has an end. Bytes go between it and the caller's memory, without a copy between.

What the bytes mean is its subclasses' business (redis/resp_stream, tcp/stream), and how it came to be connected is their owners'.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

_MAX_PARTS = 512  # of one sendmsg: the kernel takes at most 1024


class SocketStream:
    """A TCP, Unix or TLS socket. Used by one thread at a time; abort() by any.

    A wait longer than timeout_s raises TimeoutError, a broken connection ConnectionError; both are OSErrors. After any of them
    the connection is out of step: close it.
    """

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._is_tls = isinstance(connected, ssl.SSLSocket)
        if self._is_tls:
            connected.settimeout(timeout_s)
            return
        connected.settimeout(None)  # blocking, with the kernel's own timeouts: one call then receives a whole block
        timeval = struct.pack("@ll", int(timeout_s), int(timeout_s % 1 * 1e6))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def is_stale(self) -> bool:
        """Whether something came, or the connection ended, while nothing was asked: it must not be used then."""
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
        self._socket.close()

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
                num_sent = self._socket.sendmsg(views[:_MAX_PARTS])
            except BlockingIOError as error:
                raise TimeoutError("the other end takes nothing") from error
            views = without_first(views, num_sent)
            if views and time.monotonic() > deadline_s:
                raise TimeoutError("the other end takes too long to read")

    def fill(self, views: Sequence[memoryview]) -> None:
        """Receive exactly these bytes."""
        remaining, num_left = list(views), sum(map(len, views))
        deadline_s = time.monotonic() + self._timeout_s
        while num_left:
            try:
                if self._is_tls:
                    num_bytes = self._socket.recv_into(remaining[0])
                elif len(remaining) == 1:
                    num_bytes = self._socket.recv_into(remaining[0], 0, socket.MSG_WAITALL)
                else:
                    num_bytes = self._socket.recvmsg_into(remaining, 0, socket.MSG_WAITALL)[0]
            except BlockingIOError as error:
                raise TimeoutError("the other end does not answer") from error
            if not num_bytes:
                raise ConnectionError("the other end closed the connection")
            num_left -= num_bytes
            if not num_left:  # nearly always the first time: each piece of a block comes by here
                return
            remaining = without_first(remaining, num_bytes)
            if time.monotonic() > deadline_s:
                raise TimeoutError("the other end takes too long to send")


def without_first(views: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of these views after their first num_bytes bytes."""
    for index, view in enumerate(views):
        if num_bytes < len(view):
            return [view[num_bytes:], *views[index + 1 :]]
        num_bytes -= len(view)
    return []
