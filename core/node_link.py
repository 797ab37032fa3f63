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
from core.wire import messages
from core.wire.sockets import open_node_socket
from core.wire.warning_limit import WarningLimit

_logger = logging.getLogger(__name__)
_REGISTER_RETRY_S = 1.0
_REGISTRATIONS_PER_WARNING = 10
_MAX_MESSAGES_IN_A_ROW = 256  # taken before heartbeats and news get their turn


class NodeLink:
    """Owns the thread and the socket. `commands` is read by the step thread; everything else goes through methods.

    A RegisterAgain among the commands means that the router has forgotten us: the step thread drops its requests then.
    """

    def __init__(self, router_address: str, registration: messages.Register) -> None:
        self.commands: deque[messages.RouterMessage] = deque()
        self.refusal = ""
        self.is_registered = threading.Event()
        self._registration = registration
        self._router_address = router_address
        self._outbox: deque[messages.NodeMessage] = deque()
        self._heartbeat: messages.Heartbeat | None = None
        self._heartbeat_set_s = 0.0
        self._heartbeat_interval_s = 0.5
        self._has_command = threading.Event()
        self._is_closed = False
        self._garbage = WarningLimit()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="node-link", daemon=True)

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
            self.refusal = f"internal error of the link: {type(error).__name__}"
            self._has_command.set()

    def _serve(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        identity = f"{self._registration.node_id}:{self._registration.generation:x}".encode()
        socket = open_node_socket(context, self._router_address, identity)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller.register(monitor, zmq.POLLIN)
        next_register_s = next_heartbeat_s = 0.0
        num_unanswered = 0
        while not self._is_closed:
            now_s = time.monotonic()
            if not self.is_registered.is_set():
                if now_s >= next_register_s:
                    self._send_now(socket, self._registration)
                    num_unanswered += 1
                    if num_unanswered % _REGISTRATIONS_PER_WARNING == 0:
                        _logger.warning(
                            "the router at %s has not answered %d registrations", self._router_address, num_unanswered
                        )
                    next_register_s = now_s + _REGISTER_RETRY_S
            elif now_s >= next_heartbeat_s:
                num_unanswered = 0
                self._send_heartbeat(socket, now_s)
                next_heartbeat_s = now_s + self._heartbeat_interval_s
            due_s = next_heartbeat_s if self.is_registered.is_set() else next_register_s
            ready = dict(poller.poll(max(1, int((due_s - now_s) * 1000))))
            if self._wake_read in ready:
                os.read(self._wake_read, 65536)
            if monitor in ready:
                recv_monitor_message(monitor)
                self._forget_registration()
                next_register_s = 0.0
            if socket in ready:
                self._receive_all(socket)
            self._flush(socket)
        self._flush(socket)
        socket.disable_monitor()
        context.destroy(linger=200)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _send_heartbeat(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        """With the age of what it says: a step thread that is stuck shows, although this thread lives."""
        if (heartbeat := self._heartbeat) is not None:
            load = msgspec.structs.replace(heartbeat.load, step_age_s=max(0.0, now_s - self._heartbeat_set_s))
            self._send_now(socket, msgspec.structs.replace(heartbeat, load=load))

    def _flush(self, socket: zmq.Socket[bytes]) -> None:
        while self._outbox:
            self._send_now(socket, self._outbox.popleft())

    def _send_now(self, socket: zmq.Socket[bytes], message: messages.NodeMessage) -> None:
        try:
            socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:  # the router has been away for long: it will ask us to register again, and what we say now is moot
            _logger.warning("dropped a %s: the queue to the router is full", type(message).__name__)

    def _receive_all(self, socket: zmq.Socket[bytes]) -> None:
        for _ in range(_MAX_MESSAGES_IN_A_ROW):
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise WireError(f"{len(frames)} frames, not 1")
                message = messages.decode_router_message(frames[0])
            except WireError as error:
                if num := self._garbage.count(b"router", time.monotonic()):
                    _logger.warning("ignored %d messages of the router, the last: %s", num, error)
                continue
            self._handle(message)

    def _handle(self, message: messages.RouterMessage) -> None:
        if isinstance(message, messages.RegisterReply):
            self.refusal = message.refusal
            self._heartbeat_interval_s = message.heartbeat_interval_s
            self.is_registered.set()
            self._has_command.set()
        elif isinstance(message, messages.Ping):
            pass
        elif isinstance(message, messages.RegisterAgain):
            self._forget_registration()
        else:
            self.commands.append(message)
            self._has_command.set()

    def _forget_registration(self) -> None:
        """Start over with the router: what was in flight when the connection broke may be lost on either side.

        The step thread drops its requests, the router gives them to other nodes when it sees the new registration.
        """
        if self.is_registered.is_set():  # else one is already on its way
            self.is_registered.clear()
            index = self._registration.registration_index + 1
            self._registration = msgspec.structs.replace(self._registration, registration_index=index)
            self.commands.append(messages.RegisterAgain())
            self._has_command.set()
