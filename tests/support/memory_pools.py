"""The memory pools of the shm connector that live processes hold: the memfds of their index and segment, found through /proc."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_LINK = re.compile(r"/memfd:kvrelay\d+-\d+-(.+)-[0-9a-f]{16}-(index|segment) \(deleted\)")
_GIVEN_UP_MODE = 0


def pool_files(name: str, kind: str) -> list[Path]:
    """Paths of "index" or "segment" files of the pools of that name, good while their holders live. Newest first."""
    found: dict[int, tuple[int, Path]] = {}
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # ended or closed meanwhile
            link = _LINK.fullmatch(str(path.readlink()))
            if link and link.groups() == (name, kind):
                status = path.stat()
                found[status.st_ino] = (status.st_ctime_ns, path)
    return [path for _, path in sorted(found.values(), reverse=True)]


def give_up_pools(name: str) -> None:
    """As a member does that finds an index damaged: all see it, and join a new pool."""
    for path in pool_files(name, "index"):
        path.chmod(_GIVEN_UP_MODE)


def pool_holders(name: str) -> list[str]:
    """What processes still have open of the pools of that name."""
    return [f"{path}: {path.readlink()}" for kind in ("index", "segment") for path in pool_files(name, kind)]
