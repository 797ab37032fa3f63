"""What one run of an `lmcache server` holds of ours: an empty file per object, under the object's name.

The server cannot be asked. But whoever maps its memory shares /dev/shm with all others who do, so the files lie there. A server
that is started anew has other memory, and so another, empty folder. What the files say is believed until a load has missed.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT, ObjectDirectory
from core.kv.hashing import HASH_BYTES

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where the system keeps named shared memory)
_PREFIX = "kvrelay-"


class ServerIndex:
    """The folder of one store in one run of a server. pool_name: of the server's memory; inode: which of that name."""

    def __init__(self, pool_name: str, inode: int, store_name: str) -> None:
        """Removes what earlier servers of that name have left."""
        run = SHARED_MEMORY / f"{_PREFIX}{pool_name}-{inode}"
        for path in SHARED_MEMORY.glob(f"{_PREFIX}{pool_name}-*"):
            if path != run:
                shutil.rmtree(path, ignore_errors=True)
        self.folder = run / store_name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.directory = ObjectDirectory(self.folder, bytes.hex, _parse)

    def add(self, names: Iterable[bytes]) -> None:
        """These objects are stored. Nobody will find them, where the folder cannot be written."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in names:
                (self.folder / name.hex()).touch()

    def remove(self, names: Iterable[bytes]) -> None:
        """These are stored no longer. Safe to repeat."""
        for name in names:
            with contextlib.suppress(OSError):
                (self.folder / name.hex()).unlink(missing_ok=True)


def no_directory() -> ObjectDirectory:
    """Of a server that is not there."""
    return ObjectDirectory(SHARED_MEMORY / f"{_PREFIX}none", bytes.hex, _parse)


def _parse(text: str) -> bytes | None:
    """The object that a file stands for."""
    try:
        name = bytes.fromhex(text)
    except ValueError:
        return None
    return name if name and len(name) % HASH_BYTES == 0 and len(name) <= HASH_BYTES * MAX_BLOCKS_PER_OBJECT else None
