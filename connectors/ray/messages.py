"""What engines and the directory of their Ray node say to each other, over a Unix socket: frames, their bodies, and its address.

A frame is a head (magic, operation, body length) and a body of packed numbers; names of blocks are 16 bytes each. Only processes
of one user talk to each other; even so nothing is read without a bound.
"""

from __future__ import annotations

import enum
import hashlib
import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConnectorError

VERSION = 2  # in the address, so that processes of two versions have directories of their own
NAME_BYTES = 16
MAX_NAMES = 65536  # in one frame
ABSENT = 2**64 - 1
_HEAD = struct.Struct("<4sII")
_MAGIC = b"KVRY"
_MAX_BODY_BYTES = 16 * 1024 * 1024
_COUNT = struct.Struct("<I")
_STATUS = struct.Struct("<QQQQ")
_PEER = struct.Struct("3i")
LOCATED_BLOCK = struct.Struct(f"<Q{BLOCK_HEADER_BYTES}s")


class Operation(enum.IntEnum):
    """Of a frame. All but RELEASE are answered, with OK or REFUSED."""

    HELLO = 1  # JSON, and on a data connection the pool's descriptor; answered with JSON and the object store's descriptor
    LOOKUP = 2  # names: which of them are stored
    TOUCH = 3  # ancestors and names, as in LOCATE: which of the names are stored
    PUT = 4  # names, each with its block in the pool, and names that are touched and not evicted for them. Answered with 0 each
    # for what is not stored, 1 for what was stored before, 2 for what is by this
    LOCATE = 6  # ancestors and names: where in the object store each name is, which stays there until
    RELEASE = 7  # says that the last LOCATE's bytes have been copied
    FORGET = 8  # names whose bytes are not what they should be
    STORES = 9  # a namespace, instead of HELLO: which stores it has, as JSON. The connection ends
    LIST = 10  # of visitors, as are the next two; see visits.py: a page of what the store on this node holds
    INSPECT = 11  # as LOCATE, with names alone: this node's, and not as a use of them
    REMOVE = 12  # names, each with the number of the place that it was listed at: which of them went
    OK = 100
    REFUSED = 101  # the reason, as text


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """Of a store on this node, at the end of every answer; num_evicted counts all blocks that it lost."""

    num_blocks: int = 0
    num_bytes: int = 0
    capacity_bytes: int = 0
    num_evicted: int = 0


STATUS_BYTES = _STATUS.size


def pack_status(status: StoreStatus) -> bytes:
    """As it stands at the end of an answer."""
    return _STATUS.pack(status.num_blocks, status.num_bytes, status.capacity_bytes, status.num_evicted)


def unpack_status(body: bytes) -> StoreStatus:
    """From the end of an answer. Raises ConnectorError."""
    if len(body) < STATUS_BYTES:
        raise ConnectorError("an answer of the directory is too short")
    return StoreStatus(*_STATUS.unpack(body[-STATUS_BYTES:]))


def socket_address(ray_address: str, node_ip: str) -> bytes:
    """Where the directory of a Ray node listens: a name without a file, so that none can be left behind."""
    digest = hashlib.sha256(f"{ray_address}|{node_ip}".encode()).hexdigest()[:16]
    return b"\0kvrelay-ray-%d-%d-%s" % (VERSION, os.geteuid(), digest.encode())


def check_peer(connected: socket.socket) -> None:
    """Raise ConnectorError unless the other end belongs to the same user (or root): anybody may take a name without a file."""
    _pid, uid, _gid = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    if uid not in (os.geteuid(), 0):
        raise ConnectorError(f"the other end of a connection belongs to user {uid}")


def pack_names(names: Sequence[bytes]) -> bytes:
    """As they stand in a body."""
    return b"".join(names)


def unpack_names(body: bytes) -> list[bytes]:
    """Raises ConnectorError."""
    if len(body) % NAME_BYTES or len(body) > MAX_NAMES * NAME_BYTES:
        raise ConnectorError("a list of names of a wrong length")
    return [body[start : start + NAME_BYTES] for start in range(0, len(body), NAME_BYTES)]


def pack_chain(ancestors: Sequence[bytes], names: Sequence[bytes]) -> bytes:
    """TOUCH, LOCATE: names, and those that come before them in their prefix."""
    return _COUNT.pack(len(ancestors)) + pack_names(ancestors) + pack_names(names)


def unpack_chain(body: bytes) -> tuple[list[bytes], list[bytes]]:
    """Ancestors and names. Raises ConnectorError."""
    if len(body) < _COUNT.size:
        raise ConnectorError("a chain of a wrong length")
    (num_ancestors,) = _COUNT.unpack_from(body)
    names = unpack_names(body[_COUNT.size :])
    if num_ancestors > len(names):
        raise ConnectorError("a chain of a wrong length")
    return names[:num_ancestors], names[num_ancestors:]


