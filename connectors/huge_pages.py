"""Files in memory, mapped so that huge pages can serve them, and moved to such pages where the system has some. Linux only.

Copies between huge pages are a fifth to a third faster than between small ones, and a process that joins touches a 512th of the
pages (measured). Most systems give shared memory none of their own accord (shmem_enabled), but do when asked (MADV_COLLAPSE,
Linux 6.1). A refusal costs speed alone.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import time

import numpy as np
import numpy.typing as npt

from connectors.libc_memory import MAP_FIXED, MAP_NORESERVE, MAP_SHARED, advise_memory, map_memory
from core.kv.layout import PAGE_BYTES

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_STEP_BYTES = 8 * HUGE_PAGE_BYTES
_MADV_COLLAPSE = 25  # of Linux' mman.h; the mmap module has no name for it


def map_file(descriptor: int, num_bytes: int, *, is_writable: bool = False) -> npt.NDArray[np.uint8]:
    """The first bytes of a file in memory, at a huge page's boundary, for as long as a view of them lives. Raises OSError."""
    found_bytes = os.fstat(descriptor).st_size
    if not 0 < num_bytes <= found_bytes:
        raise OSError(f"a file in memory has {found_bytes} bytes, not {num_bytes}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    place = np.frombuffer(mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags, prot=protection), dtype=np.uint8)
    memory = place[-place.ctypes.data % HUGE_PAGE_BYTES :][:num_bytes]
    replace_mapping(memory.ctypes.data, num_bytes, descriptor, protection)
    return memory


def replace_mapping(address: int, num_bytes: int, descriptor: int, protection: int) -> None:
    """Map a file over memory that is mapped already, which becomes the file's. Raises OSError."""
    if map_memory(address, num_bytes, protection, MAP_SHARED | MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def populate(memory: npt.NDArray[np.uint8]) -> None:
    """Have pages for memory that was mapped by map_file, huge ones where the system has them. Lets go of the GIL.

    Some page must be there for each that can be made huge; reading is enough for that. Numpy lets go of the GIL for max(), and
    not for sum().
    """
    memory[::HUGE_PAGE_BYTES].max(initial=0)
    collapse(memory)
    memory[::PAGE_BYTES].max(initial=0)  # those that stayed small


def collapse(memory: npt.NDArray[np.uint8], timeout_s: float = math.inf) -> bool:
    """Move memory to huge pages, those without content included as long as there is some in each; whether all was moved.

    A millisecond for each, or so, and many where the system has to make room for them first: what is not done in time stays as
    it is. Others may use the memory meanwhile."""
    deadline_s = time.monotonic() + timeout_s
    address = memory.ctypes.data
    start, end = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES, (address + len(memory)) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    is_done = True
    while start < end and time.monotonic() < deadline_s:
        num_bytes = min(_STEP_BYTES, end - start)
        is_done &= advise_memory(start, num_bytes, _MADV_COLLAPSE) == 0
        start += num_bytes
    return is_done and start >= end
