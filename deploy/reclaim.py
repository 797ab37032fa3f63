"""Takes back what killed processes left: folders of `kvrelay serve`. Others leave nothing."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from pathlib import Path

FOLDER_NAME = re.compile(r"kvrelay-serve-(\d+)-\w+")


def folder_prefix() -> str:
    """How the temporary folder of this process is to begin, so that it can be told from those of dead ones."""
    return f"kvrelay-serve-{os.getpid()}-"


def reclaim_folders() -> None:
    """Delete this user's folders whose process is gone. One whose number was given to another process stays until that ends."""
    for path in Path(tempfile.gettempdir()).glob("kvrelay-serve-*"):
        found = FOLDER_NAME.fullmatch(path.name)
        if found and path.stat().st_uid == os.getuid() and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
