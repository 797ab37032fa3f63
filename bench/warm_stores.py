"""The stores of the benchmark of warm prefixes: each outlives the node that filled it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.registry import create_connector
from core.clock import MonotonicClock
from core.config import ModelOptions
from core.kv.connector import KVConnector, PrefixLookup, Transfer, TransferDirection
from core.kv.hashing import Namespace, extend_block_hashes
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model_files import resolve_model
from deploy.topology import find_free_ports
from tests.support.delaying_proxy import DelayingProxy
from tests.support.ray_node import MIB, RayNode
from tests.support.redis_server import RedisProcess

MODEL = "smollm2"
DTYPE = "bfloat16"
BLOCK_SIZE = 16
HOST = "127.0.0.1"
CAPACITY_BYTES = 1024 * MIB
NUM_CONNECTIONS = 4  # of the redis connector, for one transfer
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Link:
    """What lies between a node and a Redis server. bytes_per_s: over all of a transfer's connections."""

    latency_s: float = 0.0
    bytes_per_s: float = 0.0


REDIS_LINKS = {
    "redis": None,
    "redis-200ms": Link(latency_s=0.2),
    "redis-500ms": Link(latency_s=0.5),
    "redis-20MBps": Link(bytes_per_s=20e6),
    "redis-4MBps": Link(bytes_per_s=4e6),
}
STORES = ("shm", "nvme", "tiered", "tcp", "ray", *REDIS_LINKS)


@dataclass(frozen=True, slots=True)
class Store:
    """connector and options are a node's. keep: called with each prompt that a node has saved."""

    connector: str
    options: Mapping[str, Any]
    keep: Callable[[Sequence[int]], None] = lambda _token_ids: None


@contextmanager
def opened_store(name: str, folder: Path) -> Iterator[Store]:
    """A store of that name, empty."""
    with ExitStack() as stack:
        if name in REDIS_LINKS:
            server = RedisProcess(folder / "redis", "--maxmemory", "4gb")
            stack.callback(server.end)
            port, link = server.port, REDIS_LINKS[name]
            if link is not None:
                proxy = DelayingProxy(server.port)
                stack.callback(proxy.close)
                proxy.latency_s, proxy.bytes_per_s = link.latency_s, link.bytes_per_s / NUM_CONNECTIONS
                port = proxy.port
            yield Store("redis", {"url": f"redis://{HOST}:{port}/0", "op_timeout_s": 20.0})
        elif name == "nvme":
            yield Store("nvme", {"path": str(folder / "kv"), "capacity_bytes": CAPACITY_BYTES})
        elif name == "tiered":  # only the lower tier outlives the node
            options = {"shm": {"name": folder.name, "capacity_bytes": CAPACITY_BYTES}}
            yield Store("tiered", {"tiers": ["shm", "nvme"], **options, "nvme": {"path": str(folder / "kv")}})
        elif name == "tcp":
            ports = find_free_ports(HOST, 2)
            peer = _Member("tcp", {"port": ports[0], "peers": [f"{HOST}:{ports[1]}"], "capacity_bytes": CAPACITY_BYTES})
            stack.callback(peer.close)
            yield Store("tcp", {"port": ports[1], "peers": [f"{HOST}:{ports[0]}"]}, peer.take)
        else:
            options = {"name": folder.name, "capacity_bytes": CAPACITY_BYTES}
            if name == "ray":
                node = RayNode(object_store_bytes=CAPACITY_BYTES)
                stack.callback(node.end)
                options = {**node.options, "capacity_bytes": CAPACITY_BYTES // 2}
            stack.callback(_Member(name, options).close)  # as another node would be
            yield Store(name, options)


class _Member:
    """Another user of a store, in this process."""

    def __init__(self, connector: str, options: Mapping[str, Any]) -> None:
        model = describe_model(resolve_model(MODEL), ModelOptions(path=MODEL, dtype=DTYPE), BLOCK_SIZE)
        self._root_hash = Namespace(model.model_fingerprint, model.kv_layout.fingerprint, BLOCK_SIZE).root_hash()
        self._pool = KVPoolMemory(model.kv_layout, 256)
        self._connector: KVConnector = create_connector(connector, options, MonotonicClock())
        self._connector.register_kv_cache(self._pool)
        self._next_id = 1

    def close(self) -> None:
        self._connector.close()

    def take(self, token_ids: Sequence[int]) -> None:
        """Load a prompt's blocks from whoever has them, and save them."""
        names: list[bytes] = []
        extend_block_hashes(names, token_ids, BLOCK_SIZE, self._root_hash)
        request_id, num_found, deadline_s = f"take-{self._next_id}", None, time.monotonic() + _TIMEOUT_S
        while num_found != len(names) * BLOCK_SIZE:
            assert time.monotonic() < deadline_s, f"nobody has all of a prompt: {num_found} of {len(token_ids)} tokens"
            time.sleep(0.01)
            num_found = self._connector.get_num_new_matched_tokens(PrefixLookup(request_id, names, BLOCK_SIZE), 0)
        for start, direction in (
            (self._connector.start_load, TransferDirection.LOAD),
            (self._connector.start_save, TransferDirection.SAVE),
        ):
            block_ids = tuple(range(len(names)))
            start(Transfer(self._next_id, direction, request_id, block_ids, tuple(names), deadline_s))
            self._next_id += 1
            while not (results := self._connector.poll_transfers()):
                time.sleep(0.005)
            assert results[0].num_blocks_ok == len(names), results[0]
