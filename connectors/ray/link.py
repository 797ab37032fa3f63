"""The thread that asks a directory what its store holds, has one made where none listens, and knows whether there is one.

It has a connection of its own, so that a lookup never waits behind blocks. The step thread only leaves questions here.
"""

from __future__ import annotations

import enum
import itertools
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from connectors.known_blocks import KnownBlocks
from connectors.ray.client import DirectoryConnection, DirectoryDoor, DirectoryStarter
from connectors.ray.messages import Operation, StoreStatus, pack_names
from core.errors import ConnectorError

logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 1.0
_RETRY_S = 0.05
_FAILED_RETRY_S = 0.2
_PATIENCE_S = 0.25  # for a connection that should be there at once
_MAX_QUESTIONS = 4096


class LinkState(enum.Enum):
    """CONNECTING lasts for a moment after a start, or after the loss of a connection."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True)
class _Question:
    """Where the chain of a request ends in the store; position: everything before it, from the first block on, is there."""

    request_id: str
    block_hashes: Sequence[bytes]
    position: int


class RayLink:
    """Answers questions into `known`, and calls on_news after that; on_lost, when the directory may have ended."""

    def __init__(
        self,
        door: DirectoryDoor,
        starter: DirectoryStarter,
        known: KnownBlocks,
        batch_size: int,
        on_news: Callable[[], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._door = door
        self._starter = starter
        self._known = known
        self._batch_size = batch_size
        self._on_news = on_news
        self._on_lost = on_lost
        self._condition = threading.Condition()  # of the six below
        self._questions: dict[str, _Question] = {}
        self._being_answered: frozenset[str] = frozenset()
        self._state = LinkState.CONNECTING
        self._is_kicked = False
        self._is_closing = False
        self._last_status: StoreStatus | None = None
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-ray-link", daemon=True)
        self._last_complaint = ""
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
    def status(self) -> StoreStatus:
        """What the directory said last. Any thread."""
        return self._last_status or StoreStatus()

    # -- step thread ---------------------------------------------------------------------------------------------------
    def ask(self, request_id: str, block_hashes: Sequence[bytes], first: int) -> None:
        """Find out where a request's chain ends in the store, from its first-th block on. Never blocks on the directory."""
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
        """Until there is a directory, or it is known why there is none."""
        with self._condition:
            self._condition.wait_for(lambda: self._state is LinkState.UP or bool(self._last_complaint), timeout_s)

    # -- worker threads ------------------------------------------------------------------------------------------------
    def wait_up(self) -> bool:
        """Whether there is a directory; tries it now, but waits for a moment only."""
        with self._condition:
            if self._state is not LinkState.UP and not self._is_closing:
                self._is_kicked = True
                self._condition.notify_all()
                self._condition.wait_for(self._is_decided, 2 * _PATIENCE_S)
            return self._state is LinkState.UP

    def _is_decided(self) -> bool:
        return self._state is LinkState.UP or self._is_closing or (self._state is LinkState.DOWN and not self._is_kicked)

    def note_status(self, status: StoreStatus) -> None:
        """Take the status of an answer, from any connection. An epoch ends when blocks have gone since the last."""
        with self._condition:
            last, self._last_status = self._last_status, status
            num_lost = status.num_evicted - last.num_evicted if last is not None else 0
            self.num_evictions += max(0, num_lost)
            has_lost = num_lost > 0 or (last is not None and status.num_blocks < last.num_blocks)
        if has_lost:
            self._known.begin_epoch()

    def stop(self) -> None:
        """Tell the thread to end, and those who wait for it that it will. Safe to repeat."""
        with self._condition:
            self._is_closing = True
            self._condition.notify_all()
        self._wake()

    def close(self, timeout_s: float) -> bool:
        """After stop() and the door's close(): whether the thread has ended. Safe to repeat."""
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
        connecting_since_s = time.monotonic()
        while not self._is_closing:
            connection = self._try_connect()
            if connection is None:
                is_late = time.monotonic() - connecting_since_s > _PATIENCE_S
                with self._condition:
                    if is_late and self._state is not LinkState.DOWN:
                        self._set_state(LinkState.DOWN)
                    self._is_kicked = False
                    self._condition.notify_all()
                    pause_s = _FAILED_RETRY_S if self._last_complaint else _RETRY_S
                    self._condition.wait_for(lambda: self._is_kicked or self._is_closing, pause_s)
                continue
            self._starter.stop()
            self._starter.last_failure = ""
            with self._condition:
                self._last_status = None
            self._known.begin_epoch()
            self.note_status(connection.status)
            with self._condition:
                self._set_state(LinkState.UP)
            self._serve(connection)
            connection.stream.close()
            self._on_lost()
            self._known.begin_epoch()
            with self._condition:
                self._being_answered = frozenset()
                self._set_state(LinkState.CONNECTING)
            connecting_since_s = time.monotonic()
        self._starter.stop()
        with self._condition:
            self._set_state(LinkState.DOWN)

    def _set_state(self, state: LinkState) -> None:
        """The caller holds the condition."""
        self._state = state
        if state is LinkState.DOWN:
            self._questions.clear()
        self._condition.notify_all()

    def _try_connect(self) -> DirectoryConnection | None:
        try:
            return self._door.open()
        except ConnectionRefusedError:  # nobody listens
            try:
                self._starter.ensure()
            except OSError as error:
                self._complain(f"no directory can be started: {error}")
            if self._starter.last_failure:
                self._complain(f"no directory yet: {self._starter.last_failure}")
        except (OSError, ConnectorError) as error:
            self._complain(f"the directory does not serve: {error}")
        return None

    def _serve(self, connection: DirectoryConnection) -> None:
        """Answer questions until the connection fails, or the link is closed."""
        poller = select.poll()
        poller.register(connection.stream, select.POLLIN)
        poller.register(self._wake_reader, select.POLLIN)
        status_due_s = time.monotonic() + _STATUS_INTERVAL_S
        unfinished: list[_Question] = []
        try:
            while not self._is_closing:
                wait_s = 0.0 if unfinished else max(0.0, status_due_s - time.monotonic())
                ready = {descriptor for descriptor, _event in poller.poll(wait_s * 1000)}
                if connection.stream.fileno() in ready:
                    raise ConnectionResetError("the directory has ended")
                if self._wake_reader.fileno() in ready:
                    self._wake_reader.recv(4096)
                unfinished += self._take_questions()
                if unfinished:
                    question = unfinished.pop(0)
                    unfinished += self._answer(connection, question)
                    with self._condition:
                        self._being_answered = frozenset(other.request_id for other in unfinished)
                elif time.monotonic() >= status_due_s:
                    self.note_status(connection.stream.ask(Operation.LOOKUP, b"", 0)[1])
                    status_due_s = time.monotonic() + _STATUS_INTERVAL_S
                    self._last_complaint = ""  # it is well: what happens next is news
        except (OSError, ConnectorError) as error:
            self.num_errors += not self._is_closing
            self._complain(f"lost the directory: {error}")

    def _take_questions(self) -> list[_Question]:
        with self._condition:
            taken = list(self._questions.values())
            self._being_answered |= frozenset(self._questions)
            self._questions.clear()
        return taken

    def _answer(self, connection: DirectoryConnection, question: _Question) -> list[_Question]:
        """One round trip, for a batch of its blocks. The question again if its chain goes on after them."""
        epoch = self._known.epoch
        batch = list(itertools.islice(question.block_hashes, question.position, question.position + self._batch_size))
        flags, status = connection.stream.ask(Operation.LOOKUP, pack_names(batch), len(batch))
        self.note_status(status)
        num_stored = len(batch) - len(flags.lstrip(b"\x01"))
        self._known.add(batch[:num_stored], epoch)
        question.position += num_stored
        if num_stored == len(batch) == self._batch_size:
            return [question]
        self._known.remove(batch[num_stored : num_stored + 1])
        self._known.note_check(question.request_id, batch[num_stored] if num_stored < len(batch) else None, epoch)
        self._on_news()
        return []

    def _complain(self, text: str) -> None:
        """Log a fault once, not at each of a hundred attempts."""
        if text != self._last_complaint and not self._is_closing:
            self._last_complaint = text
            logger.warning("ray: %s", text)
