"""A few connections over which one transfer's blocks move at a time, between a Redis server and the pool's memory.

One block per connection is under way: a server answers deep pipelines slower, because it builds all replies before it sends
the first. One thread drives all connections in turn; what it waits for in one is what the server sends over it meanwhile.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connectors.coding.block_coding import BlockCoding
from connectors.redis.link import NUM_STATUS_REPLIES, STATUS_COMMANDS
from connectors.redis.node_streams import NodeStreams
from connectors.redis.resp_stream import Reply, RespError, RespStream, WrongValueError
from connectors.redis.save_trouble import UNWRITABLE
from connectors.redis.server import Node, RedisServer
from connectors.redis.values import BlockValues
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block

_PIPELINE_BYTES = 256 * 1024  # small blocks: so many bytes under way on one connection
_MAX_PIPELINE = 16
_MAX_CODING_BYTES = 4096  # of an encoded or encrypted block beyond the block's own
_FULL = ("OOM",)


class _Outcome(enum.Enum):
    """Of one block's commands. ELSEWHERE: another server of the cluster has its slot now."""

    STORED = "stored"
    FULL = "full"
    ELSEWHERE = "elsewhere"


@dataclass(slots=True)
class LaneReport:
    """What became of a transfer's blocks, by position. error: why it ended early, if it did."""

    checks: dict[int, BlockCheck | None] = field(default_factory=dict)  # loaded; None: not there
    stored: set[int] = field(default_factory=set)
    is_full: bool = False
    error: Exception | None = None


