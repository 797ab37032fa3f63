"""An engine's way to the directory of its Ray node: connections, the object store's memory, and how one is made.

Ray itself is not loaded here: a driver that loses its Ray may end or hang the process around it, with the engine in it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.huge_pages import map_file
from connectors.ray.messages import (
    STATUS_BYTES,
    FrameStream,
    Operation,
    StoreStatus,
    check_peer,
    socket_address,
    unpack_status,
)
from core.errors import ConnectorError

_ROOT = Path(__file__).resolve().parents[2]
_END_TIMEOUT_S = 2.0


@dataclass(eq=False, slots=True)
class DirectoryConnection:
    """store: all of the object store's memory, for reading, on a connection for data; empty on another one."""

    stream: FrameStream
    store: npt.NDArray[np.uint8]
    status: StoreStatus
    medium_bytes: int = 0  # of this node's object store

    def fileno(self) -> int:
        """For poll."""
        return self.stream.fileno()

    def is_stale(self) -> bool:
        """Whether an idle connection was closed by the other end."""
        return is_readable(self.stream.fileno())

    def close(self) -> None:
        """Safe to repeat."""
        self.stream.close()


class DirectoryDoor:
    """Opens connections to one store. After close() there are none, and no more. Any thread."""

    def __init__(self, address: str, node_ip: str, hello: Mapping[str, Any], timeout_s: float) -> None:
        self._address = socket_address(address, node_ip)
        self._hello = json.dumps(dict(hello)).encode()
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()  # of the three below
        self._streams: weakref.WeakSet[FrameStream] = weakref.WeakSet()
        self._stores: weakref.WeakValueDictionary[tuple[int, int], npt.NDArray[np.uint8]] = weakref.WeakValueDictionary()
        self._is_closed = False

    def open(self, pool_descriptor: int | None = None) -> DirectoryConnection:
        """For data when the pool is given. Raises OSError (ConnectionRefusedError: nobody listens) or ConnectorError."""
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream = FrameStream(connected, self._timeout_s)
        try:
            connected.settimeout(self._timeout_s)
            connected.connect(self._address)
            check_peer(connected)
            with self._mutex:
                if self._is_closed:
                    raise ConnectorError("the connector is closed")
                self._streams.add(stream)
            stream.begin()
            stream.send(Operation.HELLO, self._hello, pool_descriptor)
            operation, body, descriptor = stream.receive()
            try:
                if operation is not Operation.OK:
                    raise ConnectorError("the directory does not answer HELLO")
                medium_bytes = int(json.loads(body[:-STATUS_BYTES])["medium_bytes"])
                store = self._map(descriptor, medium_bytes)
            finally:
                if descriptor is not None:
                    os.close(descriptor)
            return DirectoryConnection(stream, store, unpack_status(body), medium_bytes)
        except BaseException as error:
            stream.close()
            if isinstance(error, (ValueError, KeyError, TypeError)):
                raise ConnectorError(f"the directory's answer to HELLO is not understood: {error!r}") from error
            raise

    def close(self) -> None:
        """End all connections under those who wait for them."""
        with self._mutex:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.shut_down()

    def _map(self, descriptor: int | None, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Mapped once for all connections: a page's first use by a mapping costs more than its copy."""
        if descriptor is None:
            return np.empty(0, dtype=np.uint8)
        found = os.fstat(descriptor)
        with self._mutex:
            memory = self._stores.get((found.st_dev, found.st_ino))
            if memory is None:
                memory = map_file(descriptor, num_bytes)
                self._stores[found.st_dev, found.st_ino] = memory
        return memory


class DirectoryStarter:
    """Makes a directory where none listens, by a program that waits for Ray and ends. One at a time on a host. One thread."""

    def __init__(self, address: str, node_ip: str, auth: str, linger_s: float) -> None:
        self._claim_address = socket_address(address, node_ip) + b"-starting"
        self._address = address
        self._options = json.dumps({"address": address, "node_ip": node_ip, "auth": auth, "linger_s": linger_s})
        self._process: subprocess.Popen[bytes] | None = None
        self._claim: socket.socket | None = None
        self.last_failure = ""  # of the program, in one line

    @property
    def why_absent(self) -> str:
        """For an operator; "" while the first program is at it."""
        if not self.last_failure:
            return ""
        text = f"Ray's directory actor of this host is not there: {self.last_failure}"
        if "`ray start" in self.last_failure:
            return text
        return (
            f"{text}; a Ray node must run on this host: `ray start --head`, or `ray start --address={self._address}` to join one"
        )

    def ensure(self) -> None:
        """Start the program, unless ours or somebody else's runs. Raises OSError where it cannot be started."""
        if self._process is not None:
            has_ended = self._process.poll() is not None
            self._read_failure(self._process)
            if not has_ended:
                return
            self.stop()
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(self._claim_address)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "connectors.ray.directory", self._options],
                cwd=_ROOT,  # which Ray's workers import our modules from, too
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
            self._claim = claim
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:  # else another engine's program is at it
                raise

    def _read_failure(self, process: subprocess.Popen[bytes]) -> None:
        """What the program has printed: why there is no directory yet."""
        assert process.stdout is not None
        if is_readable(process.stdout.fileno()):
            lines = os.read(process.stdout.fileno(), 65536).decode(errors="replace").split("\n")
            self.last_failure = next((line for line in reversed(lines) if line), self.last_failure)

    def stop(self) -> None:
        """End the program. Safe to repeat."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_END_TIMEOUT_S)
        if self._claim is not None:
            self._claim.close()
            self._claim = None


def is_readable(descriptor: int) -> bool:
    """Whether something can be read now, an end included."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(0))
