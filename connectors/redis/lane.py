"""A few connections over which one transfer's blocks move at a time, between a Redis server and the pool's memory.

One block per connection is under way: a server answers deep pipelines slower, because it builds all replies before it sends
the first. One thread drives all connections in turn; what it waits for in one is what the server sends over it meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connectors.coding.block_coding import BlockCoding
from connectors.redis.link import NUM_STATUS_REPLIES, STATUS_COMMANDS
from connectors.redis.resp_stream import Reply, RespError, RespStream
from connectors.redis.server import RedisServer
from connectors.redis.values import BlockValues
from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block

_PIPELINE_BYTES = 256 * 1024  # small blocks: so many bytes under way on one connection
_MAX_PIPELINE = 16
_MAX_CODING_BYTES = 4096  # of an encoded or encrypted block beyond the block's own
_FULL = ("OOM",)
_UNWRITABLE = (
    "READONLY",
    "MISCONF",
    "NOPERM",
)  # a replica, a disk that cannot be written, a user who may not: it is read all the same


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
        self._server = server
        self._values = values
        self._coding = coding
        self._num_connections = num_connections
        self._num_pipelined = max(1, min(_MAX_PIPELINE, _PIPELINE_BYTES // coding.block_bytes))
        self._max_value_bytes = coding.block_bytes + _MAX_CODING_BYTES
        self._streams: list[RespStream] = []

    def close(self) -> None:
        """Let go of all connections. Does not raise."""
        while self._streams:
            self._streams.pop().close()

    def touch(self, block_hashes: Sequence[bytes], expiries_ms: Sequence[int]) -> list[bool]:
        """Move the blocks' expiry, if the server may be written; which of them are stored. Raises OSError, ConnectorError or
        RespError."""
        (stream,) = self._open(1)
        num_parts = self._values.num_parts
        commands = [self._values.expire(name, moment) for name, moment in zip(block_hashes, expiries_ms, strict=True)]
        try:
            digits = stream.exchange_digits(b"".join(commands), num_parts * len(commands))
        except RespError as refusal:
            if refusal.word not in _UNWRITABLE:
                raise
            commands = [self._values.exists(name) for name in block_hashes]
            counts = stream.exchange_digits(b"".join(commands), len(commands))
            return [count == b"%d" % num_parts for count in (counts[index : index + 1] for index in range(len(commands)))]
        return [b"0" not in digits[start : start + num_parts] for start in range(0, len(digits), num_parts)]

    def touch_and_look(
        self, block_hashes: Sequence[bytes], expiries_ms: Sequence[int]
    ) -> tuple[list[bool], list[Reply | RespError]]:
        """As touch does, and the replies of STATUS_COMMANDS at the same moment."""
        (stream,) = self._open(1)
        num_parts = self._values.num_parts
        commands = [self._values.expire(name, moment) for name, moment in zip(block_hashes, expiries_ms, strict=True)]
        num_flags = num_parts * len(commands)
        replies = stream.exchange(b"".join(commands) + STATUS_COMMANDS, num_flags + NUM_STATUS_REPLIES)
        flags, status = replies[:num_flags], replies[num_flags:]
        return [all(flag == 1 for flag in flags[start : start + num_parts]) for start in range(0, num_flags, num_parts)], status

    def delete(self, block_hashes: Sequence[bytes]) -> None:
        """Remove blocks. Raises as touch does."""
        (stream,) = self._open(1)
        stream.exchange(b"".join(self._values.delete(name) for name in block_hashes), len(block_hashes))

    def load(
        self, block_hashes: Sequence[bytes], payloads: Sequence[memoryview], should_stop: Callable[[], object], report: LaneReport
    ) -> None:
        """Receive blocks into payloads, in order, until one is not what was asked for or should_stop() says so.

        Afterwards nobody writes to the payloads. Raises as touch does; what is in the report by then is verified.
        """
        streams = self._open(-(-len(block_hashes) // self._num_pipelined))
        depth = len(streams) * self._num_pipelined
        num_asked, end = 0, len(block_hashes)
        position = 0
        while position < end:
            while num_asked < min(end, position + depth):
                streams[num_asked % len(streams)].send([self._values.get(block_hashes[num_asked])])
                num_asked += 1
            check = self._receive(streams[position % len(streams)], block_hashes[position], payloads[position])
            report.checks[position] = check
            position += 1
            if end > num_asked and (check is not BlockCheck.OK or should_stop()):
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
        streams = self._open(-(-len(block_hashes) // self._num_pipelined))
        depth = len(streams) * self._num_pipelined
        num_sent = num_answered = 0
        end = len(block_hashes)
        unsealed: set[int] = set()  # what the codec cannot hold is not sent
        while num_answered < end:
            if num_sent < end and num_sent - num_answered < depth:
                sealed = self._coding.seal(block_hashes[num_sent], payloads[num_sent])
                if sealed is None:
                    unsealed.add(num_sent)
                else:
                    header, payload = sealed[0], memoryview(sealed[1])
                    command = self._values.set(block_hashes[num_sent], header, payload, lifetimes_ms[num_sent])
                    streams[num_sent % len(streams)].send(command)
                num_sent += 1
                continue
            if num_answered in unsealed:
                num_answered += 1
                continue
            if self._is_stored(streams[num_answered % len(streams)]):
                report.stored.add(num_answered)
            else:
                report.is_full = True
            num_answered += 1
            if report.is_full or should_stop():
                end = num_sent

    def _open(self, num_wanted: int) -> list[RespStream]:
        """Connections that were fine a moment ago. Raises ConnectorError."""
        num_streams = max(1, min(num_wanted, self._num_connections))
        for stream in [stream for stream in self._streams[:num_streams] if stream.is_stale()]:
            self._streams.remove(stream)
            stream.close()
        while len(self._streams) < num_streams:
            self._streams.append(self._server.open_stream())
        return self._streams[:num_streams]

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

    def _is_stored(self, stream: RespStream) -> bool:
        """Read the replies of one block's commands; False when the server is full. Raises RespError for any other refusal."""
        refusals = []
        for _part in self._values.parts:
            try:
                stream.receive_status()
            except RespError as error:
                refusals.append(error)
        for refusal in refusals:
            if refusal.word not in _FULL:
                raise refusal
        return not refusals
