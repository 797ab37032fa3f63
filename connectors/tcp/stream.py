"""One connection between two nodes, as either end uses it: frames and the bytes of blocks."""

from __future__ import annotations

import os
import select
import socket

from connectors.socket_stream import SocketStream
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


class BlockStream(SocketStream):
    """A connected TCP socket."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        super().__init__(connected, timeout_s)

    def wait_readable(self) -> None:
        """Until something has come, or the connection has ended. Without a limit: abort() ends it."""
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.poll()

    def receive(self, num_bytes: int) -> bytes:
        """Exactly so many bytes, of a small frame."""
        received = bytearray(num_bytes)
        self.fill([memoryview(received)] if num_bytes else [])
        return bytes(received)

    def receive_head(self, expected: Kind | None = None) -> tuple[Kind, int]:
        """The beginning of a frame: kind and count."""
        return parse_head(self.receive(HEAD_BYTES), expected)


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
