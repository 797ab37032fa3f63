"""Calls of the C library on memory that the mmap module does not offer: mapping at a given address, advice without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS, MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
PROT_READ_WRITE = 3
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

map_memory: Callable[[int, int, int, int, int, int], int | None] = _libc.mmap  # (address, bytes, prot, flags, descriptor, offset)
advise_memory: Callable[[int, int, int], int] = _libc.madvise  # (address, bytes, advice): 0, or -1
