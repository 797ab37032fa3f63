"""What a codec does: a block as it is in the pool to fewer bytes, and back. None of them knows of headers, checksums or keys."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from connectors.stored_block import Payload


class Codec(ABC):
    """Encodes blocks of one layout. Any thread.

    number: in the prefix of what it wrote. encoded_bytes: of every block, or None where the length varies; then it is never
    longer than the block. is_lossy: a block comes back changed, so its stores are kept apart from exact ones.
    """

    name: str
    number: int
    is_lossy: bool
    encoded_bytes: int | None

    @abstractmethod
    def encode(self, payload: memoryview) -> Payload | None:
        """The encoded block, which may be `payload` itself; None when this one cannot be encoded, or gains nothing by it."""

    @abstractmethod
    def decode(self, encoded: memoryview, target: memoryview) -> bool:
        """Fill target, which has the block's size. False for bytes that no encoder wrote: then target may hold anything.

        Bounded by target's size in time and memory, whatever the bytes are.
        """


class RawCodec(Codec):
    """The block as it is: for what is only encrypted, and for blocks that do not shrink."""

    name = "none"
    number = 0
    is_lossy = False

    def __init__(self, block_bytes: int) -> None:
        self.encoded_bytes = block_bytes

    def encode(self, payload: memoryview) -> Payload | None:
        """The same."""
        return payload

    def decode(self, encoded: memoryview, target: memoryview) -> bool:
        """A copy."""
        if len(encoded) != len(target):
            return False
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(encoded, dtype=np.uint8))
        return True
