"""The `shm` connector: a pool of blocks in the host's shared memory, used by all engines of one user, gone with the last of them.

Blocks are copied between the pool and the engine's own memory, so that an engine's death cannot hurt another's KV.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connectors.byte_sizes import check_capacity, readable_bytes, with_parsed_sizes
from connectors.coding.block_coding import SLOT_CODECS, CodingOptions
from connectors.slots.available_memory import available_bytes
from connectors.slots.browser import SlotBrowser
from connectors.slots.connector import SlotConnector
from connectors.slots.eviction_policy import check_eviction_policy
from connectors.slots.index import SlotIndex, take_lease_number
from connectors.slots.index_file import FORMAT_VERSION
from connectors.slots.memory_pool import MemoryIndexFile, MemoryLease, MemoryMedium, PoolDescriptors, is_memory_lease_alive
from connectors.slots.pool_members import PoolMember, find_pool, has_members, joining, names_in_use, pools_with_members
from connectors.slots.store import SlotLayout, SlotStore, StoredLayout, num_slots_within, slot_bytes, warn_of_other_capacity
from connectors.store_browser import StoreBrowser
from core.clock import Clock
from core.config import options_from_mapping
from core.errors import ConfigError, ConnectorError
from core.kv.connector import KVConnector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShmOptions:
    """name: engines of one user and network namespace with the same name and KV layout share a pool of blocks.

    capacity_bytes bounds one such pool (a size like 2GiB is fine), all of which is soon taken; who joins a pool in use takes its
    capacity. num_threads copy at the same time. eviction: lru, arc (scans do not push out what is used again) or prefix (never a
    block that a stored one follows); processes should agree on it. codec: none, or int8 or fp8, which are lossy: they nearly
    halve slots, and of 24 greedy answers of 32 tokens they changed 7 and 12 (bench/RESULTS.md).
    """

    name: str = "default"
    capacity_bytes: int = 1024**3
    num_threads: int = 2
    eviction: str = "lru"
    codec: str = "none"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}", self.name):
            raise ConfigError("connector.options.name", self.name, "1 to 64 letters, digits, '_', '-', '.'")
        if not 1 <= self.num_threads <= 16:
            raise ConfigError("connector.options.num_threads", self.num_threads, "1 to 16")
        check_eviction_policy(self.eviction)
        check_capacity(self.capacity_bytes)


class ShmConnector(SlotConnector):
    """Joins the pool of its name and layout, or creates it."""

    name = "shm"
    _starts_without_store = True  # when its other members are stopped: it joins once they go on

    def __init__(self, options: ShmOptions, clock: Clock) -> None:
        super().__init__(clock, options.num_threads, CodingOptions(options.codec).check(SLOT_CODECS))
        self._options = options

    def _open_store(self, layout: SlotLayout) -> SlotStore:
        return MemoryPools(self._options.name, self._options.capacity_bytes, self._options.eviction).open(layout)


@dataclass(frozen=True, slots=True)
class MemoryPools:
    """The pools of one name, one for each layout. capacity_bytes: of one that is made anew."""

    name: str
    capacity_bytes: int
    eviction: str = "lru"

    @property
    def _prefix(self) -> str:
        return f"{_prefix_of_user()}{self.name}-"

    def layouts(self) -> tuple[list[StoredLayout], list[str]]:
        """Of the pools that processes have open, and in words those that cannot be joined."""
        found: list[StoredLayout] = []
        problems: list[str] = []
        for pool in pools_with_members(self._prefix):
            try:
                with joining(pool):
                    descriptors = find_pool(pool, 2)
                if descriptors:
                    with contextlib.closing(PoolDescriptors(*descriptors)) as opened:
                        found.append(opened.read_layout())
            except (OSError, ConnectorError) as error:
                problems.append(f"the pool {pool}: {error}")
        return found, problems

    def open(self, layout: SlotLayout, *, create: bool = True) -> SlotStore:
        """Join the pool of this layout, or with `create` make it where there is none.

        Raises OSError (FileNotFoundError where there is none), ConnectorError or ConfigError.
        """
        if sys.platform != "linux":
            raise ConnectorError("the shm store needs Linux (memfd_create, SCM_RIGHTS)")
        pool = f"{self._prefix}{layout.fingerprint[:8].hex()}"  # fits into a socket's 107 bytes
        with joining(pool):
            found = find_pool(pool, 2)
            if found:
                try:
                    store = _open_pool(pool, PoolDescriptors(*found), layout, self.eviction)
                    if create and store.index.file.num_slots != num_slots_within(self.capacity_bytes, layout):
                        found_bytes = store.index.file.num_slots * slot_bytes(layout)
                        warn_of_other_capacity(f"the pool {self.name}", found_bytes, self.capacity_bytes)
                    return store
                except ConnectorError as error:
                    logger.warning("the pool %s is given up for a new one: %s", pool, str(error))
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no process has this pool open", pool)
            return _open_pool(pool, self._create(pool, layout), layout, self.eviction)

    def _create(self, pool: str, layout: SlotLayout) -> PoolDescriptors:
        num_slots = num_slots_within(self.capacity_bytes, layout)
        if num_slots < 1:
            needed = f"room for a block of {slot_bytes(layout)} bytes and its index"
            raise ConfigError("connector.options.capacity_bytes", self.capacity_bytes, needed)
        free_bytes = available_bytes()
        if free_bytes is not None and free_bytes < self.capacity_bytes:
            allowed = f"at most the {readable_bytes(free_bytes)} of memory that are free here, this container's limit included"
            raise ConfigError("connector.options.capacity_bytes", self.capacity_bytes, allowed)
        return PoolDescriptors.create(pool, layout, num_slots)


@dataclass(frozen=True, slots=True)
class PoolsInUse(MemoryPools):
    """For visitors: a pool of their own would be gone when they leave."""

    def layouts(self) -> tuple[list[StoredLayout], list[str]]:
        """As the base says. Raises FileNotFoundError where nobody uses a pool of this name, with those that somebody uses."""
        found, problems = MemoryPools.layouts(self)
        if not found and not problems:
            names = ", ".join(names_in_use(_prefix_of_user()))
            others = f"; those in use, by option name: {names}" if names else ", nor any other"
            raise FileNotFoundError(f"no process of this user and network namespace uses a pool {self.name}{others}")
        return found, problems

    def open(self, layout: SlotLayout, *, create: bool = False) -> SlotStore:
        """Join the pool of this layout. Raises as the base does."""
        try:
            return MemoryPools.open(self, layout, create=False)
        except FileNotFoundError as error:
            if not create:
                raise
            raise ConnectorError(f"nobody uses a pool {self.name} of this layout: what is written would go at once") from error


def _prefix_of_user() -> str:
    return f"kvrelay{FORMAT_VERSION}-{os.getuid()}-"  # processes of another version have pools of their own


def _open_pool(pool: str, descriptors: PoolDescriptors, layout: SlotLayout, eviction: str) -> SlotStore:
    """Become a member; the descriptors are the store's to close. The caller holds joining().

    Raises OSError, or ConnectorError for a pool that is damaged and therefore retired.
    """
    undo = contextlib.ExitStack()
    with undo:
        undo.callback(descriptors.close)
        try:
            file = MemoryIndexFile(descriptors.index, layout)
            undo.callback(file.close)
            medium = MemoryMedium(descriptors.slots, layout, file.num_slots)
            if not file.is_sane():
                raise ConnectorError("its index has words in its header that no writer leaves")
            number = take_lease_number(file)
            while is_memory_lease_alive(descriptors.index, number):  # the word that counts them was damaged
                number = take_lease_number(file)
            lease = MemoryLease(descriptors.index, number)
            undo.callback(lease.release)
            is_alive = functools.partial(is_memory_lease_alive, descriptors.index)
            index = SlotIndex(file, number, is_alive, medium.grow, 1, eviction)
            index.recover(is_alone=False)
        except ConnectorError:
            descriptors.retire()
            raise
        member = PoolMember(pool, (descriptors.index, descriptors.slots), file.is_intact)
        undo.pop_all()

    def leave() -> None:
        member.close()
        lease.release()
        descriptors.close()

    def stop_sharing() -> bool:
        with joining(pool):  # of several that leave at once, the last one sees nobody
            member.close()
            return not has_members(pool)

    store = SlotStore(index, medium, leave)
    store.stop_sharing = stop_sharing
    return store


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see ShmOptions. Raises ConfigError."""
    return ShmConnector(_parse(options), clock)


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """The pools of this name, of all layouts, that somebody uses. Raises ConfigError or ConnectorError."""
    parsed = _parse(options)
    return SlotBrowser(PoolsInUse(parsed.name, parsed.capacity_bytes), ends_with_its_users=True)


def _parse(options: Mapping[str, Any]) -> ShmOptions:
    sized = with_parsed_sizes(options, ("capacity_bytes",), "connector.options")
    parsed: ShmOptions = options_from_mapping(ShmOptions, sized, "connector.options")
    return parsed
