"""A TCP proxy that makes a healthy server slow, silent or unreachable: latency, bandwidth, stalls and cut connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any

HOST = "127.0.0.1"
_CHUNK_BYTES = 256 * 1024
_MAX_UNDER_WAY = 64  # chunks


class DelayingProxy:
    """Listens on `port` and forwards to a server on this host, on a thread of its own. The attributes may be changed at any time.

    latency_s delays requests, as a long way does: what is sent before an answer has come is under way as well; bytes_per_s limits
    what comes back (0: no limit); while is_stalled nothing moves, and connections stay open; while refuses, new ones are closed
    at once.
    """

    def __init__(self, server_port: int, host: str = HOST) -> None:
        """host: where it listens."""
        self.latency_s = 0.0
        self.bytes_per_s = 0.0
        self.is_stalled = False
        self.refuses = False
        self.num_connections = 0  # since the start
        self._server_port = server_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="delaying-proxy", daemon=True)
        self._thread.start()
        self._listener = self._run(asyncio.start_server(self._serve, host, 0))
        self.port: int = self._listener.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Close every connection; how many."""

        async def close_all() -> int:
            writers = list(self._writers)
            for writer in writers:
                writer.transport.abort()
            return len(writers) // 2

        return self._run(close_all())

    def close(self) -> None:
        """End it and its connections."""

        async def end() -> None:
            self._listener.close()
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()
            await asyncio.sleep(0)

        self.cut()
        self._run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.refuses:
            writer.transport.abort()
            return
        try:
            server_reader, server_writer = await asyncio.open_connection(HOST, self._server_port, limit=_CHUNK_BYTES)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, server_writer}
        self._writers |= both
        try:
            await asyncio.gather(self._forward(reader, server_writer, True), self._forward(server_reader, writer, False))
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_request: bool) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MAX_UNDER_WAY)

        async def deliver() -> None:
            while True:
                due_s, chunk = await under_way.get()
                await asyncio.sleep(max(0.0, due_s - self._loop.time()))
                if not is_request and self.bytes_per_s:
                    await asyncio.sleep(len(chunk) / self.bytes_per_s)
                while self.is_stalled:
                    await asyncio.sleep(0.01)
                if not chunk:
                    return
                writer.write(chunk)
                await writer.drain()

        async def receive() -> None:
            with contextlib.suppress(OSError):
                while chunk := await reader.read(_CHUNK_BYTES):
                    await under_way.put((self._loop.time() + (self.latency_s if is_request else 0.0), chunk))
            await under_way.put((0.0, b""))

        receiving = asyncio.ensure_future(receive())
        with contextlib.suppress(OSError):
            await deliver()
        receiving.cancel()
        writer.transport.abort()  # one end gone: the other goes, too
