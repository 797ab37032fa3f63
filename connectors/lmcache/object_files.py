"""Objects of blocks as files of LMCache's native file tier: their names, and folders for those that are being written.

Without LMCache, so that a store can be looked into where it is not installed.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from connectors.file_lock import Lease, has_live_lease, locked_directory
from connectors.lmcache.object_directory import MAX_BLOCKS_PER_OBJECT
from core.kv.hashing import HASH_BYTES

MODEL_NAME = "kvrelay"  # of LMCache's keys
_PREFIX, _SUFFIX = f"{MODEL_NAME}@0x00000000@0@", ".data"
_SCRATCH_PREFIX = "tmp-"


def file_name(name: bytes) -> str:
    """Of an object in the file tier's folder."""
    return f"{_PREFIX}{name.hex()}{_SUFFIX}"


def parse_file_name(text: str) -> bytes | None:
    """The object's name; None for other files."""
    if not text.startswith(_PREFIX) or not text.endswith(_SUFFIX):
        return None
    try:
        name = bytes.fromhex(text[len(_PREFIX) : -len(_SUFFIX)])
    except ValueError:
        return None
    return name if name and len(name) % HASH_BYTES == 0 and len(name) <= HASH_BYTES * MAX_BLOCKS_PER_OBJECT else None


def open_scratch(folder: Path) -> tuple[Path, Lease]:
    """A folder of this process's own for files that are being written; those of dead processes are removed. Raises OSError."""
    with locked_directory(folder):
        for path in folder.glob(f"{_SCRATCH_PREFIX}*"):
            if not has_live_lease(path):
                shutil.rmtree(path, ignore_errors=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH_PREFIX, dir=folder))
        return scratch, Lease(scratch, 0)
