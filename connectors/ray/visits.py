"""The directory's end of looking into its stores: which there are, what is in them, and what is taken away. Knows no Ray.

A visitor says HELLO as an engine does, with "visitor": true, and pages through one store; its questions count as no use. The
functions here are called with the directory's lock held.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from connectors.ray.index import StoreIndex
from connectors.ray.messages import NAME_BYTES, unpack_names
from core.errors import ConnectorError

PAGE_HEAD = struct.Struct("<II")  # where the next page begins (0: this is the last), entries
LISTED_BLOCK = struct.Struct("<16sQQd")  # name, number in its store, order of eviction, last use in Unix seconds
NUMBERED_NAME_BYTES = NAME_BYTES + 8
_NUMBER = struct.Struct("<Q")
_MAX_PAGE_BLOCKS = 8192


def describe_stores(index_by_key: Mapping[str, StoreIndex], body: bytes) -> bytes:
    """STORES, for a namespace: layout, block_bytes and counts of each of its stores, as JSON. Raises ConnectorError."""
    try:
        prefix = f"{body.decode('ascii')}/"
    except UnicodeDecodeError as error:
        raise ConnectorError("a namespace of other characters than there can be") from error
    stores: list[dict[str, Any]] = []
    for key, index in index_by_key.items():
        if key.startswith(prefix):
            stores.append({"layout": key.removeprefix(prefix), "block_bytes": index.block_bytes})
    return json.dumps(stores).encode()


def list_page(index: StoreIndex, listed: list[bytes], body: bytes) -> bytes:
    """LIST, from the given position on: a page of entries. listed: the visitor's, filled when it begins with 0."""
    (first,) = _NUMBER.unpack(body) if len(body) == _NUMBER.size else (0,)
    if first == 0:
        listed[:] = index.names()
    last = first + _MAX_PAGE_BLOCKS
    entries = [
        LISTED_BLOCK.pack(name, place.number, order, place.last_used_s)
        for order, name in enumerate(listed[first:last], start=first)
        if (place := index.find(name))
    ]
    return PAGE_HEAD.pack(last if last < len(listed) else 0, len(entries)) + b"".join(entries)


def pack_first(position: int) -> bytes:
    """The body of LIST."""
    return _NUMBER.pack(position)


def pack_numbered(name: bytes, number: int) -> bytes:
    """A part of the body of REMOVE."""
    return name + _NUMBER.pack(number)


def remove_listed(index: StoreIndex, body: bytes) -> bytes:
    """REMOVE: whether each block went. One that was stored anew since it was listed stays. Raises ConnectorError."""
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
