"""The directory's server without a Ray: whoever comes and goes, however rudely, it ends when nobody uses it."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from connectors.contract.node import HANG_S, LAYOUT
from connectors.ray.messages import FrameStream, Operation
from connectors.ray.server import DirectoryServer, Peers
from connectors.ray.sessions import BorrowedBlocks
from connectors.ray.slabs import ObjectMedium

LINGER_S = 0.2
HELLO = {
    "namespace": "test",
    "layout": LAYOUT.fingerprint.hex(),
    "block_bytes": LAYOUT.block_bytes,
    "stride_bytes": LAYOUT.block_stride_bytes,
    "num_blocks": 4,
    "capacity_bytes": 2**20,
    "object_bytes": 2**20,
    "linger_s": LINGER_S,
    "op_timeout_s": 5.0,
}


class NoMedium(ObjectMedium):
    descriptor = -1
    num_bytes = 2**20

    def make(self, num_bytes: int) -> tuple[Any, int] | None:
        return None


class NoPeers(Peers):
    def find(self, key: str, names: Sequence[bytes], timeout_s: float) -> set[bytes]:
        return set()

    def fetch(self, key: str, names: Sequence[bytes], timeout_s: float) -> BorrowedBlocks:
        return BorrowedBlocks({}, None)


def test_ray_server_whose_clients_leave_before_they_are_answered_ends_all_the_same() -> None:
    has_ended = threading.Event()
    server = DirectoryServer(NoMedium(), NoPeers(), LINGER_S, has_ended.set)
    address = f"\0kvrelay-test-{os.getpid()}".encode()
    server.listen(address)
    for hello in [HELLO] * 40 + [{**HELLO, "linger_s": "soon"}, {}]:
        say_hello(address, hello).close()
    assert has_ended.wait(HANG_S)


def test_ray_server_connection_with_blocks_of_another_size_than_its_store_is_ended() -> None:
    has_ended = threading.Event()
    server = DirectoryServer(NoMedium(), NoPeers(), LINGER_S, has_ended.set)
    address = f"\0kvrelay-test-sizes-{os.getpid()}".encode()
    server.listen(address)
    first = say_hello(address, HELLO)
    assert first.receive()[0] is Operation.OK
    other = say_hello(address, {**HELLO, "block_bytes": 2 * LAYOUT.block_bytes})
    with pytest.raises(ConnectionError):
        other.receive()
    first.ask(Operation.LOOKUP, b"", 0)
    first.close()
    other.close()
    assert has_ended.wait(HANG_S)


def say_hello(address: bytes, hello: dict[str, Any]) -> FrameStream:
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(address)
    stream = FrameStream(connected, HANG_S)
    stream.begin()
    stream.send(Operation.HELLO, json.dumps(hello).encode())
    return stream
