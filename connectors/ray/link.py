"""The link to the directory of this Ray node: has one made where none listens, and notes what its answers say of the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from connectors.byte_sizes import readable_bytes
from connectors.known_blocks import KnownBlocks
from connectors.ray.client import DirectoryConnection, DirectoryDoor, DirectoryStarter
from connectors.ray.messages import Operation, StoreStatus, pack_names
from connectors.ray.slabs import USABLE_FRACTION
from connectors.store_link import StoreLink
from core.errors import ConnectorError

logger = logging.getLogger(__name__)


class RayLink(StoreLink[DirectoryConnection]):
    """on_lost: called when the directory may have ended. Close the door after stop()."""

    name: ClassVar[str] = "ray"
    max_retry_s: ClassVar[float] = 0.1  # to see a directory that has just been made; an attempt costs nothing

    def __init__(
        self,
        door: DirectoryDoor,
        starter: DirectoryStarter,
        known: KnownBlocks,
        batch_size: int,
        on_news: Callable[[], None],
        on_lost: Callable[[], None],
        wanted_bytes: int,
    ) -> None:
        """wanted_bytes: how large a store may be, if Ray has room for it."""
        super().__init__(known, batch_size, on_news)
        self._door = door
        self._starter = starter
        self._on_lost = on_lost
        self._wanted_bytes = wanted_bytes
        self._has_told_limit = False
        self._last_status: StoreStatus | None = None

    @property
    def status(self) -> StoreStatus:
        """What the directory said last. Any thread."""
        return self._last_status or StoreStatus()

    def note_status(self, status: StoreStatus) -> None:
        """Take the status of an answer, from any connection. An epoch ends when blocks have gone since the last."""
        with self._condition:
            last, self._last_status = self._last_status, status
            num_lost = status.num_evicted - last.num_evicted if last is not None else 0
            self.num_evictions += max(0, num_lost)
            has_lost = num_lost > 0 or (last is not None and status.num_blocks < last.num_blocks)
        if has_lost:
            self._known.begin_epoch()

    def close(self, timeout_s: float) -> bool:
        """As the base says."""
        has_ended = super().close(timeout_s)
        if has_ended:
            self._starter.stop()
        return has_ended

    def _connect(self) -> DirectoryConnection:
        try:
            connection = self._door.open()
        except ConnectionRefusedError as error:  # nobody listens
            self._starter.ensure()
            raise ConnectorError(self._starter.why_absent) from error
        self._starter.stop()
        self._starter.last_failure = ""
        with self._condition:
            self._last_status = None
        self._known.begin_epoch()
        self.note_status(connection.status)
        self._tell_limit(connection.medium_bytes, connection.status.capacity_bytes)
        return connection

    def _tell_limit(self, medium_bytes: int, used_bytes: int) -> None:
        """Once: a store that Ray has no room for is smaller than its options say."""
        if self._has_told_limit or self._wanted_bytes <= medium_bytes * USABLE_FRACTION:
            return
        self._has_told_limit = True
        logger.warning(
            "ray: capacity_bytes is %s, but Ray's object store on this host has %s: the store holds at most %s"
            " (`ray start --object-store-memory BYTES` gives it more)",
            *map(readable_bytes, (self._wanted_bytes, medium_bytes, used_bytes)),
        )

    def _lost(self) -> None:
        self._on_lost()

    def _streams(self, connection: DirectoryConnection) -> Iterable[DirectoryConnection]:
        return (connection,)

    def _look_up(self, connection: DirectoryConnection, block_hashes: Sequence[bytes]) -> bytes:
        flags, status = connection.stream.ask(Operation.LOOKUP, pack_names(block_hashes), len(block_hashes))
        self.note_status(status)
        return flags

    def _ask_status(self, connection: DirectoryConnection) -> None:
        self._look_up(connection, ())
