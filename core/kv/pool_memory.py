"""The memory under a KV pool: one page-aligned, pre-faulted range that runner and connectors share.

First-touch copies run at a tenth of memcpy's speed, so that everything is allocated and touched once, here. Huge pages where the
kernel has them: direct I/O hands a disk one piece per page, and moves twice as much in pieces of 2 MiB as of 4 KiB (measured).
A pool of several processes lies in a nameless file, which is gone with the last of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from core.kv.layout import PAGE_BYTES, KVLayout

_MADV_POPULATE_WRITE = 23  # of Linux' mman.h; the mmap module has no name for it
_MFD_NOEXEC_SEAL = 8  # of Linux' memfd.h; since Linux 6.3, where an administrator may insist on it


class KVPoolMemory:
    """num_blocks blocks of `layout`, block i at byte i * layout.block_stride_bytes. Zero-filled. Freed with the last view."""

    def __init__(self, layout: KVLayout, num_blocks: int, descriptor: int = -1) -> None:
        """descriptor: of a file that is this memory, for whoever maps it too; -1: the memory is this process's own."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.descriptor = descriptor
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if descriptor < 0 else mmap.MAP_SHARED
        self._mapping = mmap.mmap(descriptor, num_blocks * layout.block_stride_bytes, flags=flags)
        self.buffer = memoryview(self._mapping)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        try:
            self._mapping.madvise(_MADV_POPULATE_WRITE)
        except (AttributeError, OSError):  # no Linux, or one before 5.14
            self.buffer[::PAGE_BYTES] = bytes(len(self.buffer) // PAGE_BYTES)

    @classmethod
    def shared(cls, layout: KVLayout, num_blocks: int) -> KVPoolMemory:
        """A pool that other processes can map, given its descriptor, which is closed with it. Raises OSError."""
        descriptor = open_memory_file("kvrelay-kv-pool", num_blocks * layout.block_stride_bytes)
        pool = cls(layout, num_blocks, descriptor)
        weakref.finalize(pool, os.close, descriptor)
        return pool

    def block(self, block_id: int) -> memoryview:
        """The payload of one block: a writable view of layout.block_bytes bytes."""
        start = block_id * self.layout.block_stride_bytes
        return self.buffer[start : start + self.layout.block_bytes]


def open_memory_file(name: str, num_bytes: int) -> int:
    """The descriptor of a nameless file in memory, zero-filled, close-on-exec. Raises OSError, also where there are none."""
    if not hasattr(os, "memfd_create"):
        raise OSError("memory that processes share needs Linux (memfd_create)")
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError:  # a kernel that does not know the flag
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    return descriptor
