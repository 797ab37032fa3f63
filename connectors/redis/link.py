"""The thread that asks a Redis server what it holds, and knows whether it can be reached at all.

It has one small connection of its own, so that a lookup never waits behind bulk transfers' replies. The step thread only leaves
questions here; data moves on other connections (see lane), which are opened while this one is up.
"""

from __future__ import annotations

import enum
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from connectors.known_blocks import KnownBlocks
from connectors.redis.node_streams import NodeStreams
from connectors.redis.resp_stream import Reply, RespError, pack_command
from connectors.redis.server import Node, RedisServer
from connectors.redis.values import BlockValues
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

STATUS_COMMANDS = pack_command(b"DBSIZE") + pack_command(b"INFO", b"stats")
NUM_STATUS_REPLIES = 2
_STATUS_INTERVAL_S = 1.0
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_WAIT_UP_S = 0.25  # a connection attempt older than this is one that hangs
_WAIT_CONNECTING_S = 1.0  # the same for the first attempt, which may be made by a process that is busy starting
_MAX_QUESTIONS = 4096
_QUESTIONS_PER_ROUND = 8
_HARMFUL_POLICIES = {
    "noeviction": "when it is full it stores nothing new",
    "allkeys-lfu": "it evicts new blocks first, and from the middle of prefixes",
    "volatile-lfu": "it evicts new blocks first, and from the middle of prefixes",
}


