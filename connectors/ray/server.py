"""The directory of a Ray node: answers the node's engines, each connection on a thread of its own. Knows no Ray.

One directory serves all stores (a namespace and a layout each) of its node and user. A store ends some time after its last
connection, the directory after its last store; the death of an engine is the end of its connections and of what they held.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from connectors.huge_pages import map_file
from connectors.ray.index import Place, StoreIndex
from connectors.ray.messages import (
    ABSENT,
    LOCATED_BLOCK,
    FrameStream,
    Operation,
    check_peer,
    pack_status,
    unpack_chain,
    unpack_names,
    unpack_put,
)
from connectors.ray.sessions import BorrowedBlocks, OpenStore, Session, parse_hello
from connectors.ray.slabs import USABLE_FRACTION, ObjectMedium, SlabMaker
from connectors.ray.visits import VISITS, answer_visit, describe_stores
from connectors.stored_block import BLOCK_HEADER_BYTES, pack_block_header
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_SEND_TIMEOUT_S = 10.0
_NO_HEADER = bytes(BLOCK_HEADER_BYTES)


class Peers(ABC):
    """The directories of the other nodes."""

    @abstractmethod
    def find(self, key: str, names: Sequence[bytes], timeout_s: float) -> set[bytes]:
        """Which of these some other node has. Does not raise."""

    @abstractmethod
    def fetch(self, key: str, names: Sequence[bytes], timeout_s: float) -> BorrowedBlocks:
        """Bring those that some other node has to this one. Does not raise."""


class DirectoryServer:
    """Serves until nobody has used it for linger_s; then it calls end()."""

    def __init__(self, medium: ObjectMedium, peers: Peers, linger_s: float, end: Callable[[], None]) -> None:
        self._medium = medium
        self._peers = peers
        self._linger_s = linger_s
        self._end = end
        self.mutex = threading.Lock()  # of everything below
        self._listener_by_address: dict[bytes, socket.socket] = {}
        self._stores: dict[str, OpenStore] = {}
        self._num_connections = 0
        self._unused_since_s = time.monotonic()
        self._is_ending = False
        self._pools: weakref.WeakValueDictionary[tuple[int, int], npt.NDArray[np.uint8]] = weakref.WeakValueDictionary()
        self._max_bytes = int(medium.num_bytes * USABLE_FRACTION)
        self._slabs = SlabMaker(medium, self._max_bytes, self.mutex, lambda: [store.index for store in self._stores.values()])
        threading.Thread(target=self._end_when_unused, name="ray-end", daemon=True).start()

    def listen(self, address: bytes) -> None:
        """Be reached there, too: engines may name one Ray in several ways. Raises OSError when somebody else listens there."""
        with self.mutex:
            if self._is_ending:
                raise OSError("the directory is about to end")
            if address in self._listener_by_address:
                return
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(address)
                listener.listen(128)
                listener.settimeout(_TICK_S)
            except OSError:
                listener.close()
                raise
            self._listener_by_address[address] = listener
        threading.Thread(target=self._accept, args=(listener,), name="ray-accept", daemon=True).start()

    @contextlib.contextmanager
    def pinned(self, key: str, names: Sequence[bytes]) -> Iterator[tuple[int, list[Place | None]]]:
        """For other nodes' directories: the size of blocks, and where these are, and stay meanwhile."""
        with self.mutex:
            store = self._stores.get(key)
            if store is not None:
                index, slabs = store.index, list(store.index.slabs)  # kept, should the store end meanwhile
                index.touch(names)
                places = [index.find(name) for name in names]
                found = [place for place in places if place]
                for place in found:
                    place.num_pins += 1
        if store is None:
            yield 1, [None] * len(names)
            return
        try:
            yield index.block_bytes, places
        finally:
            with self.mutex:
                for place in found:
                    index.unpin(place)
            slabs.clear()

    # -- connections ---------------------------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        while not self._is_ending:
            try:
                connected, _address = listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # no descriptors left: others may end
                if not self._is_ending:
                    logger.warning("no connection could be accepted: %s", str(error))
                    time.sleep(_TICK_S)
                continue
            with self.mutex:
                self._num_connections += 1
            threading.Thread(target=self._serve, args=(connected,), name="ray-connection", daemon=True).start()

    def _end_when_unused(self) -> None:
        while not self._is_ending:
            time.sleep(_TICK_S)
            with self.mutex:
                self._is_ending = self._is_unused(time.monotonic())
                listeners = list(self._listener_by_address.values())
        for listener in listeners:
            listener.close()  # from now on there is none, and whoever comes makes another one
        self._end()

    def _is_unused(self, now_s: float) -> bool:
        """Ends stores, and says whether the directory is to end. The caller holds the mutex."""
        for key, store in list(self._stores.items()):
            if store.is_unused(now_s):
                del self._stores[key]
                self._slabs.drop(store.index)
        if self._num_connections:
            self._unused_since_s = now_s
        return not self._stores and now_s - self._unused_since_s >= self._linger_s

    def _serve(self, connected: socket.socket) -> None:
        stream = FrameStream(connected, _SEND_TIMEOUT_S)
        session: Session | None = None
        try:
            check_peer(connected)
            stream.begin()
            operation, body, descriptor = stream.receive()
            if operation is Operation.STORES:
                with self.mutex:
                    answer = describe_stores({key: store.index for key, store in self._stores.items()}, body)
                stream.send(Operation.OK, answer)
                return
            session = self._greet(stream, operation, body, descriptor)
            self._welcome(session)
            while True:
                stream.wait_for_ever()
                operation, body, descriptor = stream.receive()
                if descriptor is not None:
                    os.close(descriptor)
                stream.begin()
                self._answer(session, operation, body)
        except ConnectionError:  # it has left
            pass
        except (OSError, ConnectorError) as error:
            logger.warning("a connection ends: %s", str(error))
        finally:
            stream.close()
            with self.mutex:
                self._num_connections -= 1
                if session is not None:
                    session.leave()

    def _greet(self, stream: FrameStream, operation: Operation, body: bytes, descriptor: int | None) -> Session:
        """Raises OSError or ConnectorError."""
        with contextlib.ExitStack() as closing:
            if descriptor is not None:
                closing.callback(os.close, descriptor)
            if operation is not Operation.HELLO:
                raise ConnectorError("a connection begins without HELLO")
            hello = parse_hello(body)
            pool = None if descriptor is None else self._map_pool(descriptor, hello.stride_bytes * hello.num_blocks)
            with self.mutex:
                if hello.key not in self._stores:
                    if hello.is_visitor and pool is None:
                        raise ConnectorError("the store of a visitor has ended")
                    index = StoreIndex(min(hello.capacity_bytes, self._max_bytes), hello.block_bytes, hello.object_bytes)
                    self._stores[hello.key] = OpenStore(index, hello.linger_s)
                store = self._stores[hello.key]
                if store.index.block_bytes != hello.block_bytes:
                    raise ConnectorError(f"blocks of {hello.block_bytes} bytes, in a store of {store.index.block_bytes} each")
                if not hello.is_visitor:
                    store.linger_s = hello.linger_s
                session = Session(stream, hello, store, pool)
                session.join()
            return session

    def _welcome(self, session: Session) -> None:
        """Answer HELLO. Raises OSError: the session counts already, and has to end."""
        with self.mutex:
            status = session.store.index.status()
        session.stream.send(
            Operation.OK,
            json.dumps({"medium_bytes": self._medium.num_bytes}).encode() + pack_status(status),
            self._medium.descriptor if session.has_store_memory else None,
        )

    def _map_pool(self, descriptor: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        found = os.fstat(descriptor)
        with self.mutex:
            pool = self._pools.get((found.st_dev, found.st_ino))
        if pool is None:
            pool = map_file(descriptor, num_bytes)
            with self.mutex:
                self._pools[found.st_dev, found.st_ino] = pool
        return pool

    # -- questions -----------------------------------------------------------------------------------------------------
    def _answer(self, session: Session, operation: Operation, body: bytes) -> None:
        """Raises OSError or ConnectorError, which end the connection."""
        index = session.store.index
        if operation is Operation.RELEASE:
            with self.mutex:
                session.release()
            return
        if operation is Operation.PUT:
            answer, refusal = self._put(session, body)
            if refusal:
                session.stream.send(Operation.REFUSED, refusal.encode())
                return
        elif operation is Operation.LOCATE:
            answer = self._locate(session, body)
        elif operation is Operation.LOOKUP:
            answer = self._look_up(session, unpack_names(body))
        elif operation is Operation.TOUCH:
            ancestors, names = unpack_chain(body)
            with self.mutex:
                index.touch([*ancestors, *names])
                answer = bytes(index.find(name) is not None for name in names)
        elif operation is Operation.FORGET:
            with self.mutex:
                index.forget(unpack_names(body))
            answer = b""
        elif operation in VISITS:
            with self.mutex:
                session.release()
                answer = answer_visit(operation, body, index, session.listed, session.pins)
        else:
            raise ConnectorError("a question of an unknown kind")
        with self.mutex:
            status = index.status()
        session.stream.send(Operation.OK, answer + pack_status(status))

    def _look_up(self, session: Session, names: list[bytes]) -> bytes:
        with self.mutex:
            missing = [name for name in names if session.store.index.find(name) is None]
        found = self._peers.find(session.hello.key, missing, session.hello.op_timeout_s / 2) if missing else set()
        absent = set(missing) - found
        return bytes(name not in absent for name in names)

    def _locate(self, session: Session, body: bytes) -> bytes:
        ancestors, names = unpack_chain(body)
        index, hello = session.store.index, session.hello
        with self.mutex:
            session.release()
            index.touch([*ancestors, *names])
            found = {name: place for name in names if (place := index.find(name))}
            session.pins = list(found.values())
            for place in session.pins:
                place.num_pins += 1
        missing = [name for name in names if name not in found]
        borrowed = self._peers.fetch(hello.key, missing, hello.op_timeout_s / 2) if missing else BorrowedBlocks({}, None)
        session.borrowed = borrowed
        places = borrowed.places | {name: (place.offset, place.header) for name, place in found.items()}
        nowhere = (ABSENT, _NO_HEADER)
        return b"".join(LOCATED_BLOCK.pack(*places.get(name, nowhere)) for name in names)

    def _put(self, session: Session, body: bytes) -> tuple[bytes, str]:
        """For each name whether it is stored now (1), and by this (2); or why none is."""
        names, block_ids, kept = unpack_put(body)
        pool, stride_bytes = session.pool, session.hello.stride_bytes
        if pool is None or any((block_id + 1) * stride_bytes > len(pool) for block_id in block_ids):
            raise ConnectorError("PUT of blocks outside the pool")
        index = session.store.index
        with self.mutex:
            new = [position for position, name in enumerate(names) if index.find(name) is None]
        does_ray_answer = self._slabs.grow(index, len(new), session.hello.op_timeout_s / 2)
        with self.mutex:
            index.evict(len(new) - index.num_free, [*kept, *names])
            offsets = index.take(len(new))
            self._slabs.wake()
        if new and not offsets and not does_ray_answer:
            return b"", "Ray does not answer the directory"
        del new[len(offsets) :]
        new_names = [names[position] for position in new]
        try:
            headers = self._write(session, offsets, new_names, [block_ids[position] for position in new])
        except BaseException:
            with self.mutex:
                index.free(offsets)
            raise
        with self.mutex:
            index.commit(new_names, offsets, headers)
            index.touch(kept)
            flags = bytearray(index.find(name) is not None for name in names)
        for position in new:
            flags[position] *= 2
        return bytes(flags), ""

    def _write(self, session: Session, offsets: Sequence[int], names: Sequence[bytes], block_ids: Sequence[int]) -> list[bytes]:
        """Copy blocks out of the pool into slots; their headers. A block is hashed and copied while the core's cache has it."""
        assert session.pool is not None
        pool, memory, num_bytes = session.pool, self._medium.memory, session.hello.block_bytes
        headers = []
        for offset, name, block_id in zip(offsets, names, block_ids, strict=True):
            block = pool[block_id * session.hello.stride_bytes :][:num_bytes]
            headers.append(pack_block_header(session.hello.fingerprint, name, block.data))
            np.copyto(memory[offset : offset + num_bytes], block)  # lets go of the GIL, as the hash does
        return headers
