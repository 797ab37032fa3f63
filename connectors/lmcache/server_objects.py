"""Objects in an `lmcache server`, which the processes of a host share.

Reads and writes go straight to and from the server's memory; requests only say where. Whatever fails in time loses the link, and
the next look at the store makes another one. Names of objects, and which there are: server_link.py and server_index.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from connectors.lmcache.object_directory import StoredObject
from connectors.lmcache.object_store import Bytes, ObjectStore, Reading
from connectors.lmcache.server_index import ServerIndex, no_directory
from connectors.lmcache.server_link import ServerLink, ServerLostError
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block
from core.clock import Clock
from core.kv.layout import KVLayout

_POOL_SHARE = 0.7  # the server begins to evict, objects of all tenants and without regard to prefixes, at 0.8
_OBJECTS_PER_BATCH = 16
_OBJECTS_PER_STEP = 4
_RETRY_PAUSE_S = 0.5
_CONNECT_TIMEOUT_S = 1.0
_TAKEN_TIMEOUT_S = 1.0  # for another process to finish what it writes
_TAKEN_PAUSE_S = 0.01
_FULL_AFTER_S = 0.05  # what another process writes has arrived by then, mostly
_ROOM_FACTOR = 4  # free memory may be in pieces
_FULL_PERIOD_S = 30.0  # how long a store keeps within what fitted when the server was full


class ServerObjects(ObjectStore):
    """The objects of one KV layout in a server. Connects when it is first looked at, and anew when the server was lost.

    capacity_bytes: 0 for a share of the server's memory.
    """

    def __init__(
        self,
        address: str,
        http_address: str,
        namespace: str,
        layout: KVLayout,
        capacity_bytes: int,
        op_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._address, self._http_address, self._op_timeout_s, self._clock = address, http_address, op_timeout_s, clock
        self._fingerprint = layout.fingerprint
        self._name = f"{namespace}-{layout.fingerprint.hex()}"
        self._block_bytes = layout.block_bytes
        self.unit_bytes = BLOCK_HEADER_BYTES + layout.block_bytes
        self._max_capacity_bytes = self.capacity_bytes = capacity_bytes
        self._is_capacity_given = capacity_bytes > 0
        self._full_until_s = float("-inf")
        self._mutex = threading.Lock()  # of connecting
        self._link: ServerLink | None = None
        self._tried_s = float("-inf")
        self.why_away = "not connected yet"
        self.directory = no_directory()

    # -- the connection ------------------------------------------------------------------------------------------------
    def refresh(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """As the interface says; connects, where that is due."""
        link = self._link
        if link is not None and link.is_current():
            return self.directory.refresh()
        has_tried = self._tried_s > float("-inf")
        if not self._mutex.acquire(blocking=link is not None or not has_tried):
            return [], []  # somebody is at it
        try:
            if self._link is not None and self._link.is_current():
                return self.directory.refresh()
            went = self._disconnect("the server was started anew, or has ended")
            self._connect()
            came, _none = self.directory.refresh()
            return came, went
        finally:
            self._mutex.release()

    def _connect(self) -> None:
        if time.monotonic() - self._tried_s < _RETRY_PAUSE_S:
            return
        try:
            timeout_s = min(self._op_timeout_s, _CONNECT_TIMEOUT_S)
            link = ServerLink(self._address, self._http_address, f"kvrelay-{self._name}", self.unit_bytes, timeout_s)
            try:
                self.index = ServerIndex(link.pool_name, link.inode, self._name)
            except OSError:
                link.close()
                raise
            link.timeout_s = self._op_timeout_s
            if not self._is_capacity_given:
                self._max_capacity_bytes = self.capacity_bytes = int(link.pool_bytes * _POOL_SHARE)
            self.directory = self.index.directory
            self._link, self.why_away = link, None
        except (ServerLostError, OSError) as error:
            self.why_away = str(error)
        finally:
            self._tried_s = time.monotonic()

    def _disconnect(self, reason: str) -> list[bytes]:
        """Blocks that are out of reach now. With the mutex held."""
        link, self._link = self._link, None
        if link is None:
            return []
        self.why_away = self.why_away or reason
        self.num_faults += 1
        went, self.directory = self.directory.block_hashes(), no_directory()
        link.close()
        return went

    def _lose(self, link: ServerLink, error: ServerLostError) -> None:
        """The next look at the store connects anew."""
        link.is_lost = True
        self.why_away = str(error)

    def close(self) -> None:
        """As the interface says."""
        with self._mutex:
            self._disconnect("the connector is closed")

    # -- writing -------------------------------------------------------------------------------------------------------
    def batches(self, objects: Sequence[StoredObject]) -> Iterator[Sequence[StoredObject]]:
        """As the interface says."""
        for start in range(0, len(objects), _OBJECTS_PER_BATCH):
            yield objects[start : start + _OBJECTS_PER_BATCH]

    def write(
        self,
        batch: Sequence[StoredObject],
        fill: Callable[[Sequence[tuple[StoredObject, Bytes]]], None],
        should_stop: Callable[[], bool],
    ) -> list[StoredObject]:
        """As the interface says."""
        link, stored_now = self._link, list[StoredObject]()
        if link is None:
            return stored_now
        try:
            taken = self._write_new(link, batch, fill, should_stop, stored_now)
            if taken:
                self._settle(link, taken, fill, should_stop, stored_now)
        except ServerLostError as error:
            self._lose(link, error)
        self.index.add(stored.name for stored in stored_now)
        if self._clock.now_s() > self._full_until_s:
            self.capacity_bytes = self._max_capacity_bytes
        return stored_now

    def _write_new(
        self,
        link: ServerLink,
        batch: Sequence[StoredObject],
        fill: Callable[[Sequence[tuple[StoredObject, Bytes]]], None],
        should_stop: Callable[[], bool],
        stored_now: list[StoredObject],
    ) -> list[StoredObject]:
        """Write what the server takes; those that it does not take now."""
        started = [(stored, key := link.key(stored), link.start_store(key, stored.num_blocks)) for stored in batch]
        taken, finishing = [], []
        for start in range(0, len(started), _OBJECTS_PER_STEP):  # the server finishes these while the next are filled
            views = []
            for stored, key, future in started[start : start + _OBJECTS_PER_STEP]:
                view = link.view(link.wait(future, should_stop).context)
                if view is None:
                    taken.append(stored)
                    link.end_session(key)
                else:
                    views.append((stored, view, key))
            fill([(stored, view) for stored, view, _ in views])
            finishing += [(stored, key, link.finish_store(key, stored.num_blocks)) for stored, _, key in views]
        for stored, key, future in reversed(finishing):  # a prefix' head was used last
            if link.wait(future, should_stop):
                stored_now.append(stored)
            link.end_session(key)
        return taken

    def _settle(
        self,
        link: ServerLink,
        taken: Sequence[StoredObject],
        fill: Callable[[Sequence[tuple[StoredObject, Bytes]]], None],
        should_stop: Callable[[], bool],
        stored_now: list[StoredObject],
    ) -> None:
        """What was not taken is there already, is being written, is there and damaged, or there is no room."""
        started_s, has_made_room = time.monotonic(), False
        while True:
            with self._reading(link, self._start_lookups(link, taken), should_stop) as views:
                good = [stored for stored, view in views.items() if self._is_good(stored, view)]
                bad = [stored for stored in views if stored not in good]
            stored_now += good
            if bad:
                link.delete(bad)
            taken = [stored for stored in taken if stored not in good]
            taken = self._write_new(link, taken, fill, should_stop, stored_now) if taken else []
            passed_s = time.monotonic() - started_s
            if not taken or should_stop() or passed_s > min(_TAKEN_TIMEOUT_S, self._op_timeout_s):
                return
            if passed_s > _FULL_AFTER_S and not has_made_room:
                has_made_room, num_blocks = True, sum(stored.num_blocks for stored in taken)
                if link.free_bytes() < _ROOM_FACTOR * num_blocks * self.unit_bytes:  # else somebody else writes them, or died
                    self._make_room(link, num_blocks, should_stop)
            time.sleep(_TAKEN_PAUSE_S)

    def _make_room(self, link: ServerLink, num_blocks: int, should_stop: Callable[[], bool]) -> None:
        """The server is full, of objects of others perhaps, and has not told what it evicted: forget that, which is the oldest,
        and remove what is next. Files of the index are the message to whoever looks at it next."""
        oldest = [StoredObject(name) for name in self.directory.pick_oldest(self.directory.num_blocks, ())]
        num_kept, num_free = self.directory.num_blocks, 0
        for start in range(0, len(oldest), _OBJECTS_PER_BATCH):
            batch = oldest[start : start + _OBJECTS_PER_BATCH]
            with self._reading(link, self._start_lookups(link, batch), should_stop) as views:
                present = [stored for stored in batch if stored in views]
            removed = [stored for stored in batch if stored not in present]
            for stored in present:
                if num_free < num_blocks:
                    num_free += stored.num_blocks
                    removed.append(stored)
            if present:
                link.delete(removed)
            self.index.remove(stored.name for stored in removed)
            num_kept -= sum(stored.num_blocks for stored in removed)
            if num_free >= num_blocks:
                break
        self.capacity_bytes = max(self.unit_bytes, (num_kept + num_blocks) * self.unit_bytes)
        self._full_until_s = self._clock.now_s() + _FULL_PERIOD_S

    def _is_good(self, stored: StoredObject, view: Bytes) -> bool:
        for number, name in enumerate(stored.block_hashes):
            unit = view[number * self.unit_bytes : (number + 1) * self.unit_bytes]
            header = unit[:BLOCK_HEADER_BYTES].tobytes()
            if check_block(header, unit[BLOCK_HEADER_BYTES:].data, self._fingerprint, name) is not BlockCheck.OK:
                return False
        return True

    # -- reading -------------------------------------------------------------------------------------------------------
    def read_steps(self, objects: Sequence[StoredObject]) -> Generator[Reading, None, None]:
        """As the interface says."""
        link, ahead = self._link, None
        try:
            for start in range(0, len(objects) if link is not None else 0, _OBJECTS_PER_STEP):
                batch = objects[start : start + _OBJECTS_PER_STEP]
                current, ahead = ahead, Reading(batch, [link, *self._start_lookups(link, batch)])
                if current is not None:
                    yield current
            current, ahead = ahead, None
            if current is not None:
                yield current
        except ServerLostError as error:
            assert link is not None
            self._lose(link, error)
        finally:
            if ahead is not None:
                for _stored, key, _future in ahead.handles[1:]:
                    ahead.handles[0].give_up_lookup(key)

    def _start_lookups(self, link: ServerLink | None, batch: Sequence[StoredObject]) -> list[Any]:
        assert link is not None
        return [(stored, key := link.key(stored), link.start_lookup(key, stored.num_blocks)) for stored in batch]

    @contextlib.contextmanager
    def reading(self, started: Reading, should_stop: Callable[[], bool]) -> Iterator[dict[StoredObject, Bytes] | None]:
        """As the interface says."""
        link, lookups = started.handles[0], started.handles[1:]
        with contextlib.ExitStack() as stack:
            try:
                views = stack.enter_context(self._reading(link, lookups, should_stop))
            except ServerLostError as error:
                self._lose(link, error)
                yield None
            else:
                yield views
                views.clear()

    @contextlib.contextmanager
    def _reading(
        self, link: ServerLink, lookups: Sequence[Any], should_stop: Callable[[], bool]
    ) -> Iterator[dict[StoredObject, Bytes]]:
        """Raises ServerLostError."""
        views: dict[StoredObject, Bytes] = {}
        held: list[tuple[StoredObject, Any]] = []
        for _stored, _key, future in lookups:
            link.wait(future, should_stop)
        try:
            counts = [(stored, key, link.start_lookup_result(key)) for stored, key, _ in lookups]
            found = [(stored, key) for stored, key, future in counts if self._lookup_result(link, key, future, should_stop)]
            retrieving = [(stored, key, link.start_retrieve(key, stored.num_blocks)) for stored, key in found]
            for stored, key, future in retrieving:
                response = link.wait(future, should_stop)
                view = link.view(response.context) if response.success else None
                if view is not None:
                    held.append((stored, key))
                    views[stored] = view
            yield views
        finally:
            for stored, key in held:
                link.finish_retrieve(key, stored.num_blocks)
            for _stored, key, _future in reversed(lookups):  # a prefix' head was used last
                link.end_session(key)

    def _lookup_result(self, link: ServerLink, key: Any, future: Any, should_stop: Callable[[], bool]) -> bool:
        """Whether the object is in the server's memory; it may have to come from a tier below that."""
        deadline_s = time.monotonic() + self._op_timeout_s
        while (count := link.wait(future, should_stop)) is None:
            if time.monotonic() > deadline_s or should_stop():
                raise ServerLostError("a lookup did not end in time")
            time.sleep(0.001)
            future = link.start_lookup_result(key)
        return bool(count)

    def is_whole(self, stored: StoredObject) -> bool:
        """What the server does not find, it has evicted."""
        return False

    def delete(self, names: Sequence[bytes]) -> None:
        """As the interface says. What somebody reads at the moment stays in the server, which will evict it."""
        link = self._link
        if link is None or not names:
            return
        self.index.remove(names)
        try:
            link.delete([StoredObject(name) for name in names])
        except ServerLostError as error:
            self._lose(link, error)

    def tidy(self) -> None:
        """Nothing is left to do later."""
