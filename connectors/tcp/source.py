"""A puller's view of one source: whether it can be reached, which blocks it has said to hold, and streams to pull them over.

One thread per source asks, on a small connection of its own, so that a question never waits behind blocks. The step thread
only leaves inquiries here. What a source said is believed while that connection lasts: a source started anew has nothing.
"""

from __future__ import annotations

import enum
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from connectors.tcp.frames import ITEM_BYTES, MAX_ITEMS, NO_LEASE, EndPoint, Kind, pack_question
from connectors.tcp.stream import BlockStream, greet_source
from core.addresses import host_of, is_loopback

logger = logging.getLogger(__name__)

_TICK_S = 0.1  # how late the end of a connection may be noticed over which nothing is asked
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_QUICK_S = 0.1  # an attempt that failed so soon costs a request next to nothing, so each one may try again
_LEASE_IDLE_S = 2.0  # nobody has asked about the request for so long: it has what it wanted, or is gone
_MAX_INQUIRIES = 1024  # that wait for one source
_PIPELINED = 16  # of them asked at once: their answers must fit into a socket's buffer


class SourceState(enum.Enum):
    """CONNECTING: the first attempt, or one that a request waits for."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"


@dataclass(slots=True, eq=False)
class Session:
    """One control connection. What was said over it counts while it is open."""

    source: Source
    process_id: bytes
    is_open: bool = True


@dataclass(slots=True, eq=False)
class Inquiry:
    """Which of a request's blocks from position `first` on some sources hold.

    pending and answers change while sources answer; everything else is its maker's. may_wait_until_s: nobody waits for an answer
    that is not there by then. Times are time.monotonic's.
    """

    request_id: str
    lease_name: bytes
    block_hashes: Sequence[bytes]
    first: int
    sources: tuple[Source, ...]
    started_s: float
    may_wait_until_s: float
    last_asked_s: float
    is_loading: bool = False
    pending: set[Source] = field(default_factory=set)
    answers: dict[Source, tuple[Session, frozenset[bytes]]] = field(default_factory=dict)
    is_settled: threading.Event | None = None  # where a thread waits for it

    @property
    def must_wait(self) -> bool:
        """Whether an answer may still come in time."""
        return bool(self.pending) and time.monotonic() < self.may_wait_until_s

    def settle(self, source: Source) -> None:
        """This source has answered, or will not."""
        self.pending.discard(source)
        if not self.pending and self.is_settled is not None:
            self.is_settled.set()


class Source:
    """A node that may have blocks, at HOST:PORT. Any thread."""

    def __init__(
        self,
        address: str,
        end: EndPoint,
        connect_timeout_s: float,
        op_timeout_s: float,
        renew_s: float,
        on_news: Callable[[], None],
    ) -> None:
        self.address = address
        self.state = SourceState.CONNECTING
        self.session: Session | None = None
        self.last_named_s = time.monotonic()
        self.num_errors = 0
        self._end = end
        self._connect_timeout_s = connect_timeout_s
        self._op_timeout_s = op_timeout_s
        self._renew_s = renew_s
        self._on_news = on_news
        self._condition = threading.Condition()  # of all below
        self._inquiries: list[Inquiry] = []
        self._releases: list[bytes] = []
        self._suspects: list[bytes] = []
        self._leases: dict[bytes, Inquiry] = {}
        self._idle_streams: list[BlockStream] = []
        self._open_streams: set[BlockStream] = set()
        self._is_closing = False
        self._is_kicked = False
        self._failed_quickly = False
        self._last_complaint = ""
        self._thread = threading.Thread(target=self._run, name=f"kv-tcp-{address}", daemon=True)
        self._thread.start()

    # -- the step thread, and workers ----------------------------------------------------------------------------------
    def ask(self, inquiry: Inquiry) -> bool:
        """Have an inquiry answered, if this source can be reached or it costs little to see whether it can."""
        with self._condition:
            self.last_named_s = time.monotonic()
            if self.state is SourceState.DOWN and self._failed_quickly and not self._is_closing:
                self.state = SourceState.CONNECTING
                self._is_kicked = True
                self._condition.notify_all()
            if self.state is SourceState.DOWN or self._is_closing or len(self._inquiries) >= _MAX_INQUIRIES:
                return False
            inquiry.pending.add(self)
            self._inquiries.append(inquiry)
            # No system call wakes the thread, because the step thread would let go of the GIL in it, and wait to have it back.
            self._condition.notify_all()
        return True

    def release(self, lease_name: bytes) -> None:
        """The lease is not needed any more. Unknown ones are ignored."""
        with self._condition:
            if self._leases.pop(lease_name, None) is None:
                return
            self._releases.append(lease_name)
            self._condition.notify_all()

    def suspect(self, block_hash: bytes) -> None:
        """This block arrived damaged: the source shall check it."""
        with self._condition:
            if len(self._suspects) < _MAX_INQUIRIES:
                self._suspects.append(block_hash)
                self._condition.notify_all()

    def stop(self) -> None:
        """Make every wait for this source fail, and the thread end, which lets go of everything. Safe to repeat."""
        with self._condition:
            self._is_closing = True
            streams = list(self._open_streams)
            self._condition.notify_all()
        for stream in streams:
            stream.abort()

    def wait_ended(self, timeout_s: float) -> bool:
        """After stop(): whether the thread has ended, and let go of everything."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # -- streams -------------------------------------------------------------------------------------------------------
    def take_stream(self) -> BlockStream:
        """A connection that was fine a moment ago. Raises OSError."""
        while True:
            with self._condition:
                stream = self._idle_streams.pop() if self._idle_streams else None
            if stream is None:
                return self._open_stream()[0]
            if not stream.is_stale():
                return stream
            self.drop_stream(stream)

    def give_back_stream(self, stream: BlockStream) -> None:
        """It is in step: everything asked over it has been received."""
        with self._condition:
            if not self._is_closing and self.state is SourceState.UP:
                self._idle_streams.append(stream)
                return
        self.drop_stream(stream)

    def drop_stream(self, stream: BlockStream) -> None:
        """Close it: afterwards nothing of what was asked over it can arrive."""
        with self._condition:
            self._open_streams.discard(stream)
        stream.close()

    def _drop_idle_streams(self) -> None:
        with self._condition:
            streams, self._idle_streams = self._idle_streams, []
        for stream in streams:
            self.drop_stream(stream)

    def _open_stream(self) -> tuple[BlockStream, bytes]:
        """A connection past the handshake, and the source's process_id. Raises OSError."""
        host, port = host_of(self.address), self.address.rpartition(":")[2]
        if not port.isdigit():
            raise ConnectionError("its address is not HOST:PORT")
        if not self._end.secret and not is_loopback(host):
            raise ConnectionError("it is on another machine, and there is no secret (security.keys, or the option key_file)")
        connected = socket.create_connection((host, int(port)), self._connect_timeout_s)
        try:
            stream = BlockStream(connected, self._op_timeout_s)
            with self._condition:
                if self._is_closing:
                    raise ConnectionError("the connector is closed")
                self._open_streams.add(stream)
        except OSError:
            connected.close()
            raise
        try:
            return stream, greet_source(stream, self._end)
        except OSError:
            self.drop_stream(stream)
            raise

    # -- this source's thread ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        pause_s = _FIRST_RETRY_S
        while not self._is_closing:
            started_s = time.monotonic()
            try:
                stream, process_id = self._open_stream()
            except OSError as error:
                self._complain(f"cannot be used: {error}")
                self._pause(pause_s, failed_quickly=time.monotonic() - started_s < _QUICK_S)
                pause_s = min(2 * pause_s, _MAX_RETRY_S)
                continue
            session = Session(self, process_id)
            with self._condition:
                self.session, self.state = session, SourceState.UP
            started_s = time.monotonic()
            try:
                self._serve(stream, session)
            except OSError as error:
                self.num_errors += not self._is_closing
                self._complain(f"was lost: {error}")
            session.is_open = False
            self.session = None
            self.drop_stream(stream)
            self._drop_idle_streams()
            if time.monotonic() - started_s > _MAX_RETRY_S:
                pause_s = _FIRST_RETRY_S
            self._pause(pause_s, failed_quickly=False)
        self._settle_all()
        self._drop_idle_streams()

    def _pause(self, pause_s: float, *, failed_quickly: bool) -> None:
        """Be down, until it is time for another attempt or a request wants one."""
        with self._condition:
            self.state, self._failed_quickly, self._is_kicked = SourceState.DOWN, failed_quickly, False
            self._leases.clear()
        self._settle_all()
        with self._condition:
            self._condition.wait_for(lambda: self._is_kicked or self._is_closing, pause_s)

    def _settle_all(self) -> None:
        """Nobody need wait for this source."""
        with self._condition:
            inquiries, self._inquiries = self._inquiries, []
            self._releases.clear()
            self._suspects.clear()
        for inquiry in inquiries:
            inquiry.settle(self)
        if inquiries:
            self._on_news()

    def _serve(self, stream: BlockStream, session: Session) -> None:
        """Ask what is to be asked until the connection fails or this source is closed. Raises OSError."""
        renew_due_s = time.monotonic() + self._renew_s
        self._last_complaint = ""
        while not self._is_closing:
            with self._condition:
                self._condition.wait_for(lambda: self._inquiries or self._releases or self._suspects or self._is_closing, _TICK_S)
            if stream.is_stale():
                raise ConnectionError("it closed the connection")
            self._release_idle()
            with self._condition:
                inquiries, self._inquiries = self._inquiries[:_PIPELINED], self._inquiries[_PIPELINED:]
                releases, self._releases = self._releases, []
                suspects, self._suspects = self._suspects, []
                leases = list(self._leases)
            try:
                self._tell(stream, Kind.SUSPECT, suspects)  # first: a question that came after it shall find it done
                self._look_up(stream, session, inquiries)
            finally:
                for inquiry in inquiries:
                    inquiry.settle(self)
                if inquiries:
                    self._on_news()
            self._tell(stream, Kind.RELEASE, releases)
            if time.monotonic() >= renew_due_s:  # without leases it is a heartbeat, by which a hung source is found out
                stream.send([pack_question(Kind.RENEW, leases)])
                stream.receive_head(Kind.DONE)
                renew_due_s = time.monotonic() + self._renew_s

    def _look_up(self, stream: BlockStream, session: Session, inquiries: Sequence[Inquiry]) -> None:
        """One round trip for all of them."""
        asked = [list(inquiry.block_hashes[inquiry.first : inquiry.first + MAX_ITEMS - 1]) for inquiry in inquiries]
        for inquiry, hashes in zip(inquiries, asked, strict=True):
            stream.send([pack_question(Kind.LOOKUP, [inquiry.lease_name, *hashes])])
        for inquiry, hashes in zip(inquiries, asked, strict=True):
            _kind, count = stream.receive_head(Kind.FOUND)
            if count != len(hashes):
                raise ConnectionError("it answers another question")
            held = frozenset(itertools.compress(hashes, stream.receive(count)))
            inquiry.answers[self] = (session, held)
            if held and inquiry.lease_name != NO_LEASE:
                with self._condition:
                    self._leases[inquiry.lease_name] = inquiry
            inquiry.settle(self)

    def _tell(self, stream: BlockStream, kind: Kind, items: Sequence[bytes]) -> None:
        if items:
            assert all(len(item) == ITEM_BYTES for item in items)
            stream.send([pack_question(kind, items[:MAX_ITEMS])])
            stream.receive_head(Kind.DONE)

    def _release_idle(self) -> None:
        """Leases of requests that nobody has asked about for a while."""
        now_s = time.monotonic()
        with self._condition:
            for name, inquiry in list(self._leases.items()):
                if not inquiry.is_loading and now_s - inquiry.last_asked_s > _LEASE_IDLE_S:
                    del self._leases[name]
                    self._releases.append(name)

    def _complain(self, text: str) -> None:
        """Log a fault once, not at each of a hundred attempts."""
        if text != self._last_complaint and not self._is_closing:
            self._last_complaint = text
            logger.warning("KV source %s %s", self.address, text)
