"""The `tcp` connector: KV directly from node to node. A node keeps what it saves in memory of its own and serves it to others.

server serves, source and inquiries find out who has what, pull moves bytes into the pool, frames is the wire.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from connectors.byte_sizes import readable_bytes
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.stored_block import BlockCheck
from connectors.tcp.block_memory import BlockMemory, slot_bytes
from connectors.tcp.frames import EndPoint
from connectors.tcp.inquiries import Inquiries
from connectors.tcp.leases import Leases
from connectors.tcp.options import TcpOptions, advertised_address, read_secret, tcp_options
from connectors.tcp.pull import Pull, PullReport
from connectors.tcp.server import BlockServer
from connectors.tcp.source import Source
from connectors.transfer_log import TransferLog
from connectors.transfer_workers import CLOSE_TIMEOUT_S, TransferWorkers, failed, refuse_bad_ids
from core.addresses import is_loopback
from core.clock import Clock
from core.errors import ConfigError
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

_MAX_SOURCES = 256  # each has a thread
_FORGET_AFTER_S = 60.0  # a source that no request names
_MAX_LEASE_S = 60.0
_JOB_BYTES = 4 * 1024 * 1024  # copied by one thread at a time


class TcpConnector(QueuedConnector):
    """Blocks of this node in its own memory, and of others at theirs. The step thread reads what is known and queues."""

    name = "tcp"

    def __init__(self, options: TcpOptions, clock: Clock) -> None:
        self._options = options
        self._workers = TransferWorkers(self._execute, lambda: False, self._notify, clock)
        self._chains = PrefixChains()
        self._inquiries = Inquiries(lambda: self._memory.stored, options.lookup_wait_s)
        self._server: BlockServer | None = None
        self._close_mutex = threading.Lock()
        self._mutex = threading.Lock()  # of the two below
        self._source_by_address: dict[str, Source] = {}
        self._peers: tuple[Source, ...] = ()
        self._ended_sources: list[Source] = []
        self._num_errors = 0
        self._log = TransferLog(logger, self.name)
        self._is_closed = False

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says: what is here, and what the request's sources have said. Waits lookup_wait_s for them at most."""
        if self._is_closed or lookup.block_size != self._pool.layout.block_size:
            return 0
        self._chains.note_lookup(lookup.request_id, lookup.block_hashes)
        first = num_computed_tokens // lookup.block_size
        sources = self._sources_of(lookup.sources)
        num_blocks = self._inquiries.count_prefix(lookup.request_id, lookup.block_hashes, first, sources)
        return None if num_blocks is None else num_blocks * lookup.block_size

    def _sources_of(self, addresses: Sequence[str]) -> tuple[Source, ...]:
        """The sources with these addresses, and the peers."""
        if not addresses:
            return self._peers
        named = [source for address in addresses if (source := self._source(address)) is not None]
        return (*self._peers, *(source for source in dict.fromkeys(named) if source not in self._peers))

    def _source(self, address: str) -> Source | None:
        source = self._source_by_address.get(address)
        if source is not None or address == self.kv_address:
            return source
        with self._mutex:
            self._forget_sources()
            if self._is_closed or len(self._source_by_address) >= _MAX_SOURCES:
                return None
            options = self._options
            source = Source(
                address, self._end, options.connect_timeout_s, options.op_timeout_s, options.lease_s / 4, self._notify
            )
            self._source_by_address[address] = source
            return source

    def _forget_sources(self) -> None:
        """Stop those that no request names any more: nodes come and go. The caller holds the mutex."""
        now_s = time.monotonic()
        for address, source in list(self._source_by_address.items()):
            if source not in self._peers and now_s - source.last_named_s > _FORGET_AFTER_S:
                source.stop()
                self._ended_sources.append(self._source_by_address.pop(address))
        self._ended_sources = [source for source in self._ended_sources if not source.wait_ended(0.0)]

    # -- worker half ---------------------------------------------------------------------------------------------------
    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Allocate the memory and begin to serve. Raises ConfigError for what is not possible here."""
        options, layout = self._options, pool.layout
        secret = read_secret(options.key_file) if options.key_file else self.cluster_secret
        if not secret and not is_loopback(options.host):
            allowed = "a loopback address, or any with a secret that all nodes share: security.keys, or the option key_file"
            raise ConfigError("connector.options.host", options.host, allowed)
        if options.capacity_bytes < slot_bytes(layout):
            allowed = f"at least one block, {readable_bytes(slot_bytes(layout))}"
            raise ConfigError("connector.options.capacity_bytes", options.capacity_bytes, allowed)
        self._pool = pool
        try:
            self._memory = BlockMemory(layout, options.capacity_bytes)
        except OSError as error:
            allowed = f"what this machine's memory has room for ({error.strerror})"
            raise ConfigError("connector.options.capacity_bytes", options.capacity_bytes, allowed) from error
        self._end = EndPoint(secret, layout.fingerprint, layout.block_bytes, os.urandom(16))
        self._leases = Leases(self._memory, options.lease_s, _MAX_LEASE_S)
        server = BlockServer(self._end, self._memory, self._leases, options.op_timeout_s, options.max_connections)
        try:
            port = server.listen(options.host.removeprefix("[").removesuffix("]"), options.port)
        except OSError as error:
            server.close(0.0)
            where = f"{options.host}:{options.port}"
            raise ConfigError(
                "connector.options.host, port", where, f"a free address of this machine ({error.strerror})"
            ) from error
        self._server = server
        self.kv_address = advertised_address(options, port)
        self._workers.start_threads(options.num_threads, "kv-tcp")
        self._peers = tuple(source for peer in options.peers if (source := self._source(peer)) is not None)
        logger.info("KV is served to other nodes at %s", self.kv_address)

    def close(self) -> None:
        """As the interface says: all waits for other nodes are cut short, and theirs for this one."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            with self._mutex:
                self._is_closed = True
                sources = [*self._source_by_address.values(), *self._ended_sources]
                self._source_by_address.clear()
                self._ended_sources.clear()
            for source in sources:
                source.stop()
            self._workers.close()
            deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
            has_ended = self._server is None or self._server.close(CLOSE_TIMEOUT_S)
            for source in sources:
                has_ended &= source.wait_ended(max(0.0, deadline_s - time.monotonic()))
            if not has_ended:
                logger.warning("a thread of the tcp connector hangs and is left behind")

    def stats(self) -> ConnectorStats:
        """Of this node's own memory. References: transfers in flight, and blocks that others have leased or are reading."""
        memory = self._memory
        with self._mutex:
            num_lost = sum(source.num_errors for source in self._source_by_address.values())
        return ConnectorStats(
            store_bytes=len(memory.stored) * slot_bytes(memory.layout),
            store_blocks=len(memory.stored),
            capacity_bytes=memory.num_slots * slot_bytes(memory.layout),
            num_evictions=memory.num_evictions,
            num_errors=self._num_errors + num_lost,
            num_open_references=self._workers.num_in_flight + memory.num_pinned,
        )

    # -- worker threads ------------------------------------------------------------------------------------------------
    def _execute(self, transfer: Transfer) -> TransferResult:
        refused = refuse_bad_ids(transfer, self._pool.num_blocks)
        if refused is not None:
            result = refused
        elif not transfer.block_ids:
            result = failed(transfer, TransferOutcome.OK, "")
        elif transfer.direction is TransferDirection.SAVE:
            result = self._save(transfer)
        else:
            self._inquiries.begin_load(transfer.request_id)
            try:
                result = self._load(transfer)
            finally:
                self._inquiries.end_load(transfer.request_id)
        if result.outcome in (TransferOutcome.CORRUPT, TransferOutcome.ERROR, TransferOutcome.TIMEOUT):
            self._note_error(transfer, result.outcome, result.detail)
        return result

    def _save(self, transfer: Transfer) -> TransferResult:
        names, memory = transfer.block_hashes, self._memory
        chain = [*self._chains.note_transfer(transfer.request_id, names), *names]
        protected = frozenset(chain)
        memory.touch(chain)
        first_positions = {name: position for position, name in reversed(list(enumerate(names)))}
        new = sorted(position for name, position in first_positions.items() if name not in memory.stored)
        slot_by_position = dict(zip(new, memory.claim(len(new), protected), strict=False))  # the first of them, if not all fit
        moved: list[int] = []

        def fill(positions: Sequence[int]) -> None:
            for position in positions:
                if not self._workers.should_stop(transfer):
                    block_id, slot = transfer.block_ids[position], slot_by_position[position]
                    memory.fill(slot, names[position], self._pool.block(block_id))
                    moved.append(position)

        self._workers.run_jobs([functools.partial(fill, part) for part in self._parts(list(slot_by_position))])
        memory.give_back(slot_by_position[position] for position in slot_by_position.keys() - set(moved))
        memory.touch(chain)
        stored = memory.stored
        num_ok = next((position for position, name in enumerate(names) if name not in stored), len(names))
        moved_bytes = len(moved) * memory.layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        outcome = self._workers.should_stop(transfer) or TransferOutcome.MISS
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, "there was no room, or no time, for all of it")

    def _load(self, transfer: Transfer) -> TransferResult:
        names, memory = transfer.block_hashes, self._memory
        memory.touch([*self._chains.note_transfer(transfer.request_id, names), *names])
        holders = self._inquiries.find_holders(transfer.request_id, names, self._with_peers)
        report = PullReport()
        own: list[int] = []
        positions_by_source: dict[Source, list[int]] = {}
        for position, (name, holder) in enumerate(zip(names, holders, strict=True)):
            if name in memory.stored:
                own.append(position)
            elif holder is not None:
                positions_by_source.setdefault(holder.source, []).append(position)
            else:
                break
        payloads = [self._pool.block(block_id) for block_id in transfer.block_ids]
        jobs: list[Callable[[], None]] = [
            functools.partial(self._read_own, names, payloads, part, report) for part in self._parts(own)
        ]
        for source, positions in positions_by_source.items():
            pull = Pull(
                source,
                memory.layout.fingerprint,
                names,
                payloads,
                positions,
                report,
                lambda: self._workers.should_stop(transfer),
            )
            jobs += [pull.run_stream] * min(self._options.num_streams, pull.num_units)
        self._workers.run_jobs(jobs)
        for position, check in report.checks.items():
            if check not in (BlockCheck.OK, None):  # whatever is wrong with it: nobody shall be sent for it again
                if position in own:
                    memory.forget(names[position])
                elif (holder := holders[position]) is not None:
                    holder.source.suspect(names[position])
        result = self._load_result(transfer, report)
        # What was pulled is copied while it is in the pool, after the request has it: others can then pull it from here, too.
        was_pulled = sum(position < result.num_blocks_ok for position in own) < result.num_blocks_ok
        return dataclasses.replace(result, wants_save=was_pulled and self._options.serve_pulled)

    def _load_result(self, transfer: Transfer, report: PullReport) -> TransferResult:
        names, checks = transfer.block_hashes, report.checks
        num_ok = next((index for index in range(len(names)) if checks.get(index) is not BlockCheck.OK), len(names))
        moved_bytes = num_ok * self._memory.layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        if checks.get(num_ok) is not None:
            detail = f"block {names[num_ok].hex()} is not what its name says"
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.CORRUPT, moved_bytes, detail)
        outcome, detail = self._workers.should_stop(transfer), "given up before the end"
        if outcome is None:  # no fault of the store as a whole: a source that has gone took its blocks with it
            outcome, detail = TransferOutcome.MISS, "no source has it"
            if report.error is not None:
                detail = f"a source failed: {report.error}"
                self._note_error(transfer, outcome, detail)
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, detail)

    def _read_own(
        self, names: Sequence[bytes], payloads: Sequence[memoryview], positions: Sequence[int], report: PullReport
    ) -> None:
        for position in positions:
            slots = self._memory.pin_prefix([names[position]])
            try:
                report.checks[position] = self._memory.read(slots[0], payloads[position]) if slots else None
            finally:
                self._memory.unpin(slots)

    def _with_peers(self, sources: tuple[Source, ...]) -> tuple[Source, ...]:
        return tuple(dict.fromkeys((*sources, *self._peers)))

    def _parts(self, positions: Sequence[int]) -> list[Sequence[int]]:
        """Positions in runs that are worth a thread each."""
        size = max(1, _JOB_BYTES // self._memory.layout.block_bytes)
        return [positions[start : start + size] for start in range(0, len(positions), size)]

    def _note_error(self, transfer: Transfer, outcome: TransferOutcome, detail: str) -> None:
        with self._mutex:
            self._num_errors += 1
        self._log.warn(transfer, outcome, detail)


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see TcpOptions. Raises ConfigError."""
    return TcpConnector(tcp_options(options), clock)
