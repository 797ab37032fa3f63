"""All that touches Ray: the directory as an actor, one per Ray node and user, and the program that makes it.

The actor puts objects and so owns them: they outlive the engines that wrote them, and end with the actor. An engine does not
load Ray; it starts `python -m connectors.ray.directory OPTIONS` when no directory listens, and then talks to the directory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from connectors.huge_pages import map_file
from connectors.ray.messages import VERSION, socket_address
from connectors.ray.server import DirectoryServer, Peers
from connectors.ray.sessions import BorrowedBlocks
from connectors.ray.slabs import USABLE_FRACTION, ObjectMedium

logger = logging.getLogger(__name__)

RAY_NAMESPACE = "kvrelay"
_GET_TIMEOUT_S = 10.0
_SHARED_OBJECT_BYTES = 32 * 1024 * 1024
_SHARE_TIMEOUT_S = 1.0
_PEERS_INTERVAL_S = 2.0
_PROBE_INTERVAL_S = 0.2
_INIT_TIMEOUT_S = 15.0
_NUM_ATTEMPTS = 5


class RayMedium(ObjectMedium):
    """The object store of this node. Every object stays mapped while it is held, so that Ray cannot spill it to disk.

    Their owner writes to these objects for as long as it has them, so no other process may get a reference to one: Ray takes
    objects for unchanging, and other nodes would keep copies.
    """

    def __init__(self) -> None:
        """Raises OSError when the object store's memory cannot be found."""
        import ray

        self._ray = ray
        probe = ray.put([np.zeros(1024 * 1024, dtype=np.uint8)])  # too large to be kept anywhere else
        address = _address_of(ray.get(probe, timeout=_GET_TIMEOUT_S)[0])
        self._start, end, inode = _mapping_around(address)
        self.descriptor, writable = _open_store_file(inode)
        try:
            self.num_bytes = min(os.fstat(self.descriptor).st_size, end - self._start)
            self.memory = map_file(writable, self.num_bytes, is_writable=True)
        finally:
            os.close(writable)

    def make(self, num_bytes: int) -> tuple[Any, int] | None:
        """Raises what Ray raises."""
        reference = self._ray.put([np.zeros(num_bytes, dtype=np.uint8)])  # touches its memory, which costs ten times a copy
        array = self._ray.get(reference, timeout=_GET_TIMEOUT_S)[0]
        offset = self.offset_of(array)
        return None if offset is None else ((reference, array), offset)

    def offset_of(self, array: npt.NDArray[np.uint8]) -> int | None:
        """Where the content of an object is; None: not in the object store's memory (Ray puts what does not fit into files)."""
        offset = _address_of(array) - self._start
        return offset if 0 <= offset <= self.num_bytes - len(array) else None


