"""A connector's store over time: opened at start, lost when its medium goes, opened again, closed when its last user leaves.

What a store holds and how blocks move is the connector's business; how one is opened is handed in.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
from collections.abc import Callable, Iterator

from connectors.slots.store import SlotStore
from core.clock import Clock
from core.errors import ConfigError, ConnectorError

logger = logging.getLogger(__name__)

REOPEN_PAUSE_S = 1.0
_CLOSE_MUTEX_TIMEOUT_S = 1.0
_CONFIGURATION_FAULTS = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)


class StoreHolder:
    """Any thread may read `store` and call using().

    A store that fails its integrity check (removed, cut) is dropped and opened again, at most once per REOPEN_PAUSE_S; until then
    there is none.
    """

    def __init__(self, name: str, clock: Clock, open_store: Callable[[], SlotStore], on_opened: Callable[[], None]) -> None:
        """name: the connector's, for messages. open_store raises OSError, ConnectorError or ConfigError."""
        self._name = name
        self._clock = clock
        self._open_store = open_store
        self._on_opened = on_opened
        self._mutex = threading.Lock()  # of the six below
        self.store: SlotStore | None = None
        self.num_errors = 0
        self.num_past_evictions = 0  # of stores that were lost or closed
        self.why_closed = "not opened yet"
        self._reopen_at_s = clock.now_s()
        self._fault = ""  # the last that was logged of opening the store
        self._is_closing = False

    def open_first(self, *, may_wait: bool) -> None:
        """At start. may_wait: go on without a store where its medium is broken, and try it again.

        Raises ConnectorError, also when waiting would not help, or ConfigError.
        """
        try:
            self.store = self._open_store()
        except OSError as error:
            if not may_wait or error.errno in _CONFIGURATION_FAULTS:
                raise ConnectorError(f"the {self._name} store cannot be opened: {error}") from error
            self._note_unopened(error)

    def begin_closing(self) -> None:
        """Open none any more."""
        self._is_closing = True

    def close(self, *, is_unused: bool) -> None:
        """Let go of the store. is_unused: all threads have ended; else the one that hangs in it closes it when it comes back."""
        has_mutex = self._mutex.acquire(timeout=_CLOSE_MUTEX_TIMEOUT_S)
        try:
            store, self.store = self.store, None
        finally:
            if has_mutex:
                self._mutex.release()
        if store is None:
            return
        self.num_past_evictions += store.index.num_evictions
        try:
            if is_unused:
                store.close()
                return
            store.abandon()
        except OSError as error:
            logger.warning("the %s store was left behind: %s", self._name, str(error))
        store.is_retired = True

    def count_error(self) -> None:
        """A transfer failed."""
        with self._mutex:
            self.num_errors += 1

    @contextlib.contextmanager
    def using(self) -> Iterator[SlotStore | None]:
        """The store, opened again if it was lost; it is not closed before its last user leaves."""
        with self._mutex:
            store = self._intact_store()
            if store is not None:
                store.num_users += 1
        try:
            yield store
        finally:
            if store is not None:
                with self._mutex:
                    store.num_users -= 1
                    self._close_if_unused(store)

    def _intact_store(self) -> SlotStore | None:
        if self.store is not None and self.store.is_intact():
            return self.store
        if self.store is not None:
            self._drop(self.store)
        if self._is_closing or self._clock.now_s() < self._reopen_at_s:
            return None
        try:
            self.store = self._open_store()
            self._on_opened()
            if self._fault:
                logger.warning("the %s store is open again", self._name)
                self._fault = ""
        except (OSError, ConnectorError, ConfigError) as error:  # the last: no longer is there room for the capacity
            self._reopen_at_s = self._clock.now_s() + REOPEN_PAUSE_S
            self._note_unopened(error)
        if self._is_closing and self.store is not None:  # closed meanwhile, by somebody who did not want to wait
            opened, self.store = self.store, None
            opened.is_retired = True
            self._close_if_unused(opened)
        return self.store

    def _drop(self, lost: SlotStore) -> None:
        if lost.is_read_only:
            logger.warning("the %s store was only read until now, and is opened anew", self._name)
        else:
            logger.error("the %s store was removed or cut and is opened anew", self._name)
        self.store = None
        with contextlib.suppress(OSError):
            lost.discard_if_unreadable()
        lost.is_retired = True
        self.num_errors += not lost.is_read_only
        self.num_past_evictions += lost.index.num_evictions
        self._close_if_unused(lost)

    def _note_unopened(self, error: Exception) -> None:
        """Log a fault once, not at each attempt."""
        self.num_errors += 1
        reason = error.strerror if isinstance(error, OSError) else None  # which names no path, unlike str(error)
        self.why_closed = f"it cannot be opened: {reason or 'see the log of the node'}"
        if str(error) != self._fault:
            self._fault = str(error)
            logger.error("the %s store cannot be opened and is tried again: %s", self._name, str(error))

    def _close_if_unused(self, store: SlotStore) -> None:
        if store.is_retired and store.num_users == 0:
            with contextlib.suppress(OSError):
                store.close()
