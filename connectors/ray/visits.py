"""The directory's end of looking into its stores: which there are, what is in them, and what is taken away. Knows no Ray.

A visitor says HELLO as an engine does, with "visitor": true, and pages through one store; its questions count as no use. The
functions here are called with the directory's lock held.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from connectors.ray.index import Place, StoreIndex
from connectors.ray.messages import ABSENT, LOCATED_BLOCK, NAME_BYTES, Operation, unpack_names
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import ConnectorError

PAGE_HEAD = struct.Struct("<II")  # where the next page begins (0: this is the last), entries
LISTED_BLOCK = struct.Struct("<16sQQQd")  # name, number and offset of its place, order of eviction, last use in Unix seconds
VISITS = (Operation.LIST, Operation.INSPECT, Operation.REMOVE)
NUMBERED_NAME_BYTES = NAME_BYTES + 8
_NUMBER = struct.Struct("<Q")
_MAX_PAGE_BLOCKS = 8192
_NOWHERE = LOCATED_BLOCK.pack(ABSENT, bytes(BLOCK_HEADER_BYTES))


def describe_stores(index_by_key: Mapping[str, StoreIndex], body: bytes) -> bytes:
    """STORES, for a namespace: layout and block_bytes of each of its stores, as JSON. Raises ConnectorError."""
    try:
        prefix = f"{body.decode('ascii')}/"
    except UnicodeDecodeError as error:
        raise ConnectorError("a namespace of other characters than there can be") from error
    stores: list[dict[str, Any]] = []
    for key, index in index_by_key.items():
        if key.startswith(prefix):
            stores.append({"layout": key.removeprefix(prefix), "block_bytes": index.block_bytes})
    return json.dumps(stores).encode()


def answer_visit(operation: Operation, body: bytes, index: StoreIndex, listed: list[bytes], pins: list[Place]) -> bytes:
    """LIST, INSPECT or REMOVE. listed and pins are the visitor's, which holds no pins yet. Raises ConnectorError."""
    if operation is Operation.LIST:
        return list_page(index, listed, body)
    if operation is Operation.INSPECT:
        return inspect(index, pins, body)
    return remove_listed(index, body)


def list_page(index: StoreIndex, listed: list[bytes], body: bytes) -> bytes:
    """LIST, from the given position on: a page of entries. listed: the visitor's, filled when it begins with 0."""
    (first,) = _NUMBER.unpack(body) if len(body) == _NUMBER.size else (0,)
    if first == 0:
        listed[:] = index.names()
    end = min(first + _MAX_PAGE_BLOCKS, len(listed))
    entries = [
        LISTED_BLOCK.pack(listed[position], place.number, place.offset, position, place.last_used_s)
        for position in range(first, end)
        if (place := index.find(listed[position]))
    ]
    return PAGE_HEAD.pack(end if first < end < len(listed) else 0, len(entries)) + b"".join(entries)


def inspect(index: StoreIndex, pins: list[Place], body: bytes) -> bytes:
    """INSPECT: where each block is, which stays there while it is in pins. Raises ConnectorError."""
    places = [index.find(name) for name in unpack_names(body)]
    for place in places:
        if place is not None:
            place.num_pins += 1
            pins.append(place)
    return b"".join(LOCATED_BLOCK.pack(place.offset, place.header) if place else _NOWHERE for place in places)


def pack_first(position: int) -> bytes:
    """The body of LIST."""
    return _NUMBER.pack(position)


def pack_numbered(name: bytes, number: int) -> bytes:
    """A part of the body of REMOVE."""
    return name + _NUMBER.pack(number)


def remove_listed(index: StoreIndex, body: bytes) -> bytes:
    """REMOVE: whether each block went. One that has come again since it was listed stays. Raises ConnectorError."""
    if len(body) % NUMBERED_NAME_BYTES:
        raise ConnectorError("a list of blocks of a wrong length")
    flags = bytearray()
    for start in range(0, len(body), NUMBERED_NAME_BYTES):
        (name,) = unpack_names(body[start : start + NAME_BYTES])
        (number,) = _NUMBER.unpack_from(body, start + NAME_BYTES)
        place = index.find(name)
        is_same = place is not None and place.number == number
        if is_same:
            index.forget([name])
        flags.append(is_same)
    return bytes(flags)
