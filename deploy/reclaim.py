"""Takes back what killed processes left: shared memory, and folders of `kvrelay serve`. Others leave nothing."""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from pathlib import Path

from connectors.file_lock import locked_directory, remove_if_empty
from connectors.store_directory import remove_dead_stores
from connectors.tier_options import parse_tiered_options
from core.config import ConnectorOptions

logger = logging.getLogger(__name__)

FOLDER_NAME = re.compile(r"kvrelay-serve-(\d+)-\w+")
DEFAULT_DIRECTORY = "/dev/shm"  # noqa: S108  # the host's shared memory is the point


def reclaim_shared_memory(options: ConnectorOptions) -> None:
    """Delete this user's pools that no living process uses, whoever left them. Does nothing for other connectors."""
    if options.name == "tiered":
        for tier in parse_tiered_options(options.options)[1]:
            reclaim_shared_memory(ConnectorOptions(name=tier.connector, options=dict(tier.options)))
    if options.name != "shm":
        return
    root = Path(options.options.get("directory", DEFAULT_DIRECTORY)) / f"kvrelay-{os.getuid()}"
    if not root.is_dir():
        return
    try:
        with locked_directory(root):
            remove_dead_stores(root)
            remove_if_empty(root)
    except OSError as error:
        logger.warning("could not clean up %s: %s", root, error)


def folder_prefix() -> str:
    """How the temporary folder of this process is to begin, so that it can be told from those of dead ones."""
    return f"kvrelay-serve-{os.getpid()}-"


def reclaim_folders() -> None:
    """Delete this user's folders whose process is gone. One whose number was given to another process stays until that ends."""
    for path in Path(tempfile.gettempdir()).glob("kvrelay-serve-*"):
        found = FOLDER_NAME.fullmatch(path.name)
        if found and path.stat().st_uid == os.getuid() and not Path(f"/proc/{found[1]}").exists() and Path("/proc/self").exists():
            shutil.rmtree(path, ignore_errors=True)
