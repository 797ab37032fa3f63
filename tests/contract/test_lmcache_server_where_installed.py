"""The contract, and what only a server can do to a connector, for lmcache's server mode: a real `lmcache server`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT, SteppedClock
from connectors.lmcache.object_directory import StoredObject
from connectors.stored_block import BLOCK_HEADER_BYTES
from tests.support.lmcache_server import LMCacheServerProcess

IS_INSTALLED = importlib.util.find_spec("lmcache") is not None
pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="lmcache is not installed")

UNIT_BYTES = BLOCK_HEADER_BYTES + LAYOUT.block_bytes
OP_TIMEOUT_S = 0.5
RECOVERY_S = 5.0
PATIENCE_S = 20.0  # a machine with other work: what is bounded by OP_TIMEOUT_S must not take many times that


class LMCacheServerHarness(ConnectorHarness):
    """One server for all tests: each store is a namespace in it."""

    connector_name = "lmcache"
    is_persistent = True
    server: ClassVar[LMCacheServerProcess]

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        return {
            "mode": "server",
            "server": self.server.address,
            "http": self.server.http_address,
            "namespace": hashlib.md5(str(self.directory).encode()).hexdigest() + store,
            "capacity_bytes": num_blocks * UNIT_BYTES if num_blocks < 1024 else 0,
        }

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        offset = {"header": 20, "payload": BLOCK_HEADER_BYTES + 100, "end": UNIT_BYTES - 1}[where]
        with self._block(store, block_hash) as block:
            block[offset] ^= 1

    def truncate(self, store: str, block_hash: bytes) -> None:
        with self._block(store, block_hash) as block:
            block[UNIT_BYTES // 2 :] = 0

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        with self._block(store, first_hash) as first, self._block(store, second_hash) as second:
            first[:], second[:] = second.copy(), first.copy()

    def delete(self, store: str, block_hash: bytes) -> None:
        with self._block(store, block_hash) as block:
            block[:] = 0

    def wipe(self, store: str) -> None:
        self.server.kill()
        self.server.start()

    def damage_index(self, store: str) -> None:
        with self.objects(store) as objects:
            for path in objects.folder.iterdir():
                path.rename(path.with_name(f"damaged-{path.name}"))

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        server = LMCacheServerProcess(self.directory / "full", 0.002, "--eviction-trigger-watermark", "1.0")
        try:
            options = {**self.options("full", 512), "server": server.address, "http": server.http_address}
            with self.objects("filler", server) as filler:
                objects = [StoredObject(bytes([number]) * 96) for number in range(90)]  # 1.4 of 2 MiB
                for batch in filler.batches(objects):
                    assert filler.write(batch, lambda several: None, lambda: False) == list(batch)[::-1]
                yield options, lambda: filler.delete([stored.name for stored in objects])
        finally:
            server.end()

    @contextlib.contextmanager
    def objects(self, store: str, server: LMCacheServerProcess | None = None) -> Iterator[Any]:
        """The store's objects, past the connector."""
        from connectors.lmcache.server_objects import ServerObjects

        server = server or self.server
        namespace = self.options(store, 16)["namespace"]
        objects = ServerObjects(server.address, server.http_address, namespace, LAYOUT, 0, 5.0, SteppedClock())
        objects.refresh()
        assert objects.why_away is None
        try:
            yield objects
        finally:
            objects.close()

    @contextlib.contextmanager
    def _block(self, store: str, block_hash: bytes) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
        """A block's bytes in the server's memory."""
        with self.objects(store) as objects:
            stored = objects.directory.find(block_hash)
            (started,) = objects.read_steps([stored])
            with objects.reading(started, lambda: False) as views:
                start = stored.block_hashes.index(block_hash) * UNIT_BYTES
                yield views[stored][start : start + UNIT_BYTES]


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheServerProcess]:
    server = LMCacheServerHarness.server = LMCacheServerProcess(tmp_path_factory.mktemp("server"))
    yield server
    server.end()


class TestLMCacheServer(ConnectorContract):
    harness_type = LMCacheServerHarness
