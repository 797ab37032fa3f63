"""The source's end of looking into a node: what it holds, in which order that would go, and copies. None of it is a use."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from connectors.tcp.block_memory import BlockMemory, slot_bytes
from connectors.tcp.frames import Kind, pack_head
from connectors.tcp.stream import BlockStream

_DESCRIPTION = struct.Struct("<16sQQQ")
DESCRIPTION_BYTES = _DESCRIPTION.size
PRESENT, ABSENT = b"\1", b"\0"


@dataclass(frozen=True, slots=True)
class Description:
    """Of a node's memory: the layout of its blocks, the bytes of a block and of its place, and the number of places."""

    layout_fingerprint: bytes
    block_bytes: int
    slot_bytes: int
    num_slots: int


def unpack_description(body: bytes) -> Description:
    """What follows the head of a MEMORY frame."""
    return Description(*_DESCRIPTION.unpack(body))


def answer_describe(memory: BlockMemory, stream: BlockStream) -> None:
    """Raises OSError."""
    layout = memory.layout
    body = _DESCRIPTION.pack(layout.fingerprint, layout.block_bytes, slot_bytes(layout), memory.num_slots)
    stream.send([pack_head(Kind.MEMORY), body])


def answer_list(memory: BlockMemory, stream: BlockStream) -> None:
    """Raises OSError."""
    names = memory.eviction_order()
    stream.send([pack_head(Kind.NAMES, len(names)), b"".join(names)])


def answer_read(memory: BlockMemory, stream: BlockStream, names: Sequence[bytes]) -> None:
    """One copy at a time, however many are asked for. Raises OSError."""
    stream.send([pack_head(Kind.COPIES, len(names))])
    for name in names:
        block = memory.copy_of(name)
        stream.send([ABSENT] if block is None else [PRESENT, block[0], memoryview(block[1])])
