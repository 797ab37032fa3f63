"""The interface between an engine and a KV store, and the values that cross it.

Everything that every store would have to do alike (pins, deadlines, single flight, retries, accounting) lives once, in the
engine's TransferLedger. A connector finds blocks by hash and moves bytes.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.kv.pool_memory import KVPoolMemory


class TransferDirection(enum.Enum):
    """LOAD: store to pool. SAVE: pool to store."""

    LOAD = "load"
    SAVE = "save"


class TransferOutcome(enum.Enum):
    """How a transfer ended. Anything but OK means that blocks after the first `num_blocks_ok` were not moved."""

    OK = "ok"
    MISS = "miss"  # the store no longer has the block, or has no room for it
    CORRUPT = "corrupt"  # bytes were there, but header, hash or checksum did not match
    ERROR = "error"  # the medium failed
    TIMEOUT = "timeout"  # the deadline passed; set by the ledger, or by a connector that gave up in time
    CANCELLED = "cancelled"  # the connector was closed first


@dataclass(frozen=True, slots=True)
class PrefixLookup:
    """A request's question to a store: the hashes of all full blocks of its tokens, first to last, of block_size tokens each.

    sources: kv_address of nodes that have computed some of them, where blocks stay with the node that saved them.
    """

    request_id: str
    block_hashes: Sequence[bytes]
    block_size: int
    sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One movement of blocks: pool block block_ids[i] holds, or shall hold, the content named block_hashes[i].

    transfer_id is unique for the life of the engine. deadline_s is on the engine's clock: a connector may give up then; the
    ledger does in any case, and keeps the blocks pinned until the connector has reported.
    """

    transfer_id: int
    direction: TransferDirection
    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    deadline_s: float


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A connector's last word on a transfer: the first num_blocks_ok blocks are moved and verified, the rest are not.

    moved_bytes counts payload that crossed the medium (a save of a block that the store already holds moves none); duration_s
    is the time from start_load / start_save to the end on the connector's side, queueing included (0: not measured). wants_save:
    a faster or nearer part of the store lacks these loaded blocks and would like them saved, when convenient.
    """

    transfer_id: int
    num_blocks_ok: int
    outcome: TransferOutcome
    moved_bytes: int = 0
    detail: str = ""
    duration_s: float = 0.0
    wants_save: bool = False


@dataclass(frozen=True, slots=True)
class TierStats:
    """One of several stores behind a connector. num_hit_blocks: loaded from it since the connector's start."""

    name: str
    is_reachable: bool
    store_blocks: int
    num_hit_blocks: int


@dataclass(frozen=True, slots=True)
class ConnectorStats:
    """What a store holds, as far as this connector knows; evictions and errors are since its start."""

    store_bytes: int = 0
    store_blocks: int = 0
    capacity_bytes: int = 0
    num_evictions: int = 0
    num_errors: int = 0
    is_reachable: bool = True  # False while the store is known to be away: everything is a miss
    why_unreachable: str = ""  # in words that anybody may read: no paths, no addresses; "" where only the log says it
    num_open_references: int = 0  # slots being written, pins, leases: 0 when nothing is in flight
    tiers: tuple[TierStats, ...] = ()  # empty for a single store


class KVConnector(ABC):
    """A store of KV blocks, addressed by block hash.

    The engine calls every method from its step thread, except close(), which may come from any thread once stepping has ended. No
    method may block on the medium or raise for its faults; the ledger treats an exception as a failed call.

    Trust: a connector hands over a block only when its header, its hash and its checksum match what was asked for. It never
    invents keys: the block hash is the key, and already holds model, layout, salt and adapter.
    """

    name: str

    # Called without arguments after a result became available to poll_transfers, or the answer to a lookup that was None, so that
    # an idle engine wakes up. Set by the engine, if at all, before the first transfer. Comes from a thread of the connector's: it
    # must be quick and not call back.
    on_result: Callable[[], None] | None = None

    # Where blocks stay with the node that saved them: HOST:PORT at which other nodes get them, known after register_kv_cache. ""
    # where all nodes share one store.
    kv_address: str = ""

    # A secret that the nodes of a cluster share, and nobody else has; b"" without keys. Set before register_kv_cache, if at all.
    cluster_secret: bytes = b""

    # -- scheduler half ------------------------------------------------------------------------------------------------
    @abstractmethod
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """How many tokens after num_computed_tokens (a multiple of block_size) the store can supply without a hole.

        Always a multiple of block_size. None: not known yet, ask again next step. Bounded: p99 under 200 us at a million known
        blocks, whatever state the medium is in. The first call for a request starts whatever the answer needs.
        """

    # -- worker half ---------------------------------------------------------------------------------------------------
    @abstractmethod
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Give the connector the pool that transfers read and write. Called once, before any other method."""

    @abstractmethod
    def start_load(self, transfer: Transfer) -> None:
        """Begin to fill the transfer's blocks. The ledger guarantees that nobody else reads or writes them until the result."""

    @abstractmethod
    def start_save(self, transfer: Transfer) -> None:
        """Begin to store the transfer's blocks. Their content does not change until the result. Blocks already stored are
        touched (kept from eviction), not written again."""

    @abstractmethod
    def poll_transfers(self) -> list[TransferResult]:
        """Results since the last call, exactly one for each started transfer in the end. A saved block is visible to
        every process that shares the store before its result is returned."""

    def poll_early_results(self) -> list[TransferResult]:
        """Outcomes that are certain while the connector still uses the blocks' memory, such as a save that is visible in one
        of several stores. Each is followed by the transfer's result in poll_transfers; on_result is called for both."""
        return []

    def poll_released(self) -> list[int]:
        """Saves (transfer ids) whose blocks the connector needs no more, though their outcome is still to come: it has a copy.
        on_result is called for these too."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Stop threads and let go of the medium, within seconds and whatever is in flight. Afterwards poll_transfers returns
        the outstanding results (CANCELLED) and no thread touches the pool. Safe to repeat."""

    def pin_prefix(self, block_hashes: Sequence[bytes], *, is_pinned: bool = True) -> bool:
        """Keep these blocks, a prefix, from eviction (or no longer), as far as the store has room for that; done in the
        background. False: this store cannot."""
        return False

    def stats(self) -> ConnectorStats:
        """Size and health of the store; cheap."""
        return ConnectorStats()
