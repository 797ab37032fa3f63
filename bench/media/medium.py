"""What the benchmark of connectors asks of a store: how to open one, and how fast its raw medium is, past the connector.

One module per store, of the store's name, with create_medium(folder, block_bytes).
"""

from __future__ import annotations

import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from core.kv.connector import KVConnector, TransferDirection

HOST = "127.0.0.1"
BYTES_PER_ROUND = 96 * 1024 * 1024


class Medium(ABC):
    """A store to be measured, and the limit of what it stands on."""

    bytes_per_round = BYTES_PER_ROUND  # moved in each direction, by the connector and past it
    num_warmup_rounds = 1
    reopen_s: float | None = None  # how long make_known took to open a store that outlives its processes

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The connector's."""

    def before_load(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:  # noqa: B027 - most need nothing
        """These were saved and will be loaded: what is to be done for it to be the load that is meant."""

    @abstractmethod
    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        """Move about num_bytes in blocks past the connector; GB/s."""

    @abstractmethod
    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        """Have the connector believe that the store holds these."""

    def hang(self, connector: KVConnector) -> bool:
        """Make whatever the connector waits for hang: its server, or the holder of a lock. False: there is no such thing."""
        return False

    def resume(self) -> None:  # noqa: B027 - as for hang
        """The end of that."""

    @abstractmethod
    def empty(self) -> None:
        """Remove all blocks."""

    @abstractmethod
    def close(self) -> None:
        """End what was started."""


class HungLockHolder:
    """Holds the flock of an open file, as another process that was stopped in the middle of a change would."""

    def __init__(self, descriptor: int) -> None:
        self._own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        fcntl.flock(self._own, fcntl.LOCK_EX)

    def end(self) -> None:
        """Let go."""
        os.close(self._own)
