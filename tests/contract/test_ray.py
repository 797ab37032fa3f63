"""The contract, for ray: one real Ray for the module, each test's stores in a namespace of their own."""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, content_of
from connectors.contract.peer import Peer
from connectors.stored_block import BLOCK_HEADER_BYTES
from tests.support.ray_node import MIB, RayNode

_NUMBERS = itertools.count()
_BLOCK_BYTES = LAYOUT.block_bytes + BLOCK_HEADER_BYTES
_ROOMY_BYTES = 32 * MIB
_PATIENCE_S = 30.0


class RayHarness(ConnectorHarness):
    """A store is a namespace. Headers are in the directory's own memory, out of reach; payloads are in the object store."""

    connector_name = "ray"
    is_persistent = True
    node: ClassVar[RayNode]

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._prefix = f"test{next(_NUMBERS)}"

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        capacity_bytes = num_blocks * _BLOCK_BYTES + (_ROOMY_BYTES if num_blocks > 1000 else 0)  # it may get larger ones
        return {**self.node.options, "namespace": f"{self._prefix}-{store}", "capacity_bytes": capacity_bytes, "linger_s": 10.0}

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        if where == "header":
            pytest.skip("headers are in the directory's own memory")
        offset = 0 if where == "payload" else LAYOUT.block_bytes - 1
        self._change(lambda name, content: _with_flipped_bit(content, offset) if name == block_hash else content, block_hash)

    def truncate(self, store: str, block_hash: bytes) -> None:
        """Objects cannot be cut: what would be behind the cut becomes zeros."""
        self._change(lambda _, content: content[:100] + bytes(len(content) - 100), block_hash)

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        self._change(lambda name, _: content_of(second_hash if name == first_hash else first_hash), first_hash, second_hash)

    def delete(self, store: str, block_hash: bytes) -> None:
        self._change(lambda _, content: bytes(len(content)), block_hash)

    def _change(self, change: Callable[[bytes, bytes], bytes], *names: bytes) -> None:
        """Blocks are found by their content. Those of the same name in stores of earlier tests are changed, too."""
        descriptor = self.node.open_object_store()
        with mmap.mmap(descriptor, os.fstat(descriptor).st_size) as memory:
            os.close(descriptor)
            starts = {name: list(_occurrences(memory, content_of(name))) for name in names}
            for name, found in starts.items():
                assert found, "the block is not in the object store"
                for start in found:
                    memory[start : start + LAYOUT.block_bytes] = change(name, content_of(name))

    def wipe(self, store: str) -> None:
        """kill -9 of the directory, and with it of all that it owns."""
        self.node.kill_one("directory")


def _occurrences(memory: mmap.mmap, content: bytes) -> Iterator[int]:
    start = memory.find(content)
    while start >= 0:
        yield start
        start = memory.find(content, start + 1)


def _with_flipped_bit(content: bytes, offset: int) -> bytes:
    return content[:offset] + bytes([content[offset] ^ 0x10]) + content[offset + 1 :]


@pytest.fixture(scope="module", autouse=True)
def ray_node() -> Iterator[RayNode]:
    """A Ray with a directory that stays for the module, because another process keeps a store open."""
    node = RayNode()
    RayHarness.node = node
    keeper = Peer("ray", {**node.options, "namespace": "keeper"})
    try:
        deadline_s = time.monotonic() + _PATIENCE_S
        while keeper.ask("save", seed=1, num_blocks=2) != [2, "ok"]:
            assert time.monotonic() < deadline_s, "there is no directory"
            time.sleep(0.05)
        yield node
    finally:
        keeper.kill()
        node.end()


class TestRay(ConnectorContract):
    harness_type = RayHarness
