"""The `ray` connector: KV in Ray's object store, shared by all engines of a Ray node, and by other nodes through Ray.

A directory actor on each node owns the objects. Whatever Ray does costs misses and never more than bounded waits. client
reaches the directory, link asks it what is there, lane moves blocks; the actor itself is in directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from connectors.byte_sizes import check_capacity, with_parsed_sizes
from connectors.known_blocks import KnownBlocks
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.ray.client import DirectoryConnection, DirectoryDoor, DirectoryStarter
from connectors.ray.lane import RayLane
from connectors.ray.link import RayLink
from connectors.ray.shared_pool import open_shared
from connectors.store_link import LinkState
from connectors.stored_block import BlockCheck
from connectors.transfer_log import TransferLog
from connectors.transfer_workers import CLOSE_TIMEOUT_S, TransferWorkers, failed, refuse_bad_ids
from core.clock import Clock
from core.config import options_from_mapping
from core.errors import ConfigError, ConnectorError
from core.kv.connector import (
    ConnectorStats,
    KVConnector,
    PrefixLookup,
    Transfer,
    TransferDirection,
    TransferOutcome,
    TransferResult,
)
from core.kv.pool_memory import KVPoolMemory

logger = logging.getLogger(__name__)

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_START_PATIENCE_S = 5.0
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """address: HOST:PORT of a running Ray, as `ray start --head` prints it. node_ip: the --node-ip-address of the Ray node on
    this host, where that was given. auth: how that Ray was started, "disabled" or "token" (RAY_AUTH_MODE). Ray runs as our user.

    namespace separates stores. capacity_bytes bounds one store on one node, and is taken from that node's object store memory;
    object_bytes the objects of many blocks each that it keeps there. A store ends linger_s after its last user.
    num_threads transfers move at the same time. op_timeout_s bounds every wait for the directory. max_known_hashes bounds what a
    process remembers of the store, at about 150 bytes each; lookup_batch_size is how many blocks are asked about at once.
    """

    address: str = "127.0.0.1:6379"
    node_ip: str = ""
    auth: str = "disabled"
    namespace: str = "kvrelay"
    capacity_bytes: int = 1024**3
    object_bytes: int = 32 * 1024**2
    linger_s: float = 30.0
    num_threads: int = 2
    op_timeout_s: float = 2.0
    max_known_hashes: int = 1_000_000
    lookup_batch_size: int = 512

    def __post_init__(self) -> None:
        check_capacity(self.capacity_bytes)
        for name, pattern, allowed in (
            ("address", _ADDRESS, "HOST:PORT of a running Ray: start one with `ray start --head`, which prints it"),
            ("node_ip", re.compile(r"[0-9A-Fa-f.:]*"), "the IP address of a Ray node on this host, or nothing"),
            ("auth", re.compile(r"disabled|token"), '"disabled" or "token"'),
            ("namespace", _NAMESPACE, "1 to 64 letters, digits, or any of _.:-"),
        ):
            if not pattern.fullmatch(getattr(self, name)):
                raise ConfigError(f"connector.options.{name}", getattr(self, name), allowed)
        for name, low, high in (
            ("object_bytes", 1, 2**30),
            ("linger_s", 0.1, 7 * 24 * 3600),
            ("num_threads", 1, 64),
            ("op_timeout_s", 0.01, 60),
            ("max_known_hashes", 1024, 100_000_000),
            ("lookup_batch_size", 1, 8192),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"connector.options.{name}", getattr(self, name), f"{low} to {high}")


class RayConnector(QueuedConnector):
    """The step thread reads what is known and queues; threads of ours do all that can wait."""

    name = "ray"

    def __init__(self, options: RayOptions, clock: Clock) -> None:
        self._options = options
        self._workers = TransferWorkers(self._execute, lambda: False, self._notify, clock)
        self._known = KnownBlocks(options.max_known_hashes)
        self._chains = PrefixChains()
        self._link: RayLink | None = None
        self._door: DirectoryDoor | None = None
        self._close_mutex = threading.Lock()
        self._mutex = threading.Lock()  # of the four below
        self._idle_connections: list[DirectoryConnection] = []
        self._pool_descriptor = -1
        self._num_errors = 0
        self._log = TransferLog(logger, self.name)
        self._is_closed = False

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says: from what is known of the store. 0 while there is no directory."""
        link = self._ready_link
        if self._is_closed or lookup.block_size != self._layout.block_size or link.state is LinkState.DOWN:
            return 0
        if link.state is LinkState.CONNECTING:  # for a moment
            return None
        request_id, block_hashes = lookup.request_id, lookup.block_hashes
        self._chains.note_lookup(request_id, block_hashes)
        first = num_computed_tokens // lookup.block_size
        num_blocks = self._known.count_prefix(request_id, block_hashes, first)
        if num_blocks is None or self._known.should_check_again(request_id):
            link.ask(request_id, block_hashes, first)
        return None if num_blocks is None else num_blocks * lookup.block_size

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Connect, and start the threads; waits some seconds for a directory that is being made, for the first request's sake.
        A Ray that cannot be reached now is used when it can.

        Raises ConnectorError where the pool's memory cannot be shared."""
        options, layout = self._options, pool.layout
        self._pool, self._layout = pool, layout
        self._pool_descriptor = open_shared(pool)
        self._lane = RayLane(pool, self._workers.run_jobs)
        hello = {
            "namespace": options.namespace,
            "layout": layout.fingerprint.hex(),
            "block_bytes": layout.block_bytes,
            "stride_bytes": layout.block_stride_bytes,
            "num_blocks": pool.num_blocks,
            "capacity_bytes": options.capacity_bytes,
            "object_bytes": options.object_bytes,
            "linger_s": options.linger_s,
            "op_timeout_s": options.op_timeout_s,
        }
        self._door = DirectoryDoor(options.address, options.node_ip, hello, options.op_timeout_s)
        starter = DirectoryStarter(options.address, options.node_ip, options.auth, options.linger_s)
        self._link = RayLink(
            self._door,
            starter,
            self._known,
            options.lookup_batch_size,
            self._notify,
            self._drop_idle_connections,
            options.capacity_bytes,
        )
        self._link.start()
        self._link.wait_first(_START_PATIENCE_S)
        self._workers.start_threads(options.num_threads, "kv-ray")
        logger.info("KV goes to Ray at %s, namespace %s", options.address, options.namespace)

    def close(self) -> None:
        """As the interface says: all waits for the directory are cut short."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            with self._mutex:
                self._is_closed = True
            if self._link is not None:
                self._link.stop()
            if self._door is not None:
                self._door.close()
            self._workers.close()
            if self._link is not None and not self._link.close(CLOSE_TIMEOUT_S):
                logger.warning("a thread of the ray connector hangs and is left behind")
            self._drop_idle_connections()
            with self._mutex:
                descriptor, self._pool_descriptor = self._pool_descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)

    def stats(self) -> ConnectorStats:
        """Of our store on this node, as the directory said within the last second."""
        link = self._ready_link
        status = link.status
        return ConnectorStats(
            store_bytes=status.num_bytes,
            store_blocks=status.num_blocks,
            capacity_bytes=status.capacity_bytes,
            num_evictions=link.num_evictions,
            num_errors=self._num_errors + link.num_errors,
            is_reachable=link.state is not LinkState.DOWN,
            complaint=link.complaint,
            num_open_references=self._workers.num_in_flight,
        )

    @property
    def _ready_link(self) -> RayLink:
        assert self._link is not None, "register_kv_cache comes first"
        return self._link

    # -- worker threads ------------------------------------------------------------------------------------------------
    def _execute(self, transfer: Transfer) -> TransferResult:
        refused = refuse_bad_ids(transfer, self._pool.num_blocks)
        if refused is not None:
            result = refused
        elif not transfer.block_ids:
            result = failed(transfer, TransferOutcome.OK, "")
        elif not self._ready_link.wait_up():
            outcome = TransferOutcome.CANCELLED if self._is_closed else TransferOutcome.ERROR
            with self._mutex:
                self._num_errors += outcome is TransferOutcome.ERROR
            # Not logged: the link has said why, once.
            why = self._ready_link.complaint or "Ray's directory actor of this host is not there"
            return failed(transfer, outcome, why)
        else:
            result = self._move(transfer)
        if result.outcome not in (TransferOutcome.OK, TransferOutcome.MISS, TransferOutcome.CANCELLED):
            with self._mutex:
                self._num_errors += 1
            self._log.note(transfer, result)
        return result

    def _move(self, transfer: Transfer) -> TransferResult:
        """A fault closes the connection, so that the directory lets go of what it held for us."""
        move = self._load if transfer.direction is TransferDirection.LOAD else self._save
        try:
            with self._connection() as connection:
                return move(connection, transfer)
        except (OSError, ConnectorError) as error:
            if self._is_closed:
                return failed(transfer, TransferOutcome.CANCELLED, "the connector was closed")
            outcome = TransferOutcome.TIMEOUT if isinstance(error, TimeoutError) else TransferOutcome.ERROR
            return failed(transfer, outcome, str(error) or repr(error))

    def _load(self, connection: DirectoryConnection, transfer: Transfer) -> TransferResult:
        names, epoch = transfer.block_hashes, self._known.epoch
        ancestors = self._chains.note_transfer(transfer.request_id, names)
        report = self._lane.load(connection, ancestors, names, transfer.block_ids, lambda: self._workers.should_stop(transfer))
        self._ready_link.note_status(report.status)
        num_placed, checks = report.num_placed, report.checks
        num_ok = next((position for position in range(num_placed) if checks.get(position) is not BlockCheck.OK), num_placed)
        self._known.add(names[:num_ok], epoch)
        self._known.remove(names[position] for position, check in checks.items() if check is not BlockCheck.OK)
        self._known.remove(names[num_placed : num_placed + 1])
        moved_bytes = num_ok * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        if num_ok in checks:
            detail = f"block {names[num_ok].hex()} is not what its name says"
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.CORRUPT, moved_bytes, detail)
        reason = self._workers.should_stop(transfer) if num_ok < num_placed else None
        detail = "given up before the end" if reason else "not stored"
        return TransferResult(transfer.transfer_id, num_ok, reason or TransferOutcome.MISS, moved_bytes, detail)

    def _save(self, connection: DirectoryConnection, transfer: Transfer) -> TransferResult:
        names = transfer.block_hashes
        ancestors = self._chains.note_transfer(transfer.request_id, names)
        are_new = not self._known.holds_any(names)
        report = self._lane.save(
            connection, ancestors, names, transfer.block_ids, lambda: self._workers.should_stop(transfer), are_new
        )
        stored = report.stored
        if report.status is not None:
            self._ready_link.note_status(report.status)
        self._known.add([name for name in names if name in stored], self._known.epoch)
        num_ok = next((position for position, name in enumerate(names) if name not in stored), len(names))
        moved_bytes = report.num_new * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        outcome = self._workers.should_stop(transfer) or TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, "no room, or given up before the end")

    # -- connections ---------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _connection(self) -> Iterator[DirectoryConnection]:
        """The connection used last, or a new one. Raises OSError or ConnectorError."""
        with self._mutex:
            connection = self._idle_connections.pop() if self._idle_connections else None
        if connection is not None and connection.is_stale():
            connection.close()
            connection = None
        if connection is None:
            assert self._door is not None
            connection = self._door.open(self._pool_descriptor)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._mutex:
            is_closed = self._is_closed
            if not is_closed:
                self._idle_connections.append(connection)
        if is_closed:
            connection.close()

    def _drop_idle_connections(self) -> None:
        """They would keep the memory of an object store that has ended."""
        with self._mutex:
            connections, self._idle_connections = self._idle_connections, []
        for connection in connections:
            connection.close()


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see RayOptions. Raises ConfigError."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("connector.name", "ray", "a connector whose libraries are installed (pip install kvrelay[ray])")
    sized = with_parsed_sizes(options, ("capacity_bytes", "object_bytes"), "connector.options")
    return RayConnector(options_from_mapping(RayOptions, sized, "connector.options"), clock)
