"""uvicorn's HTTP protocol with what it lacks against clients that mean no good: bounds on headers, idling and connections.

A request's body is bounded in http_api.py, since its handler reads it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from core.config import RouterOptions
from router.openai_protocol import ErrorBody, ErrorResponse


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection. `options` is set by uvicorn_config()."""

    options: RouterOptions

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._num_header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None

    # -- what asyncio calls ----------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new client has header_timeout_s for its first request, if there is room for one more."""
        super().connection_made(transport)
        if len(self.connections) > self.options.max_connections:
            allowed = f"at most {self.options.max_connections} connections (router.max_connections)"
            self._refuse(503, f"connections: got one more; allowed: {allowed}")
            return
        self._header_timer = self.loop.call_later(self.options.header_timeout_s, self._on_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is timed any more."""
        self._stop_header_timer()
        self._stop_send_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes that follow a refusal are dropped."""
        if not self.transport.is_closing():
            super().data_received(data)

    def pause_writing(self) -> None:
        """The client does not take what we send: it has send_timeout_s to go on."""
        super().pause_writing()
        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self.options.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It does."""
        self._stop_send_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """Idle after an answer; what is still unsent then has its time, too."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    # -- what the parser calls -------------------------------------------------------------------------------------------
    def on_message_begin(self) -> None:
        """A request begins: its headers are counted and timed."""
        super().on_message_begin()
        self._num_header_bytes = 0
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.options.header_timeout_s, self._on_slow_headers)

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        self._count_header_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header, or one trailer after a chunked body."""
        self._count_header_bytes(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The request is handed on, unless it was refused."""
        self._stop_header_timer()
        if not self.transport.is_closing():
            super().on_headers_complete()

    # -- inside ----------------------------------------------------------------------------------------------------------
    def send_400_response(self, msg: str) -> None:
        """For what is no HTTP, in the shape of every other error."""
        self._refuse(400, msg)

    def _count_header_bytes(self, num_bytes: int) -> None:
        self._num_header_bytes += num_bytes
        if self._num_header_bytes > self.options.max_header_bytes and not self.transport.is_closing():
            self._refuse(431, f"headers: larger than {self.options.max_header_bytes} bytes (router.max_header_bytes)")

    def _on_slow_headers(self) -> None:
        self._header_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"headers: did not arrive within {self.options.header_timeout_s:g} s (router.header_timeout_s)")

    def _refuse(self, status: int, message: str) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            error_type = "invalid_request_error" if status < 500 else "overloaded_error"
            body = msgspec.json.encode(ErrorResponse(ErrorBody(message, error_type, None, status)))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + head + body)
        self.transport.close()
        self._abort_later()

    def _abort_later(self) -> None:
        """A client that takes nothing would keep a closing connection, and what it holds, for ever."""
        self._stop_send_timer()
        self._send_timer = self.loop.call_later(self.options.send_timeout_s, self.transport.abort)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def uvicorn_config(app: ASGIApp, options: RouterOptions, shutdown_limit_s: int) -> uvicorn.Config:
    """How uvicorn serves the router's application. shutdown_limit_s: then connections are cut, whatever they do."""
    return uvicorn.Config(
        app,
        http=type("RouterHttpProtocol", (BoundedHttpProtocol,), {"options": options}),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # a line of warning for each bad request would be a client's way to fill the disk
        server_header=False,
        proxy_headers=False,  # a peer is who it is: what it says of others decides nothing
        timeout_graceful_shutdown=shutdown_limit_s,
    )
