"""A file system that is really full: a small tmpfs, where this user may mount one."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_tmpfs(directory: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a tmpfs of that size at `directory`, or skip the test."""
    directory.mkdir(parents=True)
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)], capture_output=True)
    if mount.returncode != 0:
        pytest.skip("mounting a small file system is not permitted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
