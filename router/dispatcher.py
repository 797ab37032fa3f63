"""The asyncio shell around RouterCore: the control socket, its monitor, timers. Decides nothing.

Deliveries go to sinks, which put them into their request's own queue. Those queues need no bound of their own: a request puts
in at most max_tokens tokens, and max_num_requests bounds requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import logging
import secrets
import socket
from collections.abc import Coroutine, Mapping
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from core.adapter_files import Adapter
from core.addresses import is_loopback
from core.clock import Clock
from core.config import RouterOptions
from core.errors import ConfigError, WireError
from core.wire.curve import CurveKeys, use_router_keys
from core.wire.messages import AuditReply
from core.wire.sockets import HANDSHAKE_FAILURES, MONITORED_EVENTS, configure_router_socket
from core.wire.warning_limit import WarningLimit
from router.metrics import RouterMetrics
from router.router_core import RouterCore

logger = logging.getLogger("kvrelay.router")

TICK_S = 0.05  # how late a deadline may be noticed
AUDIT_POLL_S = 0.005
MAX_MESSAGES_IN_A_ROW = 32  # taken from a socket that never runs dry, before everything else gets its turn
# libzmq reports a disconnect before the peer is removed from the routing table, so that one ping may come too early.
PING_DELAYS_S = (0.0, 0.02, 0.2)


class Dispatcher:
    """Owns the control socket. Everything runs on the event loop that called start()."""

    def __init__(self, options: RouterOptions, clock: Clock, metrics: RouterMetrics, keys: CurveKeys | None = None) -> None:
        """keys None: in the clear, for loopback. Raises ConfigError for an unknown policy."""
        self._metrics = metrics
        self._keys = keys
        self._clock = clock
        self._num_failed_handshakes = 0
        self._authenticator: AsyncioAuthenticator | None = None
        self._garbage, self._failed_handshakes = WarningLimit(), WarningLimit()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.has_broken = asyncio.Event()  # set when a loop ended by a bug: nothing will be served any more
        self.core = RouterCore(options, clock, self._send, metrics, id_prefix=secrets.token_hex(4))

    def bind(self, host: str, port: int) -> int:
        """Bind the control socket; port 0 takes any. Returns the port. Raises ConfigError when that is impossible.

        Call from the event loop.
        """
        configure_router_socket(self._socket)
        self._authenticator = use_router_keys(self._socket, self._context, self._keys)
        address = _numeric_address(host)
        if self._keys is None and not is_loopback(address):
            raise ConfigError("router.control_host", host, "a loopback address as long as there are no keys (security.keys)")
        self._socket.set(zmq.IPV6, int(":" in address))
        address = f"[{address}]" if ":" in address else address
        try:
            self._socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                raise ConfigError("router.control_host", host, "an address of this machine") from error
            raise ConfigError("router.control_port", port, f"a free port of {host} ({error.strerror})") from error
        endpoint = self._socket.get(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.decode().rstrip("\0").rpartition(":")[2])

    def start(self) -> None:
        """Begin to receive. Call from the event loop, after bind."""
        self._monitor = self._socket.get_monitor_socket(MONITORED_EVENTS)
        for loop in (self._receive_forever(), self._tick_forever(), self._watch_connections(self._monitor)):
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
            if self._authenticator is not None:
                self._authenticator.stop()
            self._context.term()

    async def audit(self, timeout_s: float, block_hashes: tuple[bytes, ...] = ()) -> tuple[dict[str, AuditReply], list[str]]:
        """What every connected node still holds, by node_id, and the nodes that did not answer in time.

        block_hashes: of a prompt, whose leading blocks in their own caches the nodes count as well.
        """
        round_ = self.core.start_audit(block_hashes)
        try:
            async with asyncio.timeout(timeout_s):
                while round_.missing:
                    await asyncio.sleep(AUDIT_POLL_S)
        except TimeoutError:
            pass
        finally:
            del self.core.audits[round_.audit_id]
        return round_.replies, sorted(round_.missing)

    async def load_adapter(self, adapter: Adapter, timeout_s: float) -> dict[str, str]:
        """Have all connected nodes load an adapter, and serve it if all can; else why they cannot, by node_id."""
        round_ = self.core.adapters.start_load(adapter)
        try:
            async with asyncio.timeout(timeout_s):
                while round_.missing:
                    await asyncio.sleep(AUDIT_POLL_S)
        except TimeoutError:
            round_.errors.update(dict.fromkeys(round_.missing, f"no answer within {timeout_s:g} s"))
        finally:
            self.core.adapters.end_load(round_, is_accepted=not round_.missing and not round_.errors)
        return round_.errors

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
        # What is there already is read past zmq.asyncio, which needs longer for a message than all that is done about it.
        ready: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket)
        for count in itertools.count(1):
            try:
                frames = ready.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                frames = await self._socket.recv_multipart()
            if count % MAX_MESSAGES_IN_A_ROW == 0:  # awaiting what is there already does not let others run
                await asyncio.sleep(0)
            try:
                if len(frames) != 2:
                    raise WireError(f"{len(frames)} frames, not 2")
                self.core.receive(frames[0], frames[1])
            except WireError as error:
                self._metrics.wire_errors.inc()
                if num := self._garbage.count(frames[0], self._clock.now_s()):
                    logger.warning("ignored %d messages of %r, the last: %s", num, frames[0][:64], error)

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.core.on_time()

    async def _watch_connections(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            # All that has come since: when the monitor's queue is full, libzmq's I/O thread waits for us, and with it every node.
            self._count_handshake(await recv_monitor_message(monitor))
            while await monitor.poll(0):
                self._count_handshake(await recv_monitor_message(monitor))
            for delay_s in PING_DELAYS_S:
                await asyncio.sleep(delay_s)
                self.core.ping_all()

    def _count_handshake(self, event: Mapping[str, Any]) -> None:
        if event["event"] not in HANDSHAKE_FAILURES:
            return
        self._metrics.failed_handshakes.inc()
        self._num_failed_handshakes += 1
        # Under one name: a node with wrong keys tries again every second, and so may whoever else is out there.
        if self._failed_handshakes.count(b"", self._clock.now_s()):
            logger.warning(
                "%d connections to the control port failed the handshake so far: a node without this cluster's keys "
                "(security.keys), or something that is no node",
                self._num_failed_handshakes,
            )

    async def _ending_loudly(self, loop: Coroutine[Any, Any, None]) -> None:
        """The loop's top: a bug that ends it is logged, fails what is in flight, and tells the process to end."""
        try:
            await loop
        except Exception:
            logger.exception("a loop of the dispatcher ended")
            self.has_broken.set()
            self.core.fail_all("internal", "internal error of the router", 500)


def _numeric_address(host: str) -> str:
    """The address of a name, the IPv4 one if it has one, as nodes will look for it: ZMQ binds to no name."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError("router.control_host", host, f"an address or name of this machine ({error.strerror})") from error
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
