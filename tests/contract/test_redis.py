"""The contract, for redis: real servers, each store one of its own, as large as the test says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from connectors.contract.contract import ConnectorContract
from connectors.contract.harness import ConnectorHarness
from connectors.contract.node import LAYOUT
from connectors.stored_block import BLOCK_HEADER_BYTES
from tests.support.redis_server import EXECUTABLE, RedisProcess

_BLOCK_BYTES = 2560 + 200  # what the allocator gives a block of LAYOUT with its header, and its key, expiry and entries
_FIRST_USE_BYTES = 110 * 1024  # what a server allocates once, for its first clients
_ROOMY_BYTES = 32 * 1024 * 1024  # a store of a thousand blocks need not be exact, but may get larger ones
_NODE_BYTES = 3 * 38 * 1024  # the buffers of a node's connections, which count as the server's memory, too


class RedisHarness(ConnectorHarness):
    """One server per store, which gets more memory with each node that is opened on it.

    maxmemory-samples 64: eviction by time to live is then exact for stores of a hundred blocks.
    """

    connector_name = "redis"
    is_persistent = True
    min_usable_fraction = 0.6  # a connection's buffers may take the place of some blocks between two looks at such a small store

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.servers: dict[str, RedisProcess] = {}

    def options(self, store: str, num_blocks: int) -> dict[str, Any]:
        if store not in self.servers:
            self.servers[store] = self._start(store, num_blocks, "--maxmemory-samples", "64")
        self._grow(self.servers[store], _NODE_BYTES)
        return {"url": self.servers[store].url}

    def flip_bit(self, store: str, block_hash: bytes, where: str) -> None:
        offset = {"header": 20, "payload": BLOCK_HEADER_BYTES, "end": BLOCK_HEADER_BYTES + LAYOUT.block_bytes - 1}[where]
        self._change(store, block_hash, lambda value: value[:offset] + bytes([value[offset] ^ 0x10]) + value[offset + 1 :])

    def truncate(self, store: str, block_hash: bytes) -> None:
        self._change(store, block_hash, lambda value: value[: BLOCK_HEADER_BYTES + 100])

    def swap(self, store: str, first_hash: bytes, second_hash: bytes) -> None:
        with self.servers[store].client() as client:
            first, second = self._key(client, first_hash), self._key(client, second_hash)
            values = client.mget(second, first)
            for key, value in zip((first, second), values, strict=True):
                client.set(key, value, keepttl=True)

    def delete(self, store: str, block_hash: bytes) -> None:
        with self.servers[store].client() as client:
            client.delete(self._key(client, block_hash))

    def wipe(self, store: str) -> None:
        """kill -9 and a new, empty server in its place."""
        self.servers[store].kill()
        self.servers[store].start()

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[tuple[dict[str, Any], Callable[[], None]]]:
        server = self.servers["full"] = self._start("full", 100, "--maxmemory-policy", "noeviction")

        def make_room() -> None:
            with server.client() as client:
                client.config_set("maxmemory", 0)

        yield {"url": server.url}, make_room

    def close(self) -> None:
        super().close()
        for server in self.servers.values():
            server.end()
        self.servers.clear()

    def _start(self, store: str, num_blocks: int, *flags: str) -> RedisProcess:
        server = RedisProcess(self.directory / store, *flags)
        with server.client() as client:
            used_bytes = client.info("memory")["used_memory"]
        server.flags = (*flags, "--maxmemory", "0")
        room_bytes = num_blocks * _BLOCK_BYTES + (_ROOMY_BYTES if num_blocks > 1000 else 0)
        self._grow(server, used_bytes + _FIRST_USE_BYTES + room_bytes)
        return server

    def _grow(self, server: RedisProcess, num_bytes: int) -> None:
        max_bytes = int(server.flags[-1]) + num_bytes
        server.flags = (*server.flags[:-1], str(max_bytes))  # also for when it is started anew
        with server.client() as client:
            client.config_set("maxmemory", max_bytes)

    def _key(self, client: Any, block_hash: bytes) -> bytes:
        (key,) = client.scan_iter(f"*{block_hash.hex()}", count=10_000)
        return bytes(key)

    def _change(self, store: str, block_hash: bytes, change: Callable[[bytes], bytes]) -> None:
        with self.servers[store].client() as client:
            key = self._key(client, block_hash)
            client.set(key, change(client.get(key)), keepttl=True)


@pytest.mark.skipif(EXECUTABLE is None, reason="there is no redis-server")
class TestRedisWhereAServerIsInstalled(ConnectorContract):
    harness_type = RedisHarness
