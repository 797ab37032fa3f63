"""The asyncio shell around RouterCore: the control socket, its monitor, timers. Decides nothing.

Deliveries go to sinks, which put them into their request's own queue. Those queues need no bound of their own: a request puts
in at most max_tokens tokens, and max_num_requests bounds requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from core.clock import Clock
from core.config import RouterOptions
from core.errors import ConfigError, WireError
from core.wire.messages import AuditReply
from core.wire.sockets import configure_router_socket
from router.metrics import RouterMetrics
from router.router_core import RouterCore

logger = logging.getLogger("kvrelay.router")

TICK_S = 0.05  # how late a deadline may be noticed
AUDIT_POLL_S = 0.005
# libzmq reports a disconnect before the peer is removed from the routing table, so that one ping may come too early.
PING_DELAYS_S = (0.0, 0.02, 0.2)


class Dispatcher:
    """Owns the control socket. Everything runs on the event loop that called start()."""

    def __init__(self, options: RouterOptions, clock: Clock, metrics: RouterMetrics) -> None:
        """Raises ConfigError for an unknown policy."""
        self._metrics = metrics
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.has_broken = asyncio.Event()  # set when a loop ended by a bug: nothing will be served any more
        self.core = RouterCore(options, clock, self._send, metrics, id_prefix=secrets.token_hex(4))

    def bind(self, host: str, port: int) -> int:
        """Bind the control socket; port 0 takes any. Returns the port. Raises ConfigError when that is impossible."""
        configure_router_socket(self._socket)
        self._socket.set(zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host else host
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError("router.control_port", port, f"a free port of {host} ({error.strerror})") from error
        endpoint = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.decode().rstrip("\0").rpartition(":")[2])

    def start(self) -> None:
        """Begin to receive. Call from the event loop, after bind."""
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        for loop in (self._receive_forever(), self._tick_forever(), self._watch_disconnects(self._monitor)):
            self._tasks.append(asyncio.create_task(self._ending_loudly(loop)))

    async def stop(self) -> None:
        """Stop receiving and close the socket. Safe to repeat."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()
        if not self._socket.closed:
            if self._monitor is not None:
                self._socket.disable_monitor()
                self._monitor.close(linger=0)  # the context waits for every socket
            self._socket.close(linger=0)
            self._context.term()

    async def audit(self, timeout_s: float) -> tuple[dict[str, AuditReply], list[str]]:
        """What every connected node still holds, by node_id, and the nodes that did not answer in time."""
        round_ = self.core.start_audit()
        try:
            async with asyncio.timeout(timeout_s):
                while round_.missing:
                    await asyncio.sleep(AUDIT_POLL_S)
        except TimeoutError:
            pass
        finally:
            del self.core.audits[round_.audit_id]
        return round_.replies, sorted(round_.missing)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _send(self, identity: bytes, frame: bytes) -> bool:
        try:
            sending = self._socket.send_multipart([identity, frame], flags=zmq.NOBLOCK)
            assert isinstance(sending, asyncio.Future)
            sending.result()  # with NOBLOCK it is done when it is returned
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN, zmq.ENOTSOCK):
                return False
            raise
        return True

    async def _receive_forever(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 2:
                    raise WireError(f"{len(frames)} frames, not 2")
                self.core.receive(frames[0], frames[1])
            except WireError as error:
                self._metrics.wire_errors.inc()
                logger.warning("ignored a message of %r: %s", frames[0][:64], error)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.core.on_time()

    async def _watch_disconnects(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            await recv_monitor_message(monitor)
            for delay_s in PING_DELAYS_S:
                await asyncio.sleep(delay_s)
                self.core.ping_all()

    async def _ending_loudly(self, loop: Coroutine[Any, Any, None]) -> None:
        """The loop's top: a bug that ends it is logged, fails what is in flight, and tells the process to end."""
        try:
            await loop
        except Exception:
            logger.exception("a loop of the dispatcher ended")
            self.has_broken.set()
            self.core.fail_all("internal", "internal error of the router", 500)
