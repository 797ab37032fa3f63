"""Nodes with the tcp connector for tests of what goes wrong between them: real ones, here and in other processes, and a liar."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from connectors.contract.node import LAYOUT, Node, SteppedClock, content_of
from connectors.contract.peer import Peer
from connectors.registry import create_connector
from connectors.stored_block import pack_block_header
from connectors.tcp.connector import TcpConnector
from connectors.tcp.frames import (
    CHALLENGE_BYTES,
    HEAD_BYTES,
    HELLO_BYTES,
    ITEM_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    EndPoint,
    Kind,
    check_challenge,
    pack_challenge,
    pack_head,
    pack_hello,
    pack_proof,
    parse_head,
    split_items,
)
from connectors.tcp.stream import BlockStream
from core.kv.connector import PrefixLookup
from core.kv.layout import KVLayout
from deploy.topology import find_free_ports
from tests.support.delaying_proxy import HOST, DelayingProxy

OP_TIMEOUT_S = 0.5
PATIENCE_S = 20.0  # a machine with other work: what is bounded by OP_TIMEOUT_S must not take many times that


class TcpBench:
    """Opens nodes and sources, and ends them."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._others: list[Peer | DelayingProxy | LyingSource] = []

    def open_node(self, *peers: str, layout: KVLayout = LAYOUT, secret: bytes = b"", **options: Any) -> Node:
        """A node in this process."""
        clock = SteppedClock()
        values = {"peers": list(peers), "op_timeout_s": OP_TIMEOUT_S, "capacity_bytes": "8MiB", "lookup_wait_s": 2.0, **options}
        connector = create_connector("tcp", values, clock)
        connector.cluster_secret = secret
        node = Node(connector, clock, layout)
        self._nodes.append(node)
        return node

    def open_process(self, port: int, **options: Any) -> Peer:
        """A node in a process of its own, which serves at this port."""
        peer = Peer("tcp", {"port": port, "op_timeout_s": OP_TIMEOUT_S, "capacity_bytes": "8MiB", **options})
        self._others.append(peer)
        assert peer.ask("ready")
        return peer

    def open_proxy(self, port: int) -> DelayingProxy:
        """A way to a port, with faults."""
        proxy = DelayingProxy(port)
        self._others.append(proxy)
        return proxy

    def open_liar(self, lie: Callable[[BlockStream, list[bytes]], None], layout: KVLayout = LAYOUT) -> LyingSource:
        """A source that says it has everything, and then answers pulls with a lie."""
        liar = LyingSource(lie, layout)
        self._others.append(liar)
        return liar

    def close(self) -> None:
        """End all, each in time."""
        for other in reversed(self._others):
            if isinstance(other, Peer):
                other.kill()
            else:
                other.close()
        for node in self._nodes:
            started_s = time.monotonic()
            node.connector.close()
            assert time.monotonic() - started_s < PATIENCE_S
            assert node.stats().num_open_references == 0


def free_port() -> int:
    """Of this host."""
    (port,) = find_free_ports(HOST, 1)
    return port


def connector_of(node: Node) -> TcpConnector:
    """With its type."""
    assert isinstance(node.connector, TcpConnector)
    return node.connector


def ask(node: Node, request_id: str, hashes: list[bytes], *sources: str) -> int | None:
    """One question of the step thread: blocks, or None."""
    question = PrefixLookup(request_id, hashes, node.layout.block_size, sources)
    answer = node.connector.get_num_new_matched_tokens(question, 0)
    return None if answer is None else answer // node.layout.block_size


def end_point(layout: KVLayout = LAYOUT, secret: bytes = b"") -> EndPoint:
    """What a process of this test says of itself."""
    return EndPoint(secret, layout.fingerprint, layout.block_bytes, os.urandom(16))


def open_puller(address: str, end: EndPoint) -> BlockStream:
    """A connection past the handshake."""
    stream = BlockStream(socket.create_connection((HOST, int(address.rpartition(":")[2])), 5.0), 5.0)
    hello = pack_hello(end, os.urandom(NONCE_BYTES))
    stream.send([hello])
    challenge = stream.receive(CHALLENGE_BYTES)
    check_challenge(end, hello, challenge)
    stream.send([pack_proof(end, hello, challenge)])
    stream.receive_head(Kind.WELCOME)
    return stream


class LyingSource:
    """Does all that a source does, up to the blocks. lie(stream, hashes) answers a pull."""

    def __init__(self, lie: Callable[[BlockStream, list[bytes]], None], layout: KVLayout) -> None:
        self._lie = lie
        self._end = end_point(layout)
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self._streams: list[BlockStream] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        """End it and its connections."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for stream in self._streams:
            stream.abort()
        for thread in self._threads[1:]:
            thread.join()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                stream = BlockStream(self._listener.accept()[0], 5.0)
                self._streams.append(stream)
                thread = threading.Thread(target=self._serve, args=(stream,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, stream: BlockStream) -> None:
        with contextlib.suppress(OSError):
            hello = stream.receive(HELLO_BYTES)
            stream.send([pack_challenge(self._end, hello, os.urandom(NONCE_BYTES))])
            stream.receive(PROOF_BYTES)
            stream.send([pack_head(Kind.WELCOME)])
            while True:
                stream.wait_readable()
                kind, count = parse_head(stream.receive(HEAD_BYTES))
                items = split_items(stream.receive(count * ITEM_BYTES))
                if kind is Kind.LOOKUP:
                    stream.send([pack_head(Kind.FOUND, count - 1), b"\1" * (count - 1)])
                elif kind is Kind.PULL:
                    self._lie(stream, items)
                else:
                    stream.send([pack_head(Kind.DONE)])
        stream.close()


def block_value(block_hash: bytes, layout: KVLayout = LAYOUT) -> bytes:
    """Header and payload, as they should be."""
    payload = content_of(block_hash, layout)
    return pack_block_header(layout.fingerprint, block_hash, payload) + payload
