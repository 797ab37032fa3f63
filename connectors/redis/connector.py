"""The `redis` connector: KV in a Redis (6.2 or later) or Valkey server, shared by any number of processes on any hosts.

One value per block, verified after it was copied; whatever the server does costs misses and never more than bounded waits.
link asks what is there, lane moves bytes, values says how blocks are laid out.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from connectors.coding.block_coding import CodingOptions
from connectors.known_blocks import KnownBlocks
from connectors.prefix_chains import PrefixChains
from connectors.queued_connector import QueuedConnector
from connectors.redis.browser import RedisBrowser
from connectors.redis.lane import LaneReport, RedisLane
from connectors.redis.link import RedisLink
from connectors.redis.options import RedisOptions, parse_options, server_of
from connectors.redis.prefix_expiry import PrefixExpiry
from connectors.redis.resp_stream import RespError
from connectors.redis.save_trouble import SaveTrouble
from connectors.redis.values import BlockValues
from connectors.store_browser import StoreBrowser
from connectors.store_link import LinkState
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck
from connectors.transfer_log import TransferLog
from connectors.transfer_workers import CLOSE_TIMEOUT_S, TransferWorkers, failed, refuse_bad_ids
from core.clock import Clock
from core.errors import ConnectorError
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


class RedisConnector(QueuedConnector):
    """Blocks in one server. The step thread reads what is known and queues; threads of ours do all that can wait."""

    name = "redis"

    def __init__(self, options: RedisOptions, clock: Clock) -> None:
        self._options = options
        self._server = server_of(options)
        self._save_trouble = SaveTrouble(self._server.address)
        self._coding_options = CodingOptions(options.codec, options.codec_level, options.encryption_key_file).check()
        self._workers = TransferWorkers(self._execute, lambda: False, self._notify, clock)
        self._known = KnownBlocks(options.max_known_hashes)
        self._chains = PrefixChains()
        self._expiry = PrefixExpiry(int(options.expiry_s * 1000))
        self._link: RedisLink | None = None
        self._close_mutex = threading.Lock()
        self._mutex = threading.Lock()  # of the three below
        self._idle_lanes: list[RedisLane] = []
        self._num_errors = 0
        self._log = TransferLog(logger, self.name)
        self._is_closed = False

    # -- scheduler half ------------------------------------------------------------------------------------------------
    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """As the interface says: from what is known of the store. 0 while the server cannot be reached."""
        link = self._ready_link
        if self._is_closed or lookup.block_size != self._layout.block_size or link.state is LinkState.DOWN:
            return 0
        if link.state is LinkState.CONNECTING:  # for connect_timeout_s + op_timeout_s at most
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
        """Begin to connect, and start the threads. A server that cannot be reached now is used when it can."""
        self._pool, self._layout = pool, pool.layout
        self._coding = self._coding_options.coding_for(pool.layout)
        self._values = BlockValues.of(
            self._options.namespace, pool.layout, self._coding.fingerprint, is_cluster=self._server.is_cluster
        )
        self._link = RedisLink(self._server, self._values, self._known, self._options.lookup_batch_size, self._notify)
        self._link.start()
        self._workers.start_threads(self._options.num_threads, "kv-redis")
        logger.info("KV goes to redis at %s, namespace %s", self._server.address, self._options.namespace)

    def close(self) -> None:
        """As the interface says: all waits for the server are cut short; one for a name server is given up after seconds."""
        with self._close_mutex:  # a second caller waits for the first, and then finds nothing to do
            with self._mutex:
                self._is_closed = True
            if self._link is not None:
                self._link.stop()
            self._server.close()
            self._workers.close()
            if self._link is not None and not self._link.close(CLOSE_TIMEOUT_S):
                logger.warning("a thread of the redis connector hangs and is left behind")
            with self._mutex:
                lanes, self._idle_lanes = self._idle_lanes, []
            for lane in lanes:
                lane.close()

    def stats(self) -> ConnectorStats:
        """Of the whole database, as the server said within the last second; capacity is its maxmemory (0: none)."""
        link = self._ready_link
        num_blocks = link.num_keys // self._values.num_parts
        return ConnectorStats(
            store_bytes=num_blocks * (BLOCK_HEADER_BYTES + self._coding.max_bytes),  # zstd: at most
            store_blocks=num_blocks,
            capacity_bytes=link.max_memory_bytes,
            num_evictions=link.num_evictions,
            num_errors=self._num_errors + link.num_errors,
            is_reachable=link.state is not LinkState.DOWN,
            complaint=link.complaint or self._save_trouble.text,
            num_open_references=self._workers.num_in_flight,
        )

    @property
    def _ready_link(self) -> RedisLink:
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
            return failed(transfer, outcome, f"the server cannot be reached: {self._ready_link.complaint}".rstrip(": "))
        else:
            with self._lane() as lane:
                move = self._load if transfer.direction is TransferDirection.LOAD else self._save
                result = move(lane, transfer, LaneReport())
        if result.outcome not in (TransferOutcome.OK, TransferOutcome.MISS, TransferOutcome.CANCELLED):
            with self._mutex:
                self._num_errors += 1
            self._log.note(transfer, result)
        return result

    def _load(self, lane: RedisLane, transfer: Transfer, report: LaneReport) -> TransferResult:
        names, epoch = transfer.block_hashes, self._known.epoch
        num_stored = 0
        with self._reporting(lane, report):
            is_stored, _moments = self._touch(lane, transfer)
            self._known.remove(name for name, stored in zip(names, is_stored, strict=True) if not stored)
            num_stored = (*is_stored, False).index(False)
            payloads = [self._pool.block(block_id) for block_id in transfer.block_ids[:num_stored]]
            lane.load(names[:num_stored], payloads, lambda: self._workers.should_stop(transfer), report)
        num_ok = next((index for index in range(len(names)) if report.checks.get(index) is not BlockCheck.OK), len(names))
        self._known.add(names[:num_ok], epoch)
        self._known.remove(names[position] for position, check in report.checks.items() if check is not BlockCheck.OK)
        damaged = [names[position] for position, check in report.checks.items() if check not in (BlockCheck.OK, None)]
        if report.checks.get(num_ok) is BlockCheck.UNREADABLE:  # so are those behind it, which a save would take for stored
            damaged = list(names[num_ok:num_stored])
            self._known.remove(damaged)
        if damaged and report.error is None:  # would block their keys until they expire, and for ever where they do not
            with self._reporting(lane, LaneReport()):
                lane.delete(damaged)
        moved_bytes = num_ok * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        if report.checks.get(num_ok) is BlockCheck.UNREADABLE:
            detail = f"block {names[num_ok].hex()}: {self._coding.complaint}"
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.MISS, moved_bytes, detail)
        if report.checks.get(num_ok) is not None:
            detail = f"block {names[num_ok].hex()} is not what its key says"
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.CORRUPT, moved_bytes, detail)
        is_known_absent = num_ok in report.checks or (report.error is None and num_ok >= num_stored)
        outcome, detail = self._reason(transfer, report, is_known_absent)
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, detail)

    def _save(self, lane: RedisLane, transfer: Transfer, report: LaneReport) -> TransferResult:
        names = transfer.block_hashes
        stored: set[bytes] = set()
        with self._reporting(lane, report):
            is_stored, moments = self._touch(lane, transfer)
            stored.update(name for name, present in zip(names, is_stored, strict=True) if present)
            first_positions = {name: position for position, name in reversed(list(enumerate(names)))}
            new = sorted(position for name, position in first_positions.items() if name not in stored)
            now_ms = self._ready_link.now_ms()
            lane.save(
                [names[position] for position in new],
                [self._pool.block(transfer.block_ids[position]) for position in new],
                [moments[position] - now_ms for position in new],  # about; made exact below
                lambda: self._workers.should_stop(transfer),
                report,
            )
            stored.update(names[new[index]] for index in report.stored)
            if report.stored:
                stored = self._look_again(lane, {name: moments[first_positions[name]] for name in names if name in stored})
            self._known.add([name for name in names if name in stored], self._known.epoch)
        self._save_trouble.note(is_full=report.is_full, error=report.error, has_stored=bool(report.stored))
        num_ok = next((position for position, name in enumerate(names) if name not in stored), len(names))
        moved_bytes = len(report.stored) * self._layout.block_bytes
        if num_ok == len(names):
            return TransferResult(transfer.transfer_id, num_ok, TransferOutcome.OK, moved_bytes)
        outcome, detail = self._reason(transfer, report, report.error is None and not self._workers.should_stop(transfer))
        return TransferResult(transfer.transfer_id, num_ok, outcome, moved_bytes, detail)

    def _look_again(self, lane: RedisLane, moment_by_name: dict[bytes, int]) -> set[bytes]:
        """After new blocks were stored: which are there still (others may have had to go for them), with their exact expiry."""
        is_kept, status = lane.touch_and_look(list(moment_by_name), list(moment_by_name.values()))
        self._ready_link.note_status(status)
        return {name for name, kept in zip(moment_by_name, is_kept, strict=True) if kept}

    def _touch(self, lane: RedisLane, transfer: Transfer) -> tuple[Sequence[bool], Sequence[int]]:
        """Give the transfer's blocks and their ancestors their expiry; which of its blocks are stored, and each one's expiry."""
        names = transfer.block_hashes
        ancestors = self._chains.note_transfer(transfer.request_id, names)
        plan = self._expiry.plan(transfer.request_id, len(ancestors), len(names), self._ready_link.now_ms())
        moments = [plan.expiry_ms(depth) for depth in range(plan.first_stale, len(ancestors) + len(names))]
        is_stored = lane.touch([*ancestors[plan.first_stale :], *names], moments)
        return is_stored[-len(names) :], moments[-len(names) :]

    def _reason(self, transfer: Transfer, report: LaneReport, is_absent: bool) -> tuple[TransferOutcome, str]:
        """Why a transfer ended before its end."""
        if is_absent:
            return TransferOutcome.MISS, "not stored, or no room for it"
        if self._is_closed:
            return TransferOutcome.CANCELLED, "the connector was closed"
        if report.error is not None:
            is_timeout = isinstance(report.error, TimeoutError)
            return TransferOutcome.TIMEOUT if is_timeout else TransferOutcome.ERROR, str(report.error)
        return self._workers.should_stop(transfer) or TransferOutcome.TIMEOUT, "given up before the end"

    # -- connections ---------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _lane(self) -> Iterator[RedisLane]:
        """The lane used last, whose buffers on the server are warm, or a new one."""
        with self._mutex:
            lane = self._idle_lanes.pop() if self._idle_lanes else self._new_lane()
        try:
            yield lane
        except BaseException:
            lane.close()
            raise
        finally:
            with self._mutex:
                is_closed = self._is_closed
                if not is_closed:
                    self._idle_lanes.append(lane)
            if is_closed:
                lane.close()

    def _new_lane(self) -> RedisLane:
        return RedisLane(self._server, self._values, self._coding, self._options.num_connections)

    @contextlib.contextmanager
    def _reporting(self, lane: RedisLane, report: LaneReport) -> Iterator[None]:
        """A fault closes the lane's connections first, so that nothing can be written to the pool after it is reported."""
        try:
            yield
        except (OSError, ConnectorError, RespError) as error:
            lane.close()
            report.error = error


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Options: see RedisOptions. Raises ConfigError, in which no value that may be a secret is shown."""
    return RedisConnector(parse_options(options), clock)


def open_browser(options: Mapping[str, Any]) -> StoreBrowser:
    """All layouts in the namespace. Raises ConfigError or ConnectorError."""
    parsed = parse_options(options)
    cipher = CodingOptions(encryption_key_file=parsed.encryption_key_file).load_cipher()
    browser = RedisBrowser(server_of(parsed), parsed.namespace, parsed.expiry_s)
    browser.cipher = cipher
    return browser
