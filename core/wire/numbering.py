"""Numbers on control messages: what is lost, repeated or out of order on its way is noticed, whatever the transport promises.

A node's registration begins a new count in both directions. Messages of registration itself carry number 0 and are outside of it.
"""

from __future__ import annotations

import struct
from enum import Enum
from typing import NamedTuple

from core.errors import WireError

PROTOCOL_VERSION = 2
_HEADER = struct.Struct(">BII")  # protocol version, registration index, number
HEADER_BYTES = _HEADER.size


class Place(NamedTuple):
    """Where a message belongs. number 0: outside the count; else 1, 2, 3 … of that registration and direction."""

    registration_index: int
    number: int


OUTSIDE = Place(0, 0)


class Arrival(Enum):
    """What a received message is, going by its place."""

    NEXT = "next"
    OLD = "old"  # a repetition, or of a registration that is over: to be ignored
    GAP = "gap"  # something before it is missing: whatever is in flight must start over


class MessageNumbers:
    """One end of a node's registration: numbers what it sends and judges what it receives. Not thread-safe."""

    __slots__ = ("_num_received", "_num_sent", "registration_index")

    def __init__(self, registration_index: int) -> None:
        self.registration_index = registration_index
        self._num_sent = 0
        self._num_received = 0

    def next_place(self) -> Place:
        """For the next message that is sent."""
        self._num_sent += 1
        return Place(self.registration_index, self._num_sent)

    def receive(self, place: Place) -> Arrival:
        """Judge a numbered message, and count it when it is the next one."""
        if place.registration_index != self.registration_index or place.number <= self._num_received:
            return Arrival.OLD
        if place.number > self._num_received + 1:
            return Arrival.GAP
        self._num_received += 1
        return Arrival.NEXT


def add_header(place: Place, payload: bytes) -> bytes:
    """A frame for the wire."""
    return _HEADER.pack(PROTOCOL_VERSION, *place) + payload


def split_header(frame: bytes) -> tuple[Place, memoryview]:
    """A frame's place and payload. Raises WireError when it is too short or of another protocol."""
    if len(frame) < HEADER_BYTES:
        raise WireError(f"{len(frame)} bytes are no message")
    version, registration_index, number = _HEADER.unpack_from(frame)
    if version != PROTOCOL_VERSION:
        raise WireError(f"a message of protocol {version}; this process speaks {PROTOCOL_VERSION}")
    return Place(registration_index, number), memoryview(frame)[HEADER_BYTES:]
