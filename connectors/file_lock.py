"""Locks that the kernel releases when their holder dies: a bounded flock, a directory's lock, and leases that show who lives.

flock belongs to an open file description, so that two connectors of one process exclude each other as two processes do.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

_MAX_RACES = 100  # lost against processes that remove the directory at the same time
LOCK_TIMEOUT_S = 5.0
_LOCK_NAME = "lock"
_LEASE_PREFIX = "lease-"


def lock_descriptor(descriptor: int, timeout_s: float = LOCK_TIMEOUT_S) -> None:
    """Take an exclusive flock or raise TimeoutError.

    Polls instead of sleeping in the kernel: a stopped holder must not make close() wait for ever. Holders keep a lock for
    well under a millisecond, so that the first tries are close together.
    """
    pause_s = 0.0001
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                raise TimeoutError(f"a lock was held by another process for {timeout_s} s") from None
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.005)


def unlock_descriptor(descriptor: int) -> None:
    """Give an flock back."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked_directory(directory: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Create `directory` where it is missing and hold its lock: only one process at a time joins, leaves or cleans up.

    Somebody may delete the directory, so whoever waited for the lock looks whether it still is the one on the path. Raises
    OSError (TimeoutError included).
    """
    num_races_left = _MAX_RACES
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except (FileNotFoundError, FileExistsError):
            # Removed between or within the two calls; or it never can be: a dangling link, a path below a file or under /proc.
            num_races_left -= 1
            if num_races_left == 0 or (directory.exists() and not directory.is_dir()):
                raise
            continue
        try:
            lock_descriptor(descriptor, timeout_s)
            if _is_same_file(descriptor, directory / _LOCK_NAME):
                yield
                return
        finally:
            os.close(descriptor)


class Lease:
    """Proof of life: a file whose flock is held until release() or the death of the process."""

    def __init__(self, directory: Path, number: int) -> None:
        """Create and lock the lease file. The caller holds the directory's lock. Raises OSError."""
        self.number = number
        self._path = _lease_path(directory, number)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        lock_descriptor(self._descriptor)

    def release(self) -> None:
        """Drop the lease. Safe to repeat. Raises OSError where its file cannot be removed; the lease is gone anyway."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if _is_same_file(descriptor, self._path):  # not the lease of a store that was created anew in this place
                self._path.unlink(missing_ok=True)
        finally:  # a disk that cannot be written keeps the file, but nobody takes it for alive
            os.close(descriptor)


def is_lease_alive(directory: Path, number: int) -> bool:
    """Whether the process that took this lease still runs."""
    return _is_locked(_lease_path(directory, number))


def has_live_lease(directory: Path) -> bool:
    """Whether anybody uses this directory. Deletes the files of dead leases; the caller holds the directory's lock."""
    is_alive = False
    for path in directory.glob(f"{_LEASE_PREFIX}*"):
        if _is_locked(path):
            is_alive = True
        else:
            path.unlink(missing_ok=True)
    return is_alive


def _lease_path(directory: Path, number: int) -> Path:
    return directory / f"{_LEASE_PREFIX}{number}"


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who ask do not take each other for the owner
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
