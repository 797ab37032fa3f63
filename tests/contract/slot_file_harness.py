"""Damage for stores that keep slots in a segment file: finds a block by its header and changes bytes in place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT
from connectors.slots.store import HEADER_PAGE_BYTES, slot_bytes
from connectors.stored_block import BLOCK_HEADER_BYTES

_SLOT_BYTES = slot_bytes(LAYOUT)


class SlotFileHarness(ConnectorHarness):
    """Base of the harnesses of shm and nvme. fingerprint: of LAYOUT at rest."""

    fingerprint = LAYOUT.fingerprint

    def store_root(self, store: str) -> Path:
        """The folder that holds the store's folders, one per layout."""
        raise NotImplementedError

    def capacity_bytes(self, num_blocks: int) -> int:
        """Bytes for so many blocks of LAYOUT and their index."""
        return num_blocks * (_SLOT_BYTES + 64) + 72 * 1024

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        start = self._find(store, block_hash)
        offset = {"header": 20, "payload": HEADER_PAGE_BYTES, "end": HEADER_PAGE_BYTES + LAYOUT.block_bytes - 1}[where]
        with self._segment(store).open("r+b") as file:
            file.seek(start + offset)
            (byte,) = file.read(1)
            file.seek(start + offset)
            file.write(bytes([byte ^ 0x10]))

    def truncate(self, store: str, block_hash: bytes) -> None:
        os.truncate(self._segment(store), self._find(store, block_hash) + HEADER_PAGE_BYTES + 100)

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        first, second = self._find(store, first_hash), self._find(store, second_hash)
        with self._segment(store).open("r+b") as file:
            slots = []
            for start in (first, second):
                file.seek(start)
                slots.append(file.read(_SLOT_BYTES))
            for start, slot in zip((second, first), slots, strict=True):
                file.seek(start)
                file.write(slot)

    def delete(self, store: str, block_hash: bytes) -> None:
        with self._segment(store).open("r+b") as file:
            file.seek(self._find(store, block_hash))
            file.write(bytes(_SLOT_BYTES))

    def wipe(self, store: str) -> None:
        shutil.rmtree(self.store_root(store))

    def damage_index(self, store: str) -> None:
        index = self._segment(store).with_name("index")
        index.write_bytes(b"\xff" * 5000)

    def _segment(self, store: str) -> Path:
        (segment,) = self.store_root(store).glob(f"*{self.fingerprint.hex()}/segment")
        return segment

    def _find(self, store: str, block_hash: bytes) -> int:
        with self._segment(store).open("rb") as file:
            for start in range(0, os.fstat(file.fileno()).st_size, _SLOT_BYTES):
                file.seek(start)
                if block_hash in file.read(BLOCK_HEADER_BYTES):
                    return start
        raise AssertionError("the store does not hold this block")
