"""Disks that are really full, dead, hung or cut off from power: small file systems, where this user may mount them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
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


def fill_up(directory: Path) -> Path:
    """Leave no byte of this file system to anybody; the file that holds them all, to be removed."""
    filler = directory / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(65536)):
            pass
    return filler


_EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2


class Ext4Disk:
    """A disk image and where it is mounted."""

    def __init__(self, image: Path, directory: Path, num_bytes: int) -> None:
        """Make and mount it, or skip the test."""
        self.image, self.path = image, directory
        directory.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(num_bytes)
        try:
            subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)
            self.mount()
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("making and mounting an ext4 image is not possible here")

    def mount(self) -> None:
        """Mount the image, after a journal replay where it was cut off."""
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.path)], check=True, capture_output=True)

    def unmount(self) -> None:
        """Take it from its directory, at once."""
        subprocess.run(["umount", "--lazy", str(self.path)], check=True)

    def remount(self, mode: str) -> None:
        """ "ro" or "rw", for new writers; refused while somebody has a file open for writing."""
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.path)], check=True)

    def cut_power(self) -> None:
        """Whatever the disk does not hold yet is lost; every access fails from now on."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(descriptor)

    def make_read_only(self) -> None:
        """What the kernel does when it finds a file system damaged, whoever has files open."""
        subprocess.run(["mount", "-o", "remount,abort", str(self.path)], capture_output=True)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Writes wait for as long as the context lasts. So do those to an image on this disk: it hangs as a broken disk."""
        subprocess.run(["fsfreeze", "--freeze", str(self.path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(self.path)], check=True)
