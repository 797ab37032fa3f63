"""ZMQ sockets with the options both ends rely on, and nothing else: what is said over them is in messages.py."""

from __future__ import annotations

import contextlib
from typing import Any

import zmq

from core.wire.curve import CurveKeys, use_node_keys

SEND_QUEUE_MESSAGES = 20_000  # per peer: one that leaves so many unread is treated as gone
_RECONNECT_MS = 50
_RECONNECT_MAX_MS = 1_000
_LINGER_MS = 200
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024

# What a socket's monitor reports when the two ends cannot agree on keys. libzmq retries after some of them and gives up after
# others, so that the node's end starts anew after each (disconnect_from_router, connect_to_router).
HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)
MONITORED_EVENTS = int(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILURES[0] | HANDSHAKE_FAILURES[1] | HANDSHAKE_FAILURES[2])


def open_node_socket(
    context: zmq.Context[zmq.Socket[bytes]], router_address: str, identity: bytes, keys: CurveKeys | None = None
) -> zmq.Socket[bytes]:
    """A node's DEALER to the router's control address "HOST:PORT". Reconnects by itself; use from one thread.

    identity differs for every start of a node, so that the router never takes a new process for an old one. keys None: in the
    clear, for loopback.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, identity)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 0)  # the router bounds what it sends; a full queue here would make it think us dead
    socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, int(router_address.startswith("[")))
    use_node_keys(socket, keys)
    connect_to_router(socket, router_address)
    return socket


def connect_to_router(socket: zmq.Socket[bytes], router_address: str) -> None:
    """Connect again after disconnect_from_router."""
    socket.connect(f"tcp://{router_address}")


def disconnect_from_router(socket: zmq.Socket[bytes], router_address: str) -> None:
    """End the attempts to connect, and forget what waited to be sent. Safe to repeat."""
    with contextlib.suppress(zmq.ZMQError):  # not connected
        socket.disconnect(f"tcp://{router_address}")


def configure_router_socket(socket: zmq.Socket[Any]) -> None:
    """Options of the router's ROUTER socket: a send to a peer that is gone raises EHOSTUNREACH instead of vanishing."""
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_MESSAGE_BYTES)
