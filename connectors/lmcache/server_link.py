"""One connection to a running `lmcache server`: its requests, each with an end, and the shared memory that all data passes.

LMCache's client knows no errors: a server that is gone, hangs, or cannot do what it is asked does not answer. So a link on which
an answer was late is lost, and whoever holds it makes a new one. The server names an object by a hash over token ids, and knows
nothing of what it holds but that; see server_objects.py for what follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import itertools
import json
import mmap
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import zmq

from connectors.lmcache.library import TokenHasher, api, connect, custom_types
from connectors.lmcache.object_directory import StoredObject
from connectors.lmcache.object_store import Bytes
from connectors.lmcache.server_index import SHARED_MEMORY

_TOKENS_PER_NAME = 4  # 128 bits of a digest
_WAIT_S = 0.02  # between looks at whether to stop
_STOP_PATIENCE_S = 0.5  # how long an answer is awaited that nobody wants any longer: it frees what the server holds for us
_REGISTRATION_PERIOD_S = 20.0  # the server forgets who is silent for two minutes
_GOODBYE_TIMEOUT_S = 0.5
_WORLD_SIZE = 1


class ServerLostError(Exception):
    """The server is not there, does not answer in time, or is not the one that it was."""


class ServerLink:
    """A server that was found well when this was made. Any thread.

    pool_name and inode tell one run of a server from the next. Objects of each number of blocks are a model of their own to it.
    timeout_s: for an answer.
    """

    def __init__(self, address: str, http_address: str, model_name: str, unit_bytes: int, timeout_s: float) -> None:
        """Connect. Raises ServerLostError."""
        self._http_address, self._model_name, self._unit_bytes, self.timeout_s = http_address, model_name, unit_bytes, timeout_s
        self._request_ids = map("{}-{}".format, itertools.repeat(uuid.uuid4().hex), itertools.count())
        self._mutex = threading.Lock()
        self._instances: dict[int, tuple[int, float]] = {}  # by blocks per object: id, and when it was last made known
        self._last_finish: Any = None
        self.is_lost = False
        self._reach(address)
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = connect(address, self._context)
        try:
            self._open_pool()
            self._read_settings()
        except BaseException:
            self.close()
            raise

    def _reach(self, address: str) -> None:
        """A closed port is known at once, where LMCache's client would wait for it to open."""
        host, _colon, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), self.timeout_s).close()
        except OSError as error:
            raise ServerLostError(f"no server at {address}: {error}") from error

    def _open_pool(self) -> None:
        response = self._register(1)
        if not response.shm_name or response.pool_size <= 0:
            raise ServerLostError("the server has no shared memory: it must be started with --shm-name NAME --no-l1-use-lazy")
        self.pool_bytes: int = response.pool_size
        self._path = SHARED_MEMORY / response.shm_name.lstrip("/")
        try:
            with self._path.open("r+b") as file:
                self._pool = np.frombuffer(mmap.mmap(file.fileno(), self.pool_bytes), dtype=np.uint8)
            self.inode = self._path.stat().st_ino
        except (OSError, ValueError) as error:
            raise ServerLostError(f"the server's memory {self._path} cannot be opened: {error}") from error
        self.pool_name = self._path.name

    def _read_settings(self) -> None:
        status = self._ask_http("GET", "/status", None)
        self.chunk_size = int(status.get("chunk_size", 0))
        if self.chunk_size < _TOKENS_PER_NAME or status.get("hash_algorithm") != "blake3":
            raise ServerLostError(f"the server must have --chunk-size {_TOKENS_PER_NAME} or more, and --hash-algorithm blake3")
        self._hasher = TokenHasher(self.chunk_size, "blake3")

    def is_current(self) -> bool:
        """Whether the memory that is mapped is still the server's; a server that was started anew has other memory."""
        try:
            return not self.is_lost and self._path.stat().st_ino == self.inode
        except OSError:
            return False

    def close(self) -> None:
        """Nobody uses it any longer. Safe to repeat."""
        with self._mutex:
            instances, self._instances = self._instances, {}
        if self._context.closed:
            return
        with contextlib.suppress(Exception):  # LMCache's client promises nothing; the server forgets us by itself
            futures = [self._client.unregister_kv_cache_engine_driven_context(instance) for instance, _ in instances.values()]
            for future in () if self.is_lost else futures:
                future.wait(_GOODBYE_TIMEOUT_S)
        self.is_lost = True
        self._client.close()
        self._context.destroy(linger=0)

    # -- objects -------------------------------------------------------------------------------------------------------
    def key(self, stored: StoredObject) -> Any:
        """A name for an object in requests of one session, which end_session() ends."""
        tokens = (*self._tokens(stored), *itertools.repeat(0, self.chunk_size - _TOKENS_PER_NAME))
        return custom_types.IPCCacheServerKey(
            model_name=self._model_of(stored.num_blocks),
            world_size=_WORLD_SIZE,
            worker_id=0,
            token_ids=tokens,
            start=0,
            end=self.chunk_size,
            request_id=next(self._request_ids),
            num_kv_readers=1,
        )

    def view(self, context: Mapping[str, Any]) -> Bytes | None:
        """The bytes of the one object that an answer speaks of; None: it speaks of none."""
        slots = context.get("slots") or []
        if not slots:
            return None
        start, length = int(slots[0]["offset"]), int(slots[0]["length"])
        return self._pool[start : start + length]

    def start_lookup(self, key: Any, num_blocks: int) -> Any:
        """A future. Whatever is found may then be retrieved, and is held by the server until then."""
        self._instance(num_blocks)  # the server finds nothing of a size that it has not heard of
        return self._client.lookup(key.no_worker_id_version(), _WORLD_SIZE)

    def start_lookup_result(self, key: Any) -> Any:
        """A future: how many objects were found, None while that is not known. After the answer to start_lookup."""
        return self._client.query_prefetch_status(key.request_id)

    def start_retrieve(self, key: Any, num_blocks: int) -> Any:
        """A future: where the object lies. finish_retrieve() lets go of it."""
        return self._client.prepare_retrieve(key, self._instance(num_blocks))

    def finish_retrieve(self, key: Any, num_blocks: int) -> None:
        """Nobody waits for the answer but delete()."""
        self._last_finish = self._client.commit_retrieve(key, self._instances.get(num_blocks, (0, 0.0))[0])

    def give_up_lookup(self, key: Any) -> None:
        """What was looked up is not retrieved. Nobody waits for the answer."""
        self._client.free_lookup_locks(key.no_worker_id_version(), _WORLD_SIZE)
        self.end_session(key)

    def start_store(self, key: Any, num_blocks: int) -> Any:
        """A future: where to write the object; nowhere if it is there, if somebody else writes it, or if there is no room."""
        return self._client.prepare_store(key, self._instance(num_blocks))

    def finish_store(self, key: Any, num_blocks: int) -> Any:
        """A future: whether the object is stored now."""
        return self._client.commit_store(key, self._instances.get(num_blocks, (0, 0.0))[0], b"")

    def end_session(self, key: Any) -> None:
        """The object was used last of all. Nobody waits for the answer."""
        self._client.end_session(key.request_id)

    def delete(self, objects: Sequence[StoredObject]) -> None:
        """Remove objects, except those that another client reads. Raises ServerLostError."""
        if self._last_finish is not None:
            self.wait(self._last_finish)  # the server answers these in order
        keys = [
            {
                "chunk_hash_hex": self._hasher.compute_chunk_hashes([*self._tokens(stored), *[0] * self.chunk_size])[0].hex(),
                "model_name": self._model_of(stored.num_blocks),
                "kv_rank": api.ObjectKey.ComputeKVRank(_WORLD_SIZE, 0, _WORLD_SIZE, 0),
            }
            for stored in objects
        ]
        self._ask_http("DELETE", "/cache/objects", {"tier": "l1", "keys": keys})

    def free_bytes(self) -> int:
        """Of the server's memory. Raises ServerLostError."""
        used_bytes, total_bytes = self._ask_http("GET", "/status", None)["storage_manager"]["l1_usage"]
        return int(total_bytes - used_bytes)

    def wait(self, future: Any, should_stop: Callable[[], bool] = lambda: False) -> Any:
        """An answer. Raises ServerLostError when it is late."""
        started_s = time.monotonic()
        while not future.wait(_WAIT_S):
            passed_s = time.monotonic() - started_s
            if self.is_lost or passed_s > self.timeout_s or (passed_s > _STOP_PATIENCE_S and should_stop()):
                raise ServerLostError(f"no answer within {passed_s:.2f} s")
        return future.result(0)

    # -- parts ---------------------------------------------------------------------------------------------------------
    def _instance(self, num_blocks: int) -> int:
        """Who we are to the server, for objects of that many blocks. Made known to it from time to time."""
        with self._mutex:
            known = self._instances.get(num_blocks)
        if known is None or time.monotonic() - known[1] > _REGISTRATION_PERIOD_S:
            self._register(num_blocks)
            known = self._instances.get(num_blocks)
        if known is None:
            raise ServerLostError("the connection is closed")
        return known[0]

    def _register(self, num_blocks: int) -> Any:
        with self._mutex:
            instance, _ = self._instances.get(num_blocks, (uuid.uuid4().int >> 65, 0.0))
        payload = custom_types.RegisterEngineDrivenContextPayload(
            instance_id=instance,
            model_name=self._model_of(num_blocks),
            world_size=_WORLD_SIZE,
            block_size=1,
            num_layers=1,
            hidden_dim_size=num_blocks * self._unit_bytes,
            dtype_str="uint8",
            use_mla=True,  # one plane of bytes
            num_physical_slots=1,
        )
        response = self.wait(self._client.register_kv_cache_engine_driven_context(payload))
        self._client.ping(instance)  # who has never done so is remembered for an hour after it died
        with self._mutex:
            self._instances[num_blocks] = (instance, time.monotonic())
        return response

    def _model_of(self, num_blocks: int) -> str:
        return f"{self._model_name}-{num_blocks}"

    def _tokens(self, stored: StoredObject) -> tuple[int, ...]:
        digest = hashlib.sha256(stored.name).digest()[: 4 * _TOKENS_PER_NAME]
        return struct.unpack(f">{_TOKENS_PER_NAME}I", digest)

    def _ask_http(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        connection = http.client.HTTPConnection(self._http_address, timeout=self.timeout_s)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {} if content is None else {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            if response.status != http.client.OK:
                raise ServerLostError(f"{method} {path} at {self._http_address}: {response.status} {answer[:200]!r}")
            return json.loads(answer)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerLostError(f"{method} {path} at {self._http_address}: {error!r}") from error
        finally:
            connection.close()
