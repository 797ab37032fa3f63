"""The link to a Redis server, or to all of a cluster: what they are asked, and what is noted of their clocks and limits."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

from connectors.known_blocks import KnownBlocks
from connectors.redis.node_streams import NodeStreams
from connectors.redis.resp_stream import Reply, RespError, RespStream, pack_command
from connectors.redis.server import Node, RedisServer
from connectors.redis.values import BlockValues
from connectors.store_link import StoreLink
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

STATUS_COMMANDS = pack_command(b"DBSIZE") + pack_command(b"INFO", b"stats")
NUM_STATUS_REPLIES = 2
_HARMFUL_POLICIES = {
    "noeviction": "when it is full it stores nothing new",
    "allkeys-lfu": "it evicts new blocks first, and from the middle of prefixes",
    "volatile-lfu": "it evicts new blocks first, and from the middle of prefixes",
}


class RedisLink(StoreLink[NodeStreams]):
    """Close the server after stop()."""

    name: ClassVar[str] = "redis"
    max_retry_s: ClassVar[float] = 1.0
    faults: ClassVar[tuple[type[Exception], ...]] = (OSError, ConnectorError, RespError)

    def __init__(
        self, server: RedisServer, values: BlockValues, known: KnownBlocks, batch_size: int, on_news: Callable[[], None]
    ) -> None:
        super().__init__(known, batch_size, on_news)
        self._server = server
        self._values = values
        self._lost_counts: dict[Node, tuple[int, int]] = {}  # evicted and expired keys when last seen; of the condition
        self._clock_offset_ms = time.time() * 1000 - time.monotonic() * 1000
        self._num_keys: dict[Node, int] = {}
        self.max_memory_bytes = 0

    def now_ms(self) -> int:
        """The server's clock, in Unix milliseconds."""
        return int(time.monotonic() * 1000 + self._clock_offset_ms)

    @property
    def num_keys(self) -> int:
        """Of all servers, as they said last."""
        return sum(list(self._num_keys.values()))

    def note_status(self, replies_by_node: Mapping[Node, Sequence[Reply | RespError]]) -> None:
        """Take the replies of STATUS_COMMANDS, from any connection. An epoch ends when blocks have gone since the last."""
        for node, replies in replies_by_node.items():
            self._note_status_of(node, replies)

    def _note_status_of(self, node: Node, replies: Sequence[Reply | RespError]) -> None:
        num_keys, statistics = replies
        is_fewer = False
        if isinstance(num_keys, int):
            is_fewer, self._num_keys[node] = num_keys < self._num_keys.get(node, 0), num_keys
        if not isinstance(statistics, bytes):  # a user who may not see them
            return
        fields = parse_info(statistics)
        counts = int(fields.get("evicted_keys", 0)), int(fields.get("expired_keys", 0))
        with self._condition:
            last, self._lost_counts[node] = self._lost_counts.get(node), counts
            is_same = last in (None, counts) and not is_fewer
            if last is not None:  # fewer than before: the server was started anew
                self.num_evictions += counts[0] - (last[0] if counts[0] >= last[0] else 0)
        if not is_same:
            self._known.begin_epoch()

    def _connect(self) -> NodeStreams:
        streams = NodeStreams(self._server)
        try:
            self._server.locate()
            streams.first_of_each()
            try:
                self._greet(streams)
            except (OSError, RespError) as error:
                raise ConnectorError(f"{self._server.address} does not serve: {error}") from error
        except BaseException:
            streams.close()
            raise
        return streams

    def _greet(self, streams: NodeStreams) -> None:
        """Learn the server's clock, limits and counters. Raises RespError when it does not serve (loading, wants a password)."""
        commands = pack_command(b"TIME") + pack_command(b"INFO", b"memory") + STATUS_COMMANDS
        greetings = streams.ask_each(commands, 2 + NUM_STATUS_REPLIES)
        limits, policies = [], set()
        for moment, memory, *status in greetings.values():
            if isinstance(moment, RespError):
                raise moment
            if isinstance(moment, list):  # of a cluster, any server's: lifetimes are what counts, and they are long
                seconds, microseconds = (int(part) for part in moment if isinstance(part, bytes))
                self._clock_offset_ms = seconds * 1000 + microseconds / 1000 - time.monotonic() * 1000
            if isinstance(status[0], RespError) and status[0].word in ("LOADING", "NOAUTH"):
                raise status[0]
            fields = parse_info(memory) if isinstance(memory, bytes) else {}
            limits.append(int(fields.get("maxmemory", 0)))
            policies.add(fields.get("maxmemory_policy", ""))
        self.max_memory_bytes = sum(limits) if all(limits) else 0
        self._num_keys = {node: self._num_keys.get(node, 0) for node in greetings}
        self._known.begin_epoch()
        self.note_status({node: replies[2:] for node, replies in greetings.items()})
        for policy in sorted(policies & _HARMFUL_POLICIES.keys()):
            harm, address = _HARMFUL_POLICIES[policy], self._server.address
            self._complain(f"{address} has maxmemory-policy {policy}: {harm}; volatile-ttl evicts old prefixes from their ends")
        logger.info("connected to redis at %s", self._server.address)

    def _streams(self, connection: NodeStreams) -> Iterable[RespStream]:
        return connection.first_of_each().values()

    def _check(self, connection: NodeStreams) -> None:
        if self._server.has_moved:
            raise ConnectionError("slots have moved")

    def _look_up(self, connection: NodeStreams, block_hashes: Sequence[bytes]) -> bytes:
        digits, _status = connection.ask(block_hashes, lambda position: self._values.exists(block_hashes[position]), 1)
        return b"".join(digits).replace(b"%d" % self._values.num_parts, b"\x01")

    def _ask_status(self, connection: NodeStreams) -> None:
        self.note_status(connection.ask_each(STATUS_COMMANDS, NUM_STATUS_REPLIES))


def parse_info(text: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
