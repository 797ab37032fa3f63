"""Between blocks in a pool and slots of a medium: header, verification, and the codec or cipher of the store, if it has one.

Blocks that are at rest as they are in the pool move without a copy; others go through this thread's own page-aligned buffers.
"""

from __future__ import annotations

import itertools
import mmap
import threading
from collections.abc import Sequence

from connectors.coding.block_coding import BlockCoding
from connectors.slots.store import SlotLayout, SlotMedium
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block, pack_block_header
from core.kv.layout import KVLayout

_NOT_STORED = bytes(BLOCK_HEADER_BYTES)  # as of a slot that was never written


class SlotCoding:
    """Of one store. Any thread. Blocks are one block stride of the pool each. Every method may raise OSError.

    layout_at_rest: what the store is opened with.
    """

    def __init__(self, layout: KVLayout, coding: BlockCoding) -> None:
        self._coding = coding
        self.layout_at_rest: SlotLayout = layout if coding.is_plain else coding.slot_layout
        self._fingerprint = coding.fingerprint
        self._block_bytes = layout.block_bytes
        self._thread = threading.local()

    @property
    def complaint(self) -> str:
        """Why a block was last UNREADABLE."""
        return self._coding.complaint

    def read(
        self, medium: SlotMedium, slots: Sequence[int], names: Sequence[bytes], blocks: Sequence[memoryview]
    ) -> list[BlockCheck]:
        """Fill blocks from slots; what of it is right."""
        at_rest = blocks if self._coding.is_plain else self._buffers(len(blocks))
        headers = itertools.chain(medium.read(slots, at_rest), itertools.repeat(b""))  # it may end before the last ones
        if self._coding.is_plain:
            return [
                check_block(header, block[: self._block_bytes], self._fingerprint, name)
                for block, name, header in zip(blocks, names, headers, strict=False)
            ]
        num_bytes = self._coding.max_bytes
        return [
            self._coding.unseal(header, stored[:num_bytes], name, block[: self._block_bytes])
            for stored, name, block, header in zip(at_rest, names, blocks, headers, strict=False)
        ]

    def write(self, medium: SlotMedium, slots: Sequence[int], names: Sequence[bytes], blocks: Sequence[memoryview]) -> list[bool]:
        """Fill slots from blocks; which of them hold their block then: a codec may be unable to hold one."""
        if self._coding.is_plain:
            made_when_asked_for = (
                pack_block_header(self._fingerprint, name, block[: self._block_bytes])
                for name, block in zip(names, blocks, strict=True)
            )
            medium.write(slots, made_when_asked_for, blocks)
            return [True] * len(blocks)
        headers, at_rest = [], self._buffers(len(blocks))
        for name, block, buffer in zip(names, blocks, at_rest, strict=True):
            header, payload = self._coding.seal(name, block[: self._block_bytes]) or (_NOT_STORED, b"")
            buffer[: len(payload)] = payload
            headers.append(header)
        medium.write(slots, headers, at_rest)
        return [header != _NOT_STORED for header in headers]

    def _buffers(self, num_blocks: int) -> list[memoryview]:
        """One stride at rest each; what they hold is old."""
        stride = self.layout_at_rest.block_stride_bytes
        buffers: list[memoryview] = getattr(self._thread, "buffers", [])
        if len(buffers) < num_blocks:
            memory = memoryview(mmap.mmap(-1, num_blocks * stride))
            buffers = [memory[start : start + stride] for start in range(0, len(memory), stride)]
            self._thread.buffers = buffers
        return buffers[:num_blocks]
