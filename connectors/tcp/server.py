"""The source's end: serves this node's blocks to other nodes. A thread accepts, and each connection has one of its own.

Whoever connects is a stranger until it has proved that it has the secret; whatever it sends then is bounded, too. Nothing that
comes in is ever written anywhere: a connection can only list and read blocks, lease them, and have one checked.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence

from connectors.stored_block import BlockCheck
from connectors.tcp.block_memory import BlockMemory
from connectors.tcp.frames import (
    HEAD_BYTES,
    HELLO_BYTES,
    ITEM_BYTES,
    MAX_ITEMS,
    MAX_PULLED,
    NO_LEASE,
    NONCE_BYTES,
    PROOF_BYTES,
    EndPoint,
    Kind,
    Refusal,
    VersionError,
    is_proof,
    is_same_layout,
    pack_challenge,
    pack_head,
    parse_head,
    split_items,
)
from connectors.tcp.leases import Leases
from connectors.tcp.stream import BlockStream
from connectors.tcp.visits import answer_describe, answer_list, answer_read

logger = logging.getLogger(__name__)

_MAX_STRANGERS = 32  # connections that have proved nothing yet; the oldest has to go for one more
_EXPIRE_INTERVAL_S = 0.5
_WARN_INTERVAL_S = 10.0
_SEND_BYTES = 1024 * 1024  # per system call, of small blocks


class BlockServer:
    """Listens from listen() to close()."""

    def __init__(self, end: EndPoint, memory: BlockMemory, leases: Leases, op_timeout_s: float, max_connections: int) -> None:
        self._end = end
        self._memory = memory
        self._leases = leases
        self._op_timeout_s = op_timeout_s
        self._max_connections = max_connections
        self._mutex = threading.Lock()  # of the connections
        self._strangers: dict[BlockStream, None] = {}  # oldest first
        self._streams: set[BlockStream] = set()
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._listener: socket.socket | None = None
        self._wake_reader, self._wake_writer = os.pipe()
        self._acceptor: threading.Thread | None = None
        self._next_warning_s = 0.0
        self.num_refused = 0

    def listen(self, host: str, port: int) -> int:
        """Begin to serve; the port. Raises OSError when the address cannot be had."""
        family, kind, protocol, _name, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
        except OSError:
            listener.close()
            raise
        listener.setblocking(False)
        self._listener = listener
        self._acceptor = threading.Thread(target=self._accept_all, name="kv-tcp-accept", daemon=True)
        self._acceptor.start()
        return int(listener.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Of pullers that have proved that they have the secret."""
        return len(self._streams) - len(self._strangers)

    def close(self, timeout_s: float) -> bool:
        """End all connections and leases; whether every thread has ended in time. Safe to repeat."""
        with self._mutex:
            is_first, self._is_closing = not self._is_closing, True
            streams, threads = list(self._streams), list(self._threads)
        if is_first:
            os.write(self._wake_writer, b"!")
        for stream in streams:
            stream.abort()
        deadline_s = time.monotonic() + timeout_s
        if self._acceptor is not None:
            threads.append(self._acceptor)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        has_ended = not any(thread.is_alive() for thread in threads)
        if is_first and has_ended:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
        return has_ended

    # -- the acceptor's thread -----------------------------------------------------------------------------------------
    def _accept_all(self) -> None:
        assert self._listener is not None
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake_reader, select.POLLIN)
        while not self._is_closing:
            ready = [descriptor for descriptor, _event in poller.poll(_EXPIRE_INTERVAL_S * 1000)]
            self._leases.expire(time.monotonic())
            if self._listener.fileno() in ready:
                try:
                    connected, _peer = self._listener.accept()
                except OSError:  # it has gone already, or there are no descriptors left
                    time.sleep(0.01)
                    continue
                self._begin(connected)
        self._listener.close()

    def _begin(self, connected: socket.socket) -> None:
        try:
            stream = BlockStream(connected, self._op_timeout_s)
        except OSError:  # reset before we had it
            connected.close()
            return
        with self._mutex:
            if self._is_closing or len(self._streams) >= self._max_connections:
                self.num_refused += 1
                stream.close()
                return
            if len(self._strangers) >= _MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.abort()
            self._strangers[stream] = None
            self._streams.add(stream)
            thread = threading.Thread(target=self._serve, args=(stream,), name="kv-tcp-serve", daemon=True)
            self._threads.add(thread)
            thread.start()  # before close() can find it

    # -- a connection's thread -----------------------------------------------------------------------------------------
    def _serve(self, stream: BlockStream) -> None:
        try:
            self._admit(stream)
            with self._mutex:
                self._strangers.pop(stream, None)
            while not self._is_closing:
                self._answer(stream)
        except OSError as error:
            self._note_end(stream, error)
        except Exception:  # the top of this thread's loop: a fault costs this connection
            logger.exception("a connection for KV failed")
        finally:
            self._leases.release_all(stream)
            with self._mutex:
                self._strangers.pop(stream, None)
                self._streams.discard(stream)
                self._threads.discard(threading.current_thread())
            stream.close()

    def _admit(self, stream: BlockStream) -> None:
        """The handshake. Raises OSError."""
        end = self._end
        head = stream.receive(HEAD_BYTES)
        try:
            parse_head(head, Kind.HELLO)
        except VersionError:
            stream.send([pack_head(Kind.REFUSED, Refusal.VERSION)])
            raise
        hello = head + stream.receive(HELLO_BYTES - HEAD_BYTES)
        challenge = pack_challenge(end, hello, os.urandom(NONCE_BYTES))
        stream.send([challenge])
        proof = stream.receive(PROOF_BYTES)
        parse_head(proof[:HEAD_BYTES], Kind.PROOF)
        refusal = Refusal.LAYOUT if not is_same_layout(hello, end) else None
        if not is_proof(end, hello, challenge, proof):
            refusal = Refusal.SECRET
        if refusal is not None:
            stream.send([pack_head(Kind.REFUSED, refusal)])
            raise ConnectionError(f"refused: {refusal.name.lower()}")
        stream.send([pack_head(Kind.WELCOME)])

    def _answer(self, stream: BlockStream) -> None:
        """Wait for a question and answer it. Raises OSError."""
        stream.wait_readable()
        kind, count = stream.receive_head()
        if kind not in _ANSWERS or count > MAX_ITEMS or (kind in (Kind.PULL, Kind.READ) and count > MAX_PULLED):
            raise ConnectionError(f"a question that nobody asks: {kind.name} of {count}")
        items = split_items(stream.receive(count * ITEM_BYTES)) if count else []
        _ANSWERS[kind](self, stream, items)

    def _answer_lookup(self, stream: BlockStream, items: Sequence[bytes]) -> None:
        if not items:
            raise ConnectionError("a lookup without a lease's name")
        lease_name, hashes = items[0], items[1:]
        if lease_name != NO_LEASE:
            self._leases.take(stream, lease_name, hashes, time.monotonic())
        stream.send([pack_head(Kind.FOUND, len(hashes)), bytes(map(self._memory.stored.__contains__, hashes))])

    def _answer_pull(self, stream: BlockStream, items: Sequence[bytes]) -> None:
        """Blocks stay pinned until they are sent, so what arrives is what was found."""
        slots = self._memory.pin_prefix(items)
        num_sent = 0
        try:
            parts: list[bytes | memoryview] = [pack_head(Kind.BLOCKS, len(slots))]
            per_call = max(1, _SEND_BYTES // self._end.block_bytes)
            for start in range(0, len(slots), per_call):
                batch = slots[start : start + per_call]
                for slot in batch:
                    parts += self._memory.parts(slot)
                stream.send(parts)
                parts = []
                self._memory.unpin(batch)
                num_sent += len(batch)
            if parts:
                stream.send(parts)
        finally:
            self._memory.unpin(slots[num_sent:])

    def _answer_renew(self, stream: BlockStream, items: Sequence[bytes]) -> None:
        self._leases.renew(stream, items, time.monotonic())
        stream.send([pack_head(Kind.DONE)])

    def _answer_release(self, stream: BlockStream, items: Sequence[bytes]) -> None:
        self._leases.release(stream, items)
        stream.send([pack_head(Kind.DONE)])

    def _answer_suspect(self, stream: BlockStream, items: Sequence[bytes]) -> None:
        """A block arrived damaged: if it is damaged here, it goes."""
        scratch = memoryview(bytearray(self._end.block_bytes))
        for block_hash in items[:MAX_PULLED]:
            slots = self._memory.pin_prefix([block_hash])
            if slots and self._memory.read(slots[0], scratch) is not BlockCheck.OK:
                self._memory.forget(block_hash)
                logger.warning("block %s was damaged in memory and is dropped", block_hash.hex())
            self._memory.unpin(slots)
        stream.send([pack_head(Kind.DONE)])

    def _note_end(self, stream: BlockStream, error: OSError) -> None:
        """Count strangers that were refused, and tell of them, but not of each."""
        with self._mutex:
            if stream not in self._strangers or self._is_closing:
                return
            self.num_refused += 1
            must_tell = time.monotonic() >= self._next_warning_s
            if must_tell:
                self._next_warning_s = time.monotonic() + _WARN_INTERVAL_S
        if must_tell:
            logger.warning("%d connections for KV were refused so far; the last: %s", self.num_refused, error)


_ANSWERS: dict[Kind, Callable[[BlockServer, BlockStream, Sequence[bytes]], None]] = {
    Kind.LOOKUP: BlockServer._answer_lookup,
    Kind.PULL: BlockServer._answer_pull,
    Kind.RENEW: BlockServer._answer_renew,
    Kind.RELEASE: BlockServer._answer_release,
    Kind.SUSPECT: BlockServer._answer_suspect,
    Kind.DESCRIBE: lambda server, stream, _items: answer_describe(server._memory, stream),
    Kind.LIST: lambda server, stream, _items: answer_list(server._memory, stream),
    Kind.READ: lambda server, stream, items: answer_read(server._memory, stream, items),
}
