"""One transfer's blocks on their way from one source into the pool's memory, over several streams at once.

Each stream has a thread of the connector's for the time of the transfer, and asks for a few blocks at a time, and for the next
when it has those; the other streams go on meanwhile. Asking ahead costs an eighth more CPU time on one host (measured): what is
sent long before it is received has left the cores' caches by then. On a far link more streams do the same (num_streams).
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from connectors.stored_block import BLOCK_HEADER_BYTES, BlockCheck, check_block
from connectors.tcp.frames import MAX_PULLED, Kind, pack_question
from connectors.tcp.source import Source
from connectors.tcp.stream import BlockStream

logger = logging.getLogger(__name__)

_UNIT_BYTES = 1024 * 1024  # asked for at a time
_PIECE_BYTES = 384 * 1024  # received and then summed up while it is in the core's cache


@dataclass(slots=True)
class PullReport:
    """What became of a transfer's blocks, by position; None: its holder has it no longer. error: why some have no entry, if that
    is the reason."""

    checks: dict[int, BlockCheck | None] = field(default_factory=dict)
    error: Exception | None = None


class Pull:
    """Blocks of one source. run_stream() is called by as many threads as there shall be streams, and does not raise.

    When all of them have returned nothing is written to the payloads any more.
    """

    def __init__(
        self,
        source: Source,
        fingerprint: bytes,
        block_hashes: Sequence[bytes],
        payloads: Sequence[memoryview],
        positions: Sequence[int],
        report: PullReport,
        should_stop: Callable[[], object],
    ) -> None:
        """block_hashes and payloads are the whole transfer's; positions are those that this source has, in order."""
        self._source = source
        self._fingerprint = fingerprint
        self._block_hashes = block_hashes
        self._payloads = payloads
        self._report = report
        self._should_stop = should_stop
        block_bytes = len(payloads[0])
        size = min(MAX_PULLED, max(1, _UNIT_BYTES // block_bytes))
        self._units = deque(list(positions[start : start + size]) for start in range(0, len(positions), size))
        self._mutex = threading.Lock()

    @property
    def num_units(self) -> int:
        """More streams than this would have nothing to do."""
        return len(self._units)

    def run_stream(self) -> None:
        """Pull units over one stream until there are none, or one is not what was asked for."""
        try:
            stream = self._source.take_stream()
        except OSError as error:
            self._fail(error)
            return
        try:
            self._pull_all(stream)
        except Exception as error:  # the top of a job: a fault costs its transfer, not the thread
            if not isinstance(error, OSError):
                logger.exception("a pull failed")
            self._source.drop_stream(stream)  # first: then nothing more can arrive
            self._fail(error)
        else:
            self._source.give_back_stream(stream)

    def _pull_all(self, stream: BlockStream) -> None:
        while (unit := self._next_unit()) is not None:
            stream.send([pack_question(Kind.PULL, [self._block_hashes[position] for position in unit])])
            self._receive(stream, unit)

    def _next_unit(self) -> list[int] | None:
        with self._mutex:
            if not self._units or self._should_stop():
                return None
            return self._units.popleft()

    def _receive(self, stream: BlockStream, unit: Sequence[int]) -> None:
        _kind, count = stream.receive_head(Kind.BLOCKS)
        if count > len(unit):
            raise ConnectionError("it sends more blocks than were asked for")
        header = memoryview(bytearray(BLOCK_HEADER_BYTES))
        checks = self._report.checks
        for position in unit[:count]:
            payload, checksum = self._payloads[position], xxhash.xxh3_64()
            for start in range(0, len(payload), _PIECE_BYTES):
                piece = payload[start : start + _PIECE_BYTES]
                stream.fill([piece] if start else [header, piece])
                checksum.update(piece)
            name = self._block_hashes[position]
            checks[position] = check_block(bytes(header), payload, self._fingerprint, name, payload_checksum=checksum.intdigest())
        for position in unit[count:]:  # it has them no longer, or not all
            checks[position] = None
        if any(checks[position] is not BlockCheck.OK for position in unit):
            self._end_asking(unit[0])

    def _end_asking(self, position: int) -> None:
        """What comes after a block that is missing is of no use."""
        with self._mutex:
            self._units = deque(unit for unit in self._units if unit[0] < position)

    def _fail(self, error: Exception) -> None:
        with self._mutex:
            self._report.error = error
            self._units.clear()
