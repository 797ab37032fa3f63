"""Lets another process read a KV pool: puts a nameless file in the place of the pool's memory, under the same addresses.

Only a connector that needs it does so, because shared memory has no huge pages on most systems. Linux only.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from core.errors import ConnectorError
from core.kv.pool_memory import KVPoolMemory

_PROT_READ_WRITE, _MAP_SHARED_FIXED = 3, 0x01 | 0x10
_MAP_FAILED = ctypes.c_void_p(-1).value


def open_shared(pool: KVPoolMemory) -> int:
    """A descriptor from which other processes can read, and not write, the pool. The caller closes it.

    All views of the pool stay good and keep their content; nobody may use them during the call. Raises ConnectorError.
    """
    address = int(np.frombuffer(pool.buffer, dtype=np.uint8).ctypes.data)
    num_bytes = len(pool.buffer)
    if not hasattr(os, "memfd_create") or address % mmap.PAGESIZE:
        raise ConnectorError("the KV pool cannot be shared: that needs Linux and a pool that begins at a page")
    try:
        descriptor = os.memfd_create("kvrelay-pool", os.MFD_CLOEXEC)
        try:
            _fill(descriptor, pool.buffer)
            _replace(address, num_bytes, descriptor)
            return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConnectorError(f"the KV pool cannot be shared: {error}") from error


def _fill(descriptor: int, content: memoryview) -> None:
    os.ftruncate(descriptor, -(-len(content) // mmap.PAGESIZE) * mmap.PAGESIZE)
    position = 0
    while position < len(content):
        position += os.pwrite(descriptor, content[position:], position)


def _replace(address: int, num_bytes: int, descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    flags = _MAP_SHARED_FIXED | getattr(mmap, "MAP_POPULATE", 0)
    if libc.mmap(address, num_bytes, _PROT_READ_WRITE, flags, descriptor, 0) == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
