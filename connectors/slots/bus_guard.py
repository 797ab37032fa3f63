"""Mapped files whose pages may vanish: touching a page that was cut off, or that the disk cannot read, must not end the process.

The kernel answers such an access with SIGBUS, and no check beforehand is sound, because the file may be cut in the middle of
a copy. Here the handler puts zeroed memory in the place of what is lost, so that the access goes on and its reader finds
bytes that do not verify. Copying through system calls instead would cost half of shared memory's bandwidth (measured).

Linux on 64 bits only; elsewhere the signal keeps its meaning.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import signal
import struct
import sys
import threading
import weakref
from typing import Any

import numpy as np

from connectors.libc_memory import MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, PROT_READ_WRITE, map_memory

logger = logging.getLogger(__name__)

_IS_SUPPORTED = sys.platform == "linux" and struct.calcsize("P") == 8
_SA_SIGINFO = 4
_SI_ADDR_OFFSET = 16  # of siginfo_t on 64 bits
_HANDLER_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """struct sigaction of glibc and musl."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class GuardedMapping:
    """A mapping of a file's first num_bytes bytes, shared, writable unless is_read_only. has_lost_pages:
    some of it is private zeros now.

    `view` may outlive this object; the mapping ends with the last array on it.
    """

    def __init__(self, descriptor: int, num_bytes: int, *, is_read_only: bool = False) -> None:
        """Raises OSError."""
        self.view = mmap.mmap(descriptor, num_bytes, access=mmap.ACCESS_READ if is_read_only else mmap.ACCESS_WRITE)
        self._region = _Region(int(np.frombuffer(self.view, dtype=np.uint8).ctypes.data), num_bytes)
        if _IS_SUPPORTED:
            _bus_guard.watch(self._region)
            weakref.finalize(self.view, _bus_guard.forget, self._region)  # before the addresses can mean something else

    @property
    def has_lost_pages(self) -> bool:
        """True once a page could not be had: what is written there reaches nobody, and the mapping must be given up."""
        return self._region.is_hit


class _Region:
    def __init__(self, start: int, num_bytes: int) -> None:
        self.start, self.end = start, start + num_bytes
        self.is_hit = False


class _BusGuard:
    """The process's handler of SIGBUS. There is one of it because there is one such signal."""

    def __init__(self) -> None:
        self._regions: tuple[_Region, ...] = ()  # replaced whole, so that the handler needs no lock
        self._mutex = threading.Lock()
        self._libc: Any = None
        self._previous = _SigAction()
        self._action = _SigAction()
        self._callback = _HANDLER_TYPE(self._on_bus_error)  # must live as long as the process

    def watch(self, region: _Region) -> None:
        """Add a region; the first one installs the handler, which stays."""
        with self._mutex:
            self._regions = (*self._regions, region)
            if self._libc is None:
                self._install()

    def forget(self, region: _Region) -> None:
        """Remove a region."""
        with self._mutex:
            self._regions = tuple(other for other in self._regions if other is not region)

    def _install(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._action.handler = ctypes.cast(self._callback, ctypes.c_void_p).value
        self._action.flags = _SA_SIGINFO
        if libc.sigaction(int(signal.SIGBUS), ctypes.byref(self._action), ctypes.byref(self._previous)) != 0:
            logger.warning("no handler for SIGBUS: errno %d", ctypes.get_errno())
        self._libc = libc

    def _on_bus_error(self, _number: int, info: int, _context: int) -> None:
        """Called by the kernel in the thread that touched the page, between two of its instructions."""
        address = ctypes.c_size_t.from_address(info + _SI_ADDR_OFFSET).value
        for region in self._regions:
            if region.start <= address < region.end:
                page = address // mmap.PAGESIZE * mmap.PAGESIZE
                num_bytes = region.end - page  # a file that is cut here has nothing behind it either
                placed = map_memory(page, num_bytes, PROT_READ_WRITE, MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS, -1, 0)
                if placed == page:
                    region.is_hit = True
                    return
        # Somebody else's: the access is repeated under the handler that was there before.
        self._libc.sigaction(int(signal.SIGBUS), ctypes.byref(self._previous), None)


_bus_guard = _BusGuard()
