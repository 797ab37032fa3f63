"""A whole router in a thread of the test's process: real HTTP, real control socket, fake nodes."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn

from core.clock import MonotonicClock
from core.config import ModelOptions, RouterOptions
from core.wire.curve import CurveKeys
from router.api_key_file import ApiKeyFile
from router.chat_template import load_chat_template
from router.dispatcher import Dispatcher
from router.http_api import HttpApi
from router.http_protocol import uvicorn_config
from router.metrics import RouterMetrics
from router.server import bind_http, read_served_model
from router.tokenizer import Tokenizer
from tests.unit.router.fake_node import FakeNode, model_info


class RunningRouter:
    """Context manager. Nodes added with add_node end with it. keys: the router's; fake nodes of theirs take node_keys."""

    def __init__(
        self, folder: Path, *, keys: CurveKeys | None = None, node_keys: CurveKeys | None = None, **options: Any
    ) -> None:
        defaults: dict[str, Any] = {"heartbeat_interval_s": 0.05, "heartbeat_timeout_s": 1.0, "node_wait_s": 0.5}
        self.options = RouterOptions(port=0, **{**defaults, **options})
        self.tokenizer = Tokenizer(folder)
        self.nodes: list[FakeNode] = []
        self.control_port = 0
        self.dispatcher: Dispatcher
        self.api: HttpApi
        self._folder = folder
        self._keys, self._node_keys = keys, node_keys
        self._socket: socket.socket = bind_http(self.options)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.model = read_served_model(ModelOptions(path="tiny"), folder, self.tokenizer)
        self._is_ready = threading.Event()
        self._server: uvicorn.Server
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def __enter__(self) -> RunningRouter:
        self._thread.start()
        assert self._is_ready.wait(5)
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.kill()
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
        assert not self._thread.is_alive(), "the router did not end"

    def add_node(
        self, role: str, node_id: str = "", *, wait: bool = True, fingerprint: bytes = b"m" * 16, **behaviour: Any
    ) -> FakeNode:
        """Start a fake node and wait until the router has answered its registration."""
        info = model_info(self.model.vocab_size, self.model.max_model_len, fingerprint)
        node = FakeNode(role, node_id or f"{role}-{len(self.nodes)}", self.control_port, info, keys=self._node_keys, **behaviour)
        self.nodes.append(node)
        return node.start(wait)

    def set_shutting_down(self) -> None:
        """What SIGTERM does first."""
        self.api.is_shutting_down = True

    def fail_all(self) -> None:
        """What SIGTERM does in the end."""
        self._loop.call_soon_threadsafe(self.dispatcher.core.fail_all, "shutdown", "the router is shutting down", 503)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        clock, metrics = MonotonicClock(), RouterMetrics("tiny")
        self.dispatcher = Dispatcher(self.options, clock, metrics, self._keys)
        self.control_port = self.dispatcher.bind(self.options.control_host, self.options.control_port)
        self.dispatcher.start()
        template = load_chat_template(self._folder, self.tokenizer, self.options.chat_template)
        file = self.options.api_keys_file
        api_keys = ApiKeyFile(Path(file), clock) if file else None
        self.api = HttpApi(self.options, clock, self.model, self.tokenizer, template, self.dispatcher, metrics, api_keys=api_keys)
        self._server = uvicorn.Server(uvicorn_config(self.api.app, self.options, shutdown_limit_s=1))
        self._is_ready.set()
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            await self.dispatcher.stop()
