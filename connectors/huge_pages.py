"""Files in memory, mapped so that huge pages can serve them, and moved to such pages where the system has some. Linux only.

Copies between small pages reach three quarters of the speed of those between huge ones (measured). Most systems give none to
shared memory of their own accord (shmem_enabled), but do when asked (MADV_COLLAPSE, Linux 6.1). A refusal costs speed alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import numpy.typing as npt

from connectors.libc_memory import MAP_FIXED, advise_memory, map_memory

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_COLLAPSE = 25  # of Linux' mman.h; the mmap module has no name for it
_MAP_NORESERVE = 0x4000  # of the address range, which the mmap module has a name for since Python 3.12


def map_file(descriptor: int, num_bytes: int, *, is_writable: bool = False) -> npt.NDArray[np.uint8]:
    """The first bytes of a file in memory, at a huge page's boundary, for as long as a view of them lives. Raises OSError."""
    found_bytes = os.fstat(descriptor).st_size
    if not 0 < num_bytes <= found_bytes:
        raise OSError(f"a file in memory has {found_bytes} bytes, not {num_bytes}")
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    place = np.frombuffer(mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=flags, prot=protection), dtype=np.uint8)
    memory = place[-place.ctypes.data % HUGE_PAGE_BYTES :][:num_bytes]
    replace_mapping(memory.ctypes.data, num_bytes, descriptor, protection)
    return memory


def replace_mapping(address: int, num_bytes: int, descriptor: int, protection: int) -> None:
    """Map a file over memory that is mapped already, which becomes the file's. Raises OSError."""
    if map_memory(address, num_bytes, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def collapse(memory: npt.NDArray[np.uint8]) -> bool:
    """Move memory to huge pages, those without content included as long as there is some in each; whether that was done.

    A millisecond for each, or so. Others may use the memory meanwhile."""
    address = memory.ctypes.data
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    num_bytes = (address + len(memory) - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    return num_bytes > 0 and advise_memory(start, num_bytes, _MADV_COLLAPSE) == 0
