"""The node's I/O thread: one socket to the router, registration, heartbeats, and two bounded queues to and from the step thread.

Knows nothing of engines: commands come in, messages go out. The step thread never touches the socket.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from core.errors import WireError
from core.node_session import NodeSession
from core.wire import messages
from core.wire.curve import CurveKeys
from core.wire.sockets import (
    HANDSHAKE_FAILURES,
    MONITORED_EVENTS,
    connect_to_router,
    disconnect_from_router,
    open_node_socket,
)
from core.wire.warning_limit import WarningLimit

_logger = logging.getLogger(__name__)
_REGISTER_RETRY_S = 1.0
_REGISTRATIONS_PER_WARNING = 10
_MAX_MESSAGES_IN_A_ROW = 256  # taken before heartbeats and news get their turn


class NodeLink:
    """Owns the thread and the socket. `commands` is read by the step thread; everything else goes through methods.

    A RegisterAgain among the commands means that the router has forgotten us: the step thread drops its requests then.
    """

    def __init__(self, router_address: str, registration: messages.Register, keys: CurveKeys | None = None) -> None:
        self.commands: deque[messages.RouterMessage] = deque()
        self._session = NodeSession(registration)
        self._identity = f"{registration.node_id}:{registration.generation:x}".encode()
        self._router_address = router_address
        self._keys = keys
        self._outbox: deque[messages.NodeMessage] = deque()
        self._heartbeat: messages.Heartbeat | None = None
        self._heartbeat_set_s = 0.0
        self._has_command = threading.Event()
        self._is_closed = False
        self._failure = ""
        self._garbage, self._failed_handshakes = WarningLimit(), WarningLimit()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="node-link", daemon=True)

    @property
    def is_registered(self) -> bool:
        """True while the router counts on this node. Any thread."""
        return self._session.is_registered

    @property
    def refusal(self) -> str:
        """Why this node cannot serve: it is not wanted, or a bug ended the link. Empty as long as it can. Any thread."""
        return self._failure or self._session.refusal

    def start(self) -> None:
        """Connect and register; returns at once."""
        self._thread.start()

    def send(self, message: messages.NodeMessage) -> None:
        """Queue a message for the router. Any thread."""
        self._outbox.append(message)
        self._wake()

    def set_heartbeat(self, heartbeat: messages.Heartbeat) -> None:
        """What the next heartbeats say. Its values must not change afterwards. Any thread."""
        self._heartbeat = heartbeat
        self._heartbeat_set_s = time.monotonic()

    def wait_for_command(self, timeout_s: float) -> bool:
        """Block the step thread until a command is there, wake() is called, or the time is over."""
        if self._has_command.wait(timeout_s):
            self._has_command.clear()
            return True
        return False

    def wake_step_thread(self) -> None:
        """End a wait_for_command. Any thread: connectors call it when a transfer ends."""
        self._has_command.set()

    def close(self) -> None:
        """Send what is queued, then end the thread. Safe to repeat."""
        if not self._is_closed:
            self._is_closed = True
            self._wake()
            self._thread.join(timeout=5.0)

    # -- the thread ----------------------------------------------------------------------------------------------------
    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe holds wake-ups enough
            os.write(self._wake_write, b"x")

    def _run(self) -> None:
        """The thread's top: without it the node would be deaf and dumb, so a bug in it ends the node, loudly."""
        try:
            self._serve()
        except Exception as error:
            _logger.exception("the link to the router ended")
            self._failure = f"internal error of the link: {type(error).__name__}"
            self._has_command.set()

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        session = self._session
        socket = open_node_socket(context, self._router_address, self._identity, self._keys)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        monitor = socket.get_monitor_socket(MONITORED_EVENTS)
        poller.register(monitor, zmq.POLLIN)
        next_register_s = next_heartbeat_s = 0.0
        num_unanswered = 0
        must_connect = False
        while not self._is_closed:
            now_s = time.monotonic()
            if not session.is_registered:
                if now_s >= next_register_s:
                    if must_connect:
                        connect_to_router(socket, self._router_address)
                        must_connect = False
                    self._send_frame(socket, session.register())
                    num_unanswered += 1
                    if num_unanswered % _REGISTRATIONS_PER_WARNING == 0:
                        _logger.warning(
                            "the router at %s has not answered %d registrations", self._router_address, num_unanswered
                        )
                    next_register_s = now_s + _REGISTER_RETRY_S
            elif now_s >= next_heartbeat_s:
                num_unanswered = 0
                self._send_heartbeat(socket, now_s)
                next_heartbeat_s = now_s + session.heartbeat_interval_s
            due_s = next_heartbeat_s if session.is_registered else next_register_s
            ready = dict(poller.poll(max(1, int((due_s - now_s) * 1000))))
            if self._wake_read in ready:
                os.read(self._wake_read, 65536)
            if monitor in ready:
                event = recv_monitor_message(monitor)["event"]
                if event in HANDSHAKE_FAILURES and not session.is_registered:  # else it is of an earlier attempt
                    self._warn_of_handshake(event)
                    disconnect_from_router(socket, self._router_address)
                    must_connect = True
                elif event == zmq.EVENT_DISCONNECTED and session.is_registered:
                    self._command(session.start_over())
                    next_register_s = 0.0
            if socket in ready:
                self._receive_all(socket)
            self._flush(socket)
        self._flush(socket)
        socket.disable_monitor()
        context.destroy(linger=200)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _warn_of_handshake(self, event: int) -> None:
        if not self._failed_handshakes.count(b"router", time.monotonic()):
            return
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            reason = "does not accept this node's keys (security.keys): they are another cluster's"
        elif self._keys:
            reason = "ended the handshake: it has no keys (security.keys), or another cluster's than this node"
        else:
            reason = "ended the handshake: it has keys (security.keys) and this node has none, or it went away"
        _logger.warning("not registered: the router at %s %s", self._router_address, reason)

    def _send_heartbeat(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """With the age of what it says: a step thread that is stuck shows, although this thread lives."""
        if (heartbeat := self._heartbeat) is not None:
            load = msgspec.structs.replace(heartbeat.load, step_age_s=max(0.0, now_s - self._heartbeat_set_s))
            self._send_now(socket, msgspec.structs.replace(heartbeat, load=load))

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            self._send_now(socket, self._outbox.popleft())

    def _send_now(self, socket: zmq.Socket[bytes], message: messages.NodeMessage) -> None:
        if (frame := self._session.pack(message)) is not None:
            self._send_frame(socket, frame)

    def _send_frame(self, socket: zmq.Socket[bytes], frame: bytes) -> None:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:  # the router has been away for long: it will find the gap and ask us to register again
            _logger.warning("dropped a message: the queue to the router is full")

    def _command(self, commands: list[messages.RouterMessage]) -> None:
        self.commands.extend(commands)
        self._has_command.set()

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_MESSAGES_IN_A_ROW):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames, not 1")
                self._command(self._session.receive(frames[0]))
            except WireError as error:
                if num := self._garbage.count(b"router", time.monotonic()):
                    _logger.warning("ignored %d messages of the router, the last: %s", num, error)
