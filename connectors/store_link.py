"""The thread that asks a store's server what it holds, and knows whether it can be reached at all. Subclasses speak to one kind.

It has a connection of its own, so that a lookup never waits behind bulk transfers. The step thread only leaves questions here;
data moves on other connections, which are opened while this one is up.
"""

from __future__ import annotations

import enum
import itertools
import logging
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

from connectors.known_blocks import KnownBlocks
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1.0
_FIRST_RETRY_S = 0.05
_WAIT_UP_S = 0.25  # a connection attempt older than this is one that hangs
_WAIT_CONNECTING_S = 1.0  # the same for the first attempt, which may be made by a process that is busy starting
_MAX_QUESTIONS = 4096
_QUESTIONS_PER_ROUND = 8


class LinkState(enum.Enum):
    """CONNECTING lasts for the first attempt after a start, or after the loss of a connection that had been well."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


class LinkStream(Protocol):
    """One of a connection's sockets."""

    def fileno(self) -> int:
        """For poll."""

    def is_stale(self) -> bool:
        """Whether it ended, or something came, while nothing was asked."""


class LinkConnection(Protocol):
    """One attempt's success, over one socket or several."""

    def close(self) -> None:
        """Let go of it. Does not raise."""


C = TypeVar("C", bound=LinkConnection)


@dataclass(slots=True)
class _Question:
    """Where the chain of a request ends in the store; position: everything before it, from the first block on, is there."""

    request_id: str
    block_hashes: Sequence[bytes]
    position: int


class StoreLink(ABC, Generic[C]):
    """Answers questions into `known`, and calls on_news after that.

    The methods of subclasses run on the link's own thread; they may raise `faults`, which end the connection. stop() is to be
    followed by whatever ends their waits, and that by close().
    """

    name: ClassVar[str]
    max_retry_s: ClassVar[float]  # between attempts, which come at growing intervals
    faults: ClassVar[tuple[type[Exception], ...]] = (OSError, ConnectorError)

    def __init__(self, known: KnownBlocks, batch_size: int, on_news: Callable[[], None]) -> None:
        """batch_size: how many blocks of a chain are asked about at once."""
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
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"kv-{self.name}-link", daemon=True)
        self._last_complaint = ""
        self._fault = ""  # what ended the last attempt, or the last connection
        self.num_evictions = 0
        self.num_errors = 0

    def start(self) -> None:
        """Connect, in the background."""
        self._thread.start()

    @property
    def state(self) -> LinkState:
        """Any thread."""
        return self._state

    @property
    def complaint(self) -> str:
        """Why the server cannot be used; "" while it can. Any thread."""
        return self._fault if self._state is LinkState.DOWN else ""

    # -- of each kind of server ----------------------------------------------------------------------------------------
    @abstractmethod
    def _connect(self) -> C:
        """A connection that serves, whose status has been noted."""

    @abstractmethod
    def _streams(self, connection: C) -> Iterable[LinkStream]:
        """Its sockets."""

    @abstractmethod
    def _look_up(self, connection: C, block_hashes: Sequence[bytes]) -> bytes:
        """A byte for each: 1 for what is stored."""

    @abstractmethod
    def _ask_status(self, connection: C) -> None:
        """Once a second."""

    def _check(self, connection: C) -> None:
        """Raises what ends the connection, if something does that its sockets do not show."""

    def _lost(self) -> None:
        """A connection has ended."""

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

    def wait_first(self, timeout_s: float) -> None:
        """Until the server is reached, or it is known why it cannot be."""
        with self._condition:
            self._condition.wait_for(lambda: self._state is LinkState.UP or bool(self._last_complaint), timeout_s)

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

    def stop(self) -> None:
        """Tell the thread to end, and those who wait for it that it will. Safe to repeat."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._wake()

    def close(self, timeout_s: float) -> bool:
        """Whether the thread has ended. Safe to repeat."""
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
            try:
                connection = self._connect()
            except self.faults as error:
                self._fault = str(error)
                self._complain(self._fault)
                self._pause(pause_s)
                pause_s = min(2 * pause_s, self.max_retry_s)
                continue
            pause_s = _FIRST_RETRY_S
            with self._condition:
                self._attempt_started_s = None
                self._set_state(LinkState.UP)
            up_since_s = time.monotonic()
            fault = self._serve(connection)
            connection.close()
            self._lost()
            self._known.begin_epoch()
            with self._condition:
                self._being_answered = frozenset()
            is_lost = isinstance(fault, ConnectionError) and time.monotonic() - up_since_s > _STATUS_INTERVAL_S
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
        self._state = state
        if state is LinkState.DOWN:
            self._questions.clear()
        self._condition.notify_all()

    def _serve(self, connection: C) -> Exception | None:
        """Answer questions until the connection fails, and with what; None: the link is closed."""
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        unfinished: list[_Question] = []
        status_due_s = time.monotonic() + _STATUS_INTERVAL_S
        try:
            stream_by_descriptor = {stream.fileno(): stream for stream in self._streams(connection)}
            for descriptor in stream_by_descriptor:
                poller.register(descriptor, select.POLLIN)
            while not self._is_closing:
                wait_s = 0.0 if unfinished else max(0.0, status_due_s - time.monotonic())
                ready = {descriptor for descriptor, _event in poller.poll(wait_s * 1000)}
                if any(stream_by_descriptor[found].is_stale() for found in ready & stream_by_descriptor.keys()):
                    raise ConnectionError("the other end closed the connection")
                self._check(connection)
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                unfinished += self._take_questions()
                if unfinished:
                    now, later = unfinished[:_QUESTIONS_PER_ROUND], unfinished[_QUESTIONS_PER_ROUND:]
                    unfinished = later + self._answer(connection, now)
                    with self._condition:
                        self._being_answered = frozenset(question.request_id for question in unfinished)
                if time.monotonic() >= status_due_s:
                    self._ask_status(connection)
                    status_due_s = time.monotonic() + _STATUS_INTERVAL_S
                    self._last_complaint = ""  # it is well: what happens next is news
        except self.faults as error:
            self.num_errors += not self._is_closing
            self._fault = f"lost: {error}"
            self._complain(self._fault)
            return error
        return None

    def _take_questions(self) -> list[_Question]:
        with self._condition:
            taken = list(self._questions.values())
            self._being_answered |= frozenset(self._questions)
            self._questions.clear()
        return taken

    def _answer(self, connection: C, questions: list[_Question]) -> list[_Question]:
        """One round trip: a batch of blocks of each question. Those whose chain goes on after it are to be asked again."""
        epoch = self._known.epoch
        batches = [list(itertools.islice(q.block_hashes, q.position, q.position + self._batch_size)) for q in questions]
        flags = self._look_up(connection, list(itertools.chain.from_iterable(batches)))
        unfinished, start = [], 0
        for question, batch in zip(questions, batches, strict=True):
            num_stored = len(batch) - len(flags[start : start + len(batch)].lstrip(b"\x01"))
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
        if text and text != self._last_complaint and not self._is_closing:
            self._last_complaint = text
            logger.warning("%s: %s", self.name, text)
