"""A stream of stored blocks, for moving them between stores: what `kvrelay cache export` writes and `import` reads.

| magic and version 8 | records | end |
record: | "BLCK" | payload bytes 8 | last use, Unix ms 8, 0: not known | block header 64 | payload |
end:    | "ENDS" | number of records 8 | xxh3_64 of all block headers, in order 8 |

Each block's own header verifies it; the end shows that none is missing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from connectors.store_browser import MAX_BLOCK_BYTES, RawBlock
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.errors import KVRelayError

_MAGIC = b"KVRSTRM\x01"
_RECORD = struct.Struct("<4sQQ")
_BLOCK, _END = b"BLCK", b"ENDS"


class BlockStreamError(KVRelayError):
    """The bytes are no stream of blocks, or it is cut."""


@dataclass(frozen=True, slots=True)
class StreamedBlock:
    """A record. Nothing of it is verified."""

    block: RawBlock
    last_used_s: float | None


class BlockStreamWriter:
    """Writes to a binary file or pipe. Raises OSError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._headers = xxhash.xxh3_64()
        self.num_blocks = 0
        file.write(_MAGIC)

    def write(self, block: RawBlock, last_used_s: float | None) -> None:
        """One verified block."""
        self._file.write(_RECORD.pack(_BLOCK, len(block.payload), int((last_used_s or 0) * 1000)))
        self._file.write(block.header)
        self._file.write(block.payload)
        self._headers.update(block.header)
        self.num_blocks += 1

    def finish(self) -> None:
        """Without this the stream counts as cut."""
        self._file.write(_RECORD.pack(_END, self.num_blocks, self._headers.intdigest()))
        self._file.flush()


def read_block_stream(file: BinaryIO) -> Iterator[StreamedBlock]:
    """All records, in order. Raises BlockStreamError where the bytes stop being a stream, or the last records are missing."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise BlockStreamError("this is no export of blocks, or one of another version")
    headers, num_blocks = xxhash.xxh3_64(), 0
    while True:
        kind, first, second = _RECORD.unpack(_read_exactly(file, _RECORD.size, num_blocks))
        if kind == _END:
            if first != num_blocks or second != headers.intdigest():
                raise BlockStreamError(f"blocks are missing or changed: it has {num_blocks}, and was written with {first}")
            return
        if kind != _BLOCK or first > MAX_BLOCK_BYTES:
            raise BlockStreamError(f"it is damaged behind {num_blocks} blocks")
        header = _read_exactly(file, BLOCK_HEADER_BYTES, num_blocks)
        payload = _read_exactly(file, first, num_blocks)
        headers.update(header)
        num_blocks += 1
        yield StreamedBlock(RawBlock(header, payload), second / 1000 if 0 < second < 2**53 else None)


def _read_exactly(file: BinaryIO, num_bytes: int, num_blocks: int) -> bytes:
    """Piece by piece, so that a length that is damage costs no more memory than there are bytes."""
    pieces, num_left = [], num_bytes
    while num_left:
        piece = file.read(min(num_left, 1024 * 1024))
        if not piece:
            raise BlockStreamError(f"it is cut behind {num_blocks} blocks")
        pieces.append(piece)
        num_left -= len(piece)
    return b"".join(pieces)