class LinkState(enum.Enum):
    """CONNECTING lasts for the first attempt after a start, or after the loss of a connection that had been well."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Question:
    """Where the chain of a request ends in the store; position: everything before it, from the first block on, is there."""

    request_id: str
    block_hashes: Sequence[bytes]
    position: int


class RedisLink:
    """Answers questions into `known`, and calls on_news after that."""

    def __init__(
        self, server: RedisServer, values: BlockValues, known: KnownBlocks, batch_size: int, on_news: Callable[[], None]
    ) -> None:
        self._server = server
        self._values = values
        self._known = known
        self._batch_size = batch_size
        self._on_news = on_news
        self._condition = threading.Condition()  # of the six below
        self._questions: dict[str, _Question] = {}
        self._being_answered: frozenset[str] = frozenset()
        self._state = LinkState.CONNECTING
        self._attempt_started_s: float | None = time.monotonic()
        self._is_kicked = False
        self._is_closing = False
        self._lost_counts: dict[Node, tuple[int, int]] = {}  # evicted and expired keys when last seen
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-redis-link", daemon=True)
        self._clock_offset_ms = time.time() * 1000 - time.monotonic() * 1000
        self._last_complaint = ""
        self._num_keys: dict[Node, int] = {}
        self.num_evictions = 0
        self.max_memory_bytes = 0
        self.num_errors = 0

    def start(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    @property
    def state(self) -> LinkState:
        """Any thread."""
        return self._state

    def now_ms(self) -> int:
        """The server's clock, in Unix milliseconds."""
        return int(time.monotonic() * 1000 + self._clock_offset_ms)

    # -- step thread ---------------------------------------------------------------------------------------------------
    def ask(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> None:
        """Find out where a request's chain ends in the store, from its first-th block on. Never blocks on the server."""
        if request_id in self._being_answered or request_id in self._questions:
            return
        with self._condition:
            if len(self._questions) >= _MAX_QUESTIONS:
                return
            is_awake = bool(self._questions)  # it takes all that there are, at once
            self._questions[request_id] = _Question(request_id, block_hashes, first)
        if not is_awake:
            self._wake()

    # -- worker threads ------------------------------------------------------------------------------------------------
    def wait_up(self) -> bool:
        """Whether the server can be reached; tries it now, but waits for a moment only."""
        with self._condition:
            if self._state is not LinkState.UP and not self._is_closing:
                self._is_kicked = True
                self._condition.notify_all()
                self._condition.wait_for(self._is_decided, self._wait_up_s)
            return self._state is LinkState.UP

    def _is_decided(self) -> bool:
        if self._state is LinkState.UP or self._is_closing:
            return True
        started_s = self._attempt_started_s
        if started_s is None:  # between two attempts; the kick is still to be seen, or has failed
            return not self._is_kicked
        return time.monotonic() - started_s > self._wait_up_s

    @property
    def _wait_up_s(self) -> float:
        return _WAIT_CONNECTING_S if self._state is LinkState.CONNECTING else _WAIT_UP_S

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

    def stop(self) -> None:
        """Tell the thread to end, and those who wait for it that it will. Safe to repeat."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._wake()

    def close(self, timeout_s: float) -> bool:
        """After stop(), and when the server's connections have been shut down: whether the thread has ended. Safe to repeat."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._wake_reader.close()
            self._wake_writer.close()
        return not self._thread.is_alive()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"!")
        except OSError:  # it is full: awake already; or closed
            return

    # -- the link's own thread -----------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._is_closing:
            streams = self._try_connect()
            if streams is None:
                self._pause(pause_s)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
                continue
            pause_s = _FIRST_RETRY_S
            with self._condition:
                self._attempt_started_s = None
                self._set_state(LinkState.UP)
            up_since_s = time.monotonic()
            error = self._serve(streams)
            streams.close()
            self._known.begin_epoch()
            with self._condition:
                self._being_answered = frozenset()
            is_lost = isinstance(error, ConnectionError) and time.monotonic() - up_since_s > _STATUS_INTERVAL_S
            if is_lost:  # was well until now: worth an attempt at once
                with self._condition:
                    self._attempt_started_s = time.monotonic()
                    self._set_state(LinkState.CONNECTING)
            else:
                self._pause(pause_s)
        with self._condition:
            self._set_state(LinkState.DOWN)

    def _pause(self, pause_s: float) -> None:
        """Be down, until it is time for another attempt or somebody wants one."""
        with self._condition:
            self._attempt_started_s = None
            self._is_kicked = False
            self._set_state(LinkState.DOWN)
            self._condition.wait_for(lambda: self._is_kicked or self._is_closing, pause_s)
            self._attempt_started_s = time.monotonic()

    def _set_state(self, state: LinkState) -> None:
        """The caller holds the condition."""
        if state is not self._state:
            self._state = state
            if state is LinkState.DOWN:
                self._questions.clear()
        self._condition.notify_all()

    def _try_connect(self) -> NodeStreams | None:
        streams = NodeStreams(self._server)
        try:
            self._server.locate()
            streams.first_of_each()
        except ConnectorError as error:
            streams.close()
            self._complain(str(error))
            return None
        try:
            self._greet(streams)
        except (OSError, RespError) as error:
            streams.close()
            self._complain(f"{self._server.address} does not serve: {error}")
            return None
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

    def _serve(self, streams: NodeStreams) -> Exception | None:
        """Answer questions until the connection fails, and with what; None: the link is closed."""
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        stream_by_descriptor = {stream.fileno(): stream for stream in streams.first_of_each().values()}
        for stream in stream_by_descriptor.values():
            poller.register(stream, select.POLLIN)
        status_due_s = time.monotonic() + _STATUS_INTERVAL_S
        unfinished: list[_Question] = []
        try:
            while not self._is_closing:
                wait_s = 0.0 if unfinished else max(0.0, status_due_s - time.monotonic())
                ready = {descriptor for descriptor, _event in poller.poll(wait_s * 1000)}
                if any(stream_by_descriptor[found].is_stale() for found in ready & stream_by_descriptor.keys()):
                    raise ConnectionError("the server closed the connection")
                if self._server.has_moved:
                    raise ConnectionError("slots have moved")
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                unfinished += self._take_questions()
                if unfinished:
                    now, later = unfinished[:_QUESTIONS_PER_ROUND], unfinished[_QUESTIONS_PER_ROUND:]
                    unfinished = later + self._answer(streams, now)
                    with self._condition:
                        self._being_answered = frozenset(question.request_id for question in unfinished)
                if time.monotonic() >= status_due_s:
                    self.note_status(streams.ask_each(STATUS_COMMANDS, NUM_STATUS_REPLIES))
                    status_due_s = time.monotonic() + _STATUS_INTERVAL_S
                    self._last_complaint = ""  # it is well: what happens next is news
        except (OSError, RespError) as error:
            self.num_errors += not self._is_closing
            self._complain(f"lost {self._server.address}: {error}")
            return error
        return None

    def _take_questions(self) -> list[_Question]:
        with self._condition:
            taken = list(self._questions.values())
            self._being_answered |= frozenset(self._questions)
            self._questions.clear()
        return taken

    def _answer(self, streams: NodeStreams, questions: list[_Question]) -> list[_Question]:
        """One round trip: a batch of blocks of each question. Those whose chain goes on after it are to be asked again."""
        epoch = self._known.epoch
        batches = [list(itertools.islice(q.block_hashes, q.position, q.position + self._batch_size)) for q in questions]
        asked = list(itertools.chain.from_iterable(batches))
        digits, _status = streams.ask(asked, lambda position: self._values.exists(asked[position]), 1)
        stored = b"".join(digits).replace(b"%d" % self._values.num_parts, b"+")
        unfinished, start = [], 0
        for question, batch in zip(questions, batches, strict=True):
            num_stored = len(batch) - len(stored[start : start + len(batch)].lstrip(b"+"))
            start += len(batch)
            self._known.add(batch[:num_stored], epoch)
            question.position += num_stored
            if num_stored == len(batch) == self._batch_size:
                unfinished.append(question)
                continue
            self._known.remove(batch[num_stored : num_stored + 1])
            self._known.note_check(question.request_id, batch[num_stored] if num_stored < len(batch) else None, epoch)
        if len(unfinished) < len(questions):
            self._on_news()
        return unfinished

    def _complain(self, text: str) -> None:
        """Log a fault once, not at each of a hundred attempts."""
        if text != self._last_complaint and not self._is_closing:
            self._last_complaint = text
            logger.warning("redis: %s", text)


def parse_info(text: bytes) -> dict[str, str]:
    """The fields of an INFO reply."""
    lines = (line.partition(":") for line in text.decode(errors="replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