class RedisLane:
    """Used by one thread at a time. After an error its connections are closed and the next use opens others."""

    def __init__(self, server: RedisServer, values: BlockValues, coding: BlockCoding, num_connections: int) -> None:
        self._values = values
        self._coding = coding
        num_pipelined = max(1, min(_MAX_PIPELINE, _PIPELINE_BYTES // coding.block_bytes))
        self._max_value_bytes = coding.block_bytes + _MAX_CODING_BYTES
        self._streams = NodeStreams(server, num_connections, num_pipelined)

    def close(self) -> None:
        """Let go of all connections. Does not raise."""
        self._streams.close()

    def touch(self, block_hashes: Sequence[bytes], expiries_ms: Sequence[int]) -> list[bool]:
        """Begin a transfer: move the blocks' expiry, if the servers may be written; which of them are stored. Raises OSError,
        ConnectorError or RespError."""
        self._streams.drop_stale()
        return self._touch(block_hashes, expiries_ms, b"", 0)[0]

    def touch_and_look(
        self, block_hashes: Sequence[bytes], expiries_ms: Sequence[int]
    ) -> tuple[list[bool], dict[Node, list[Reply | RespError]]]:
        """As touch does, and at the same moment the replies of STATUS_COMMANDS by the servers that may have these blocks."""
        return self._touch(block_hashes, expiries_ms, STATUS_COMMANDS, NUM_STATUS_REPLIES)

    def _touch(
        self, block_hashes: Sequence[bytes], expiries_ms: Sequence[int], trailer: bytes, num_trailing: int
    ) -> tuple[list[bool], dict[Node, list[Reply | RespError]]]:
        num_parts = self._values.num_parts
        try:
            answers, replies = self._streams.ask(
                block_hashes,
                lambda position: self._values.expire(block_hashes[position], expiries_ms[position]),
                num_parts,
                trailer,
                num_trailing,
            )
        except RespError as refusal:
            if refusal.word not in UNWRITABLE:
                raise
            self._streams.close()  # what else was asked is still to come there
            counts, replies = self._streams.ask(
                block_hashes, lambda position: self._values.exists(block_hashes[position]), 1, trailer, num_trailing
            )
            return [count == b"%d" % num_parts for count in counts], replies
        return [b"0" not in digits for digits in answers], replies

    def delete(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks. Raises as touch does."""
        self._streams.ask(block_hashes, lambda position: self._values.delete(block_hashes[position]), 1)

    def load(
        self, block_hashes: Sequence[bytes], payloads: Sequence[memoryview], should_stop: Callable[[], object], report: LaneReport
    ) -> None:
        """Receive blocks into payloads, in order, until one is not what was asked for or should_stop() says so.

        Afterwards nobody writes to the payloads. Raises as touch does; what is in the report by then is verified.
        """
        max_under_way = self._streams.begin_blocks()
        under_way: deque[RespStream] = deque()
        num_asked, end = 0, len(block_hashes)
        for position in range(end):
            while num_asked < end and len(under_way) < max_under_way:
                stream = self._streams.next_for(block_hashes[num_asked])
                stream.send([self._values.get(block_hashes[num_asked])])
                under_way.append(stream)
                num_asked += 1
            if not under_way:
                return
            try:
                check = self._receive(under_way.popleft(), block_hashes[position], payloads[position])
            except WrongValueError:  # what follows it is not worth being read, however long it is
                report.checks[position] = BlockCheck.CORRUPT
                self.close()
                return
            report.checks[position] = check
            if check is not BlockCheck.OK or should_stop():
                end = num_asked  # what is under way must be read

    def save(
        self,
        block_hashes: Sequence[bytes],
        payloads: Sequence[memoryview],
        lifetimes_ms: Sequence[int],
        should_stop: Callable[[], object],
        report: LaneReport,
    ) -> None:
        """Store blocks, in order, until the server is full or should_stop() says so. Raises as touch does."""
        max_under_way = self._streams.begin_blocks()
        under_way: deque[tuple[int, RespStream]] = deque()
        num_sent, end = 0, len(block_hashes)
        while num_sent < end or under_way:
            if num_sent < end and len(under_way) < max_under_way:
                sealed = self._coding.seal(block_hashes[num_sent], payloads[num_sent])
                if sealed is not None:  # what the codec cannot hold is not sent
                    header, payload = sealed[0], memoryview(sealed[1])
                    stream = self._streams.next_for(block_hashes[num_sent])
                    stream.send(self._values.set(block_hashes[num_sent], header, payload, lifetimes_ms[num_sent]))
                    under_way.append((num_sent, stream))
                num_sent += 1
                continue
            position, stream = under_way.popleft()
            outcome = self._receive_outcome(stream)
            if outcome is _Outcome.STORED:
                report.stored.add(position)
            report.is_full |= outcome is _Outcome.FULL
            if report.is_full or should_stop():
                end = num_sent

    def _receive(self, stream: RespStream, block_hash: bytes, payload: memoryview) -> BlockCheck | None:
        """One block; None when a part of it is not there."""
        header = memoryview(bytearray(BLOCK_HEADER_BYTES))
        is_missing, is_as_in_pool = False, True
        pieces: list[bytearray | memoryview] = []
        for number, part in enumerate(self._values.parts):
            # What is not at rest as it is in the pool has another size, and comes as it is.
            views = [*([header] if number == 0 else []), *([payload[part]] if self._coding.is_plain else [])]
            received = stream.receive_value(views, self._max_value_bytes)
            is_missing |= received is None
            is_as_in_pool &= received is True and self._coding.is_plain
            pieces += [received] if isinstance(received, bytearray) else views
        if is_missing:
            return None
        if is_as_in_pool:
            return check_block(bytes(header), payload, self._coding.fingerprint, block_hash)
        at_rest = b"".join(pieces)
        stored = memoryview(at_rest)[BLOCK_HEADER_BYTES:]
        return self._coding.unseal(at_rest[:BLOCK_HEADER_BYTES], stored, block_hash, payload)

    def _receive_outcome(self, stream: RespStream) -> _Outcome:
        """Read the replies of one block's commands. Raises RespError for any refusal but that of a full server."""
        refusals, is_stored = [], True
        for _part in self._values.parts:
            try:
                is_stored &= stream.receive_status()
            except RespError as error:
                refusals.append(error)
        for refusal in refusals:
            if refusal.word not in _FULL:
                raise refusal
        if refusals:
            return _Outcome.FULL
        return _Outcome.STORED if is_stored else _Outcome.ELSEWHERE
