"""Lets another process read a KV pool: puts a nameless file in the place of the pool's memory, under the same addresses.

Only a connector that needs it does so. Linux only.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from connectors.huge_pages import HUGE_PAGE_BYTES, collapse, map_file, replace_mapping
from core.errors import ConnectorError
from core.kv.pool_memory import KVPoolMemory

_COLLAPSE_TIMEOUT_S = 5.0  # of an engine's start


def open_shared(pool: KVPoolMemory) -> int:
    """A descriptor from which other processes can read, and not write, the pool. The caller closes it.

    All views of the pool stay good and keep their content; nobody may use them during the call. Raises ConnectorError.
    """
    if pool.descriptor >= 0:  # several processes compute in it: it is such a file, and must stay the one that they have
        return os.open(f"/proc/self/fd/{pool.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
    content = np.frombuffer(pool.buffer, dtype=np.uint8)
    address, num_bytes = content.ctypes.data, len(content)
    if not hasattr(os, "memfd_create") or address % mmap.PAGESIZE:
        raise ConnectorError("the KV pool cannot be shared: that needs Linux and a pool that begins at a page")
    try:
        descriptor = os.memfd_create("kvrelay-pool", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
            memory = map_file(descriptor, num_bytes, is_writable=True)
            memory[::HUGE_PAGE_BYTES] = 0
            collapse(memory, _COLLAPSE_TIMEOUT_S)  # before there is content, which would have to be moved
            np.copyto(memory, content)
            replace_mapping(address, num_bytes, descriptor, mmap.PROT_READ | mmap.PROT_WRITE)
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConnectorError(f"the KV pool cannot be shared: {error}") from error
