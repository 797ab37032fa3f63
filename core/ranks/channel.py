"""Messages between rank 0 and another rank, over a socket pair that only the two have. One frame each: length, then msgpack.

Whoever loses the other end hears of it at once: waiting ends, with an error.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any, Generic, TypeVar

import msgspec

from core.errors import RankLostError

_LENGTH = struct.Struct("<I")
Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """incoming: the union of messages that this end receives. Sends are safe from any thread, receiving is one thread's.

    peer: what the other end is called in errors. send and receive raise RankLostError when it is gone.
    """

    def __init__(self, connection: socket.socket, incoming: Any, peer: str) -> None:
        self._connection = connection
        self._peer = peer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._send_lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Hand a message over. Waits while the other end is behind by what a socket holds."""
        with self._send_lock:
            frame = self._encoder.encode(message)
            try:
                self._connection.sendall(_LENGTH.pack(len(frame)) + frame)
            except OSError as error:
                raise RankLostError(f"{self._peer} is gone ({error.strerror or error})") from error

    def receive(self) -> Incoming:
        """The next message, however long it takes."""
        return self._decoder.decode(self._read(_LENGTH.unpack(self._read(_LENGTH.size))[0]))

    def shut_down(self) -> None:
        """Both ends' calls fail from now on, those in progress included. Safe to repeat."""
        with contextlib.suppress(OSError):  # the other end was first
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, num_bytes: int) -> bytearray:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            try:
                num_read = self._connection.recv_into(view)
            except OSError as error:
                raise RankLostError(f"{self._peer} is gone ({error.strerror or error})") from error
            if num_read == 0:
                raise RankLostError(f"{self._peer} is gone")
            view = view[num_read:]
        return data