def pack_put(names: Sequence[bytes], block_ids: Sequence[int], kept: Sequence[bytes]) -> bytes:
    """PUT."""
    return _COUNT.pack(len(names)) + pack_names(names) + struct.pack(f"<{len(block_ids)}I", *block_ids) + pack_names(kept)


def unpack_put(body: bytes) -> tuple[list[bytes], tuple[int, ...], list[bytes]]:
    """names, block ids, and names that must be kept. Raises ConnectorError."""
    count = _COUNT.unpack_from(body)[0] if len(body) >= _COUNT.size else MAX_NAMES + 1
    names_end = _COUNT.size + count * NAME_BYTES
    ids_end = names_end + count * _COUNT.size
    if count > MAX_NAMES or ids_end > len(body):
        raise ConnectorError("a list of blocks of a wrong length")
    block_ids = struct.unpack_from(f"<{count}I", body, names_end)
    return unpack_names(body[_COUNT.size : names_end]), block_ids, unpack_names(body[ids_end:])


class FrameStream:
    """One end of a connection. Every exchange ends within timeout_s, or raises TimeoutError. One thread at a time."""

    def __init__(self, connected: socket.socket, timeout_s: float) -> None:
        self._socket = connected
        self._timeout_s = timeout_s
        self._deadline_s = float("inf")

    def fileno(self) -> int:
        """For poll."""
        return self._socket.fileno()

    def begin(self, timeout_s: float | None = None) -> None:
        """From now on counts the time of an exchange."""
        self._deadline_s = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

    def wait_for_ever(self) -> None:
        """Until the next begin(), receive() waits for the other end's next question or its end."""
        self._deadline_s = float("inf")

    def send(self, operation: Operation, body: bytes, descriptor: int | None = None) -> None:
        """Raises OSError (TimeoutError included)."""
        frame = memoryview(_HEAD.pack(_MAGIC, operation, len(body)) + body)
        self._set_timeout()
        sent = socket.send_fds(self._socket, [frame], [descriptor]) if descriptor is not None else self._socket.send(frame)
        while sent < len(frame):
            self._set_timeout()
            sent += self._socket.send(frame[sent:])

    def receive(self) -> tuple[Operation, bytes, int | None]:
        """The next frame, and the descriptor that came with it, which is the caller's. Raises OSError or ConnectorError; EOFError
        when the other end has gone."""
        self._set_timeout()
        head, descriptors, _flags, _address = socket.recv_fds(self._socket, _HEAD.size, 1)
        descriptor = descriptors[0] if descriptors else None
        try:
            while len(head) < _HEAD.size:
                head += self._receive_some(_HEAD.size - len(head)) if head else _raise_eof()
            magic, number, num_bytes = _HEAD.unpack(head)
            if magic != _MAGIC or num_bytes > _MAX_BODY_BYTES or number not in Operation._value2member_map_:
                raise ConnectorError("the other end of a connection does not speak our protocol")
            body = bytearray()
            while len(body) < num_bytes:
                body += self._receive_some(num_bytes - len(body))
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            raise
        return Operation(number), bytes(body), descriptor

    def ask(self, operation: Operation, body: bytes, num_answer_bytes: int) -> tuple[bytes, StoreStatus]:
        """An exchange: the answer's body, of the given length, without its status. Raises OSError or ConnectorError."""
        self.begin()
        self.send(operation, body)
        return self.receive_answer(num_answer_bytes)

    def receive_answer(self, num_answer_bytes: int) -> tuple[bytes, StoreStatus]:
        """As ask() returns it."""
        body = self.receive_any_answer()
        if len(body) != num_answer_bytes + STATUS_BYTES:
            raise ConnectorError("an answer of a wrong length")
        return body[:num_answer_bytes], unpack_status(body)

    def receive_any_answer(self) -> bytes:
        """The answer's body, of whatever length, with its status. Raises OSError or ConnectorError."""
        answer, body, descriptor = self.receive()
        if descriptor is not None:
            os.close(descriptor)
        if answer is not Operation.OK:
            raise ConnectorError(body.decode(errors="replace") if answer is Operation.REFUSED else "an answer out of turn")
        return body

    def shut_down(self) -> None:
        """Wake whoever waits for the other end. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # gone already
            return

    def close(self) -> None:
        """Safe to repeat."""
        self._socket.close()

    def _receive_some(self, num_bytes: int) -> bytes:
        self._set_timeout()
        return self._socket.recv(num_bytes) or _raise_eof()

    def _set_timeout(self) -> None:
        if self._deadline_s == float("inf"):
            self._socket.settimeout(None)
            return
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._socket.settimeout(left_s)


def _raise_eof() -> bytes:
    raise ConnectionResetError("the other end has gone")
