"""Takes back the shared memory that killed processes left. Processes that end by themselves have left none."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from connectors.file_lock import locked_directory, remove_if_empty
from connectors.store_directory import remove_dead_stores
from core.config import ConnectorOptions

logger = logging.getLogger(__name__)

DEFAULT_DIRECTORY = "/dev/shm"  # noqa: S108  # the host's shared memory is the point


def reclaim_shared_memory(options: ConnectorOptions) -> None:
    """Delete this user's pools that no living process uses, whoever left them. Does nothing for other connectors."""
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
