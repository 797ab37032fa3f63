"""The medium of the nvme connector: the store's own segment file, as fio moves it with four requests in flight.

The store is made in the folder for temporary files: set TMPDIR to a folder on the disk that is to be measured.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.media.medium import HungLockHolder, Medium
from connectors.slots.connector import SlotConnector
from connectors.slots.index import SlotIndex, take_lease_number
from connectors.slots.index_file import IndexFile, create_index_file, index_bytes
from connectors.slots.nvme import NvmeConnector
from connectors.slots.store import slot_bytes
from core.kv.connector import KVConnector, TransferDirection

_STORE_BYTES = 1024**3
_BATCH = 10_000
_QUIET_S = 0.5
_FIO_MODES = {TransferDirection.LOAD: "randread", TransferDirection.SAVE: "randwrite"}


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """A store of its own. Ends the program where fio is missing."""
    if shutil.which("fio") is None:
        raise SystemExit("the limit of a disk is measured with fio: install it (apt-get install fio, dnf install fio)")
    return NvmeMedium(folder, block_bytes)


class NvmeMedium(Medium):
    """A full store of 1 GiB; its limit is fio's libaio engine, direct, on random blocks of the same file."""

    bytes_per_round = 256 * 1024 * 1024  # for fio to run long enough to be timed

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._is_written = False

    def options(self) -> dict[str, Any]:
        return {"path": str(self._folder), "capacity_bytes": _STORE_BYTES}

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        return self._fio(_FIO_MODES[direction], self._block_bytes, num_bytes)

    def empty(self) -> None:
        """Nothing: names are new in every round, and a full store recycles its slots. At first, all of it is written once: what
        was never written reads at another speed, and writes at three quarters."""
        if not self._is_written:
            while time.time() - self._segment.stat().st_mtime < _QUIET_S:
                time.sleep(0.05)  # it grows and is filled with zeros while idle
            self._fio("write", 1024 * 1024, _STORE_BYTES)
            self._is_written = True

    def _fio(self, mode: str, block_bytes: int, num_bytes: int) -> float:
        file = [
            "--name=limit",
            f"--filename={self._segment}",
            "--allow_file_create=0",
            f"--size={self._segment.stat().st_size}",
        ]
        how = ["--ioengine=libaio", "--direct=1", "--iodepth=4", f"--rw={mode}", f"--bs={block_bytes}", f"--io_size={num_bytes}"]
        ran = subprocess.run(["fio", *file, *how, "--output-format=json"], capture_output=True, text=True)
        if ran.returncode != 0:
            raise SystemExit(f"fio failed: {ran.stderr or ran.stdout}")
        (job,) = json.loads(ran.stdout)["jobs"]
        return float(job["read" if mode == "randread" else "write"]["bw_bytes"]) / 1e9

    @property
    def _segment(self) -> Path:
        (segment,) = self._folder.glob("*/segment")
        return segment

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        """Put the store's index in the state in which savers of so many blocks leave it, and open it as a restarted process does;
        the file under it has holes in the place of their bytes."""
        assert isinstance(connector, NvmeConnector) and connector._held.store is not None
        layout, segment = connector._layout, self._segment
        while connector._held.store.num_users:
            time.sleep(0.01)
        with connector._held._mutex:
            connector._held.store.close()
            connector._held.store = None
            os.truncate(segment, 0)
            _write_index(segment.with_name("index"), layout.fingerprint, slot_bytes(layout), block_hashes)
            os.truncate(segment, len(block_hashes) * slot_bytes(layout))
            capacity_bytes = index_bytes(len(block_hashes)) + len(block_hashes) * slot_bytes(layout)
            connector._options = dataclasses.replace(connector._options, capacity_bytes=capacity_bytes)
            started_s = time.perf_counter()
            connector._held.store = connector._open_store(layout)
            self.reopen_s = time.perf_counter() - started_s
        assert len(connector._held.store.index.mirror) == len(block_hashes)

    def hang(self, connector: KVConnector) -> bool:
        assert isinstance(connector, SlotConnector) and connector._held.store is not None
        self._holder = HungLockHolder(connector._held.store.index.file._descriptor)
        return True

    def resume(self) -> None:
        self._holder.end()

    def close(self) -> None:
        pass


def _write_index(path: Path, fingerprint: bytes, bytes_per_slot: int, block_hashes: Sequence[bytes]) -> None:
    """An index of these blocks, on the disk and no longer in the page cache."""
    create_index_file(path, fingerprint, len(block_hashes), bytes_per_slot)
    file = IndexFile(path, fingerprint, bytes_per_slot)
    index = SlotIndex(file, take_lease_number(file), lambda _number: True, lambda _first, _end: None, len(block_hashes))
    for start in range(0, len(block_hashes), _BATCH):
        names = block_hashes[start : start + _BATCH]
        slots = index.reserve(names, []).new_slots
        index.publish({names[position]: slot for position, slot in slots.items()}, names)
    index.close()
    file.close()
    del index, file  # and with them the mapping
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
