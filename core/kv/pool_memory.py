"""The memory under a KV pool: one page-aligned, pre-faulted range that runner and connectors share.

First-touch copies run at a tenth of memcpy's speed, so that everything is allocated and touched once, here. Huge pages where the
kernel has them: direct I/O hands a disk one piece per page, and moves twice as much in pieces of 2 MiB as of 4 KiB (measured).
"""

from __future__ import annotations

import contextlib
import mmap

from core.kv.layout import PAGE_BYTES, KVLayout

_MADV_POPULATE_WRITE = 23  # of Linux' mman.h; the mmap module has no name for it


class KVPoolMemory:
    """num_blocks blocks of `layout`, block i at byte i * layout.block_stride_bytes. Zero-filled. Freed with the last view."""

    def __init__(self, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._mapping = mmap.mmap(-1, num_blocks * layout.block_stride_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.buffer = memoryview(self._mapping)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except (AttributeError, OSError):  # no Linux, or one before 5.14
            self.buffer[::PAGE_BYTES] = bytes(len(self.buffer) // PAGE_BYTES)

    def block(self, block_id: int) -> memoryview:
        """The payload of one block: a writable view of layout.block_bytes bytes."""
        start = block_id * self.layout.block_stride_bytes
        return self.buffer[start : start + self.layout.block_bytes]