def _address_of(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _mapping_around(address: int) -> tuple[int, int, int]:
    """Start, end and inode of the shared mapping that holds an address. Raises OSError."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _mode, _offset, _device, inode = line.split()[:5]
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end and int(inode):
            return start, end, int(inode)
    raise OSError("Ray's object store is not in a file")


def _open_store_file(inode: int) -> tuple[int, int]:
    """The object store's memory, for reading and for writing. It has no name; our parent, the raylet, has it open.

    Raises OSError."""
    for entry in Path(f"/proc/{os.getppid()}/fd").iterdir():
        try:
            found = entry.stat()
        except OSError:
            continue
        if found.st_ino == inode and "plasma" in str(entry.readlink()):
            return os.open(entry, os.O_RDONLY | os.O_CLOEXEC), os.open(entry, os.O_RDWR | os.O_CLOEXEC)
    raise OSError("the raylet does not show Ray's object store")


class RayPeers(Peers):
    """The other nodes' directories, found by their names. What Ray raises or delays is a miss."""

    def __init__(self, own_name: str, medium: RayMedium) -> None:
        import ray

        self._ray = ray
        self._own_name = own_name
        self._medium = medium
        self._actors: dict[str, Any] = {}
        threading.Thread(target=self._discover, name="ray-peers", daemon=True).start()

    def find(self, key: str, names: Sequence[bytes], timeout_s: float) -> set[bytes]:
        found: set[bytes] = set()
        for flags in self._ask_all(lambda actor: actor.find.remote(key, list(names)), timeout_s):
            found.update(name for name, flag in zip(names, flags, strict=True) if flag)
        return found

    def fetch(self, key: str, names: Sequence[bytes], timeout_s: float) -> BorrowedBlocks:
        borrowed = BorrowedBlocks({}, [])
        deadline_s = time.monotonic() + timeout_s
        for references, places in self._ask_all(lambda actor: actor.share.remote(key, list(names)), timeout_s / 2):
            try:
                objects = self._ray.get(references, timeout=max(0.001, deadline_s - time.monotonic()))
            except Exception as error:  # the boundary to Ray
                logger.warning("blocks of another node were not had: %r", error)
                continue
            borrowed.keeper.append((references, objects))
            arrays = [array for value in objects for array in value]
            for array, (position, header) in zip(arrays, places, strict=True):
                offset = self._medium.offset_of(array)
                if offset is not None:
                    borrowed.places.setdefault(names[position], (offset, header))
        return borrowed

    def _ask_all(self, ask: Callable[[Any], Any], timeout_s: float) -> list[Any]:
        """The answers that come in time."""
        pending = {}
        for name, actor in list(self._actors.items()):
            try:
                pending[name] = ask(actor)
            except Exception as error:  # the boundary to Ray
                logger.warning("directory %s is not asked: %r", name, error)
        answers = []
        deadline_s = time.monotonic() + timeout_s
        for name, reference in pending.items():
            try:
                answers.append(self._ray.get(reference, timeout=max(0.001, deadline_s - time.monotonic())))
            except Exception as error:  # the boundary to Ray: dead, slow, or gone
                logger.warning("directory %s gave no answer: %r", name, error)
                self._actors.pop(name, None)  # until it is seen again
        return answers

    def _discover(self) -> None:
        prefix = _actor_name("")
        while True:
            time.sleep(_PEERS_INTERVAL_S)
            try:
                names = {name for name in self._ray.util.list_named_actors() if name.startswith(prefix)} - {self._own_name}
                for name in names - self._actors.keys():
                    self._actors[name] = self._ray.get_actor(name, namespace=RAY_NAMESPACE)
                for name in self._actors.keys() - names:
                    self._actors.pop(name, None)
            except Exception as error:  # the boundary to Ray
                logger.warning("the other directories are not known: %r", error)


class Directory:
    """The actor: a DirectoryServer over this node's object store. Its methods are for the directories of other nodes."""

    def __init__(self, own_name: str, linger_s: float) -> None:
        import ray

        self._ray = ray
        self._medium = RayMedium()
        self._max_shared_bytes = int(self._medium.num_bytes * (1 - USABLE_FRACTION) / 2)
        self._share_turn = threading.Lock()  # whoever calls Ray for others
        self._server = DirectoryServer(self._medium, RayPeers(own_name, self._medium), linger_s, end=lambda: os._exit(0))

    def listen(self, address: bytes) -> None:
        """Be reached by engines that call the same Ray by this name. Raises OSError."""
        self._server.listen(address)

    def find(self, key: str, names: list[bytes]) -> bytes:
        """Which of these blocks are stored here."""
        with self._server.pinned(key, names) as (_, places):
            return bytes(place is not None for place in places)

    def share(self, key: str, names: list[bytes]) -> tuple[list[Any], list[tuple[int, bytes]]]:
        """References to new objects with those of these blocks that are here, up to a bound; for each its name's position and
        its header."""
        with self._server.pinned(key, names) as (block_bytes, places):
            found = [(position, place) for position, place in enumerate(places) if place]
            del found[self._max_shared_bytes // block_bytes :]
            if not found or not self._share_turn.acquire(timeout=_SHARE_TIMEOUT_S):  # Ray hangs
                return [], []
            try:
                num_per_object = max(1, _SHARED_OBJECT_BYTES // block_bytes)
                memory = self._medium.memory
                references = [
                    self._ray.put([memory[place.offset :][:block_bytes] for _, place in found[first : first + num_per_object]])
                    for first in range(0, len(found), num_per_object)
                ]
            finally:
                self._share_turn.release()
            return references, [(position, place.header) for position, place in found]


def _actor_name(node_id: str) -> str:
    return f"directory-{VERSION}-{os.geteuid()}-{node_id}"


def main(arguments: Sequence[str]) -> int:
    """Make the directory of this node, once Ray can be reached. One argument, JSON: address, node_ip, auth, linger_s.

    Ends when it has been made, when its standard input does (so does whoever started it), or after a failure, which it prints;
    Ray's end is one.
    """
    options = json.loads(arguments[0])
    threading.Thread(target=_end_with_input, daemon=True).start()
    os.environ.update(RAY_AUTH_MODE=options["auth"], RAY_USAGE_STATS_ENABLED="0")
    import ray  # takes a while; meanwhile Ray may come

    probe = _wait_reachable(options["address"])
    threading.Thread(target=_end_with_ray, args=(probe,), daemon=True).start()
    watchdog = threading.Timer(_INIT_TIMEOUT_S, lambda: _fail(f"Ray does not answer (auth: {options['auth']})"))
    watchdog.daemon = True
    watchdog.start()
    try:
        ray.init(
            address=options["address"],
            namespace=RAY_NAMESPACE,
            log_to_driver=False,
            logging_level=logging.CRITICAL,
            **({"_node_ip_address": options["node_ip"]} if options["node_ip"] else {}),
        )
        _make_actor(ray, options)
        ray.shutdown()
    except BaseException as error:  # the top of this program
        _fail(repr(error))
    return 0


def _make_actor(ray: Any, options: dict[str, Any]) -> None:
    """Raises what Ray raises."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = ray.get_runtime_context().get_node_id()
    name = _actor_name(node_id)
    actor_class = ray.remote(Directory).options(
        name=name,
        namespace=RAY_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=0,
        max_concurrency=16,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    )
    for attempt in range(_NUM_ATTEMPTS):
        actor = actor_class.remote(name, options["linger_s"])
        try:
            ray.get(actor.listen.remote(socket_address(options["address"], options["node_ip"])), timeout=_INIT_TIMEOUT_S)
            return
        except ray.exceptions.RayError:  # it is about to end, or just has: its name is free again soon
            if attempt == _NUM_ATTEMPTS - 1:
                raise
            time.sleep(_PROBE_INTERVAL_S)


def _wait_reachable(address: str) -> socket.socket:
    """A connection to Ray, which ends when Ray does."""
    host, _, port = address.rpartition(":")
    has_told = False
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=1.0)
        except OSError as error:
            if not has_told:
                print(f"no Ray at {address} ({error}); `ray start --head --port {port}` starts one", flush=True)
                has_told = True
            time.sleep(_PROBE_INTERVAL_S)


def _end_with_ray(probe: socket.socket) -> None:
    """Whatever still waits for that Ray does so for many seconds; the program that comes after this one waits for the next."""
    probe.settimeout(None)
    with contextlib.suppress(OSError):
        while probe.recv(4096):
            pass
    _fail("Ray has ended")


def _end_with_input() -> None:
    while os.read(0, 4096):  # not sys.stdin, whose lock the interpreter wants when it ends
        pass
    os._exit(0)


def _fail(reason: str) -> None:
    print(" ".join(reason.split()), flush=True)
    os._exit(1)


if __name__ == "__main__":
    from connectors.ray.directory import main as run  # the actor's class is to belong to the module, not to this program

    sys.exit(run(sys.argv[1:]))
