"""The router's process: model folder, sockets, event loop, signals. Everything that it starts it also ends.

Decisions are elsewhere; `run` is called by __main__ and by the command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn

from core.adapter_files import Adapter
from core.addresses import is_loopback
from core.clock import MonotonicClock
from core.config import LOG_FORMAT, Config, ModelOptions, RouterOptions
from core.errors import ConfigError, InvalidInputError, KVRelayError, ModelLoadError
from core.model_files import read_eos_token_ids, resolve_model
from core.wire.curve import ROUTER, load_keys
from router.adapters import adapter_from_folder
from router.api_key_file import ApiKeyFile
from router.chat_template import load_chat_template
from router.dispatcher import Dispatcher
from router.http_api import HttpApi, ServedModel
from router.http_protocol import uvicorn_config
from router.metrics import RouterMetrics
from router.tokenizer import Tokenizer

logger = logging.getLogger("kvrelay.router")

EXIT_OK, EXIT_FAILED = 0, 1
LISTEN_BACKLOG = 2048
SHUTDOWN_GRACE_S = 3.0  # running requests may end in this time, then they fail with a message
KEEP_ALIVE_GOODBYE_S = 1.0  # a draining router answers so long with "connection: close" before it closes idle connections
SHUTDOWN_LIMIT_S = 6  # then connections are cut, whatever they do


def run(config: Config) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. What cannot start says why in one line on stderr."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_serve(config))
    except KVRelayError as error:
        print(f"kvrelay router: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _serve(config: Config) -> int:
    options, clock = config.router, MonotonicClock()
    keys = load_keys(config.security.keys, ROUTER)
    api_keys = ApiKeyFile(Path(options.api_keys_file), clock) if options.api_keys_file else None
    http_socket = bind_http(options)
    try:
        folder = await asyncio.to_thread(resolve_model, config.model.path)
        tokenizer = await asyncio.to_thread(Tokenizer, folder)
        model = read_served_model(config.model, folder, tokenizer)
        chat_template = load_chat_template(folder, tokenizer, options.chat_template)
        metrics = RouterMetrics(model.names[0])
        dispatcher = Dispatcher(options, clock, metrics, keys)
        http_port: int = http_socket.getsockname()[1]
        try:
            control_port = dispatcher.bind(options.control_host, options.control_port or http_port + 1)
            adapters = dispatcher.core.adapters
            for adapter in await asyncio.to_thread(read_lora_modules, options, model):
                adapters.end_load(adapters.start_load(adapter), is_accepted=True)
            dispatcher.start()
            leave = asyncio.Event()
            api = HttpApi(options, clock, model, tokenizer, chat_template, dispatcher, metrics, leave.set, api_keys)
            if api_keys is None and not is_loopback(options.host):
                logger.warning(
                    "everybody who reaches %s:%d is served: there are no API keys (router.api_keys_file)", options.host, http_port
                )
            print(
                f"kvrelay router: serving {model.names[0]} at http://{options.host}:{http_port}, "
                f"nodes register at {options.control_host}:{control_port}",
                flush=True,
            )
            await _serve_http(api, options, dispatcher, http_socket, leave)
            return EXIT_FAILED if dispatcher.has_broken.is_set() else EXIT_OK
        finally:
            await dispatcher.stop()
    finally:
        http_socket.close()


def bind_http(options: RouterOptions) -> socket.socket:
    """A listening socket at the HTTP address, or the inherited one. Raises ConfigError when it cannot be had."""
    if options.http_fd >= 0:
        return _inherited_socket(options.http_fd)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        http_socket = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError("router.host", options.host, f"an address of this machine ({error.strerror})") from error
    try:
        http_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        http_socket.bind(address)
        http_socket.listen(LISTEN_BACKLOG)
    except OSError as error:
        http_socket.close()
        raise ConfigError("router.port", options.port, f"a free port of {options.host} ({error.strerror})") from error
    http_socket.setblocking(False)
    return http_socket


def _inherited_socket(descriptor: int) -> socket.socket:
    try:
        inherited = socket.socket(fileno=descriptor)
        is_listening = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) != 0
    except OSError as error:
        raise ConfigError("router.http_fd", descriptor, f"the descriptor of a listening socket ({error.strerror})") from error
    if not is_listening:
        raise ConfigError("router.http_fd", descriptor, "the descriptor of a listening socket")
    inherited.setblocking(False)
    return inherited


def read_served_model(options: ModelOptions, folder: Path, tokenizer: Tokenizer) -> ServedModel:
    """Names and limits from the folder's config.json. Raises ModelLoadError when it cannot be read."""
    path = folder / "config.json"
    try:
        model_config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        text_config = model_config.get("text_config") or model_config
        max_model_len = int(text_config.get("max_position_embeddings") or 2048)
        vocab_size = int(text_config.get("vocab_size") or tokenizer.vocab_size)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: {error}") from error
    if options.max_model_len:
        max_model_len = min(options.max_model_len, max_model_len)
    names = dict.fromkeys((options.name, options.path))
    return ServedModel(tuple(names), max_model_len, vocab_size, read_eos_token_ids(folder, model_config))


def read_lora_modules(options: RouterOptions, model: ServedModel) -> list[Adapter]:
    """The adapters that are served from the start. Raises ConfigError when one of their folders cannot be used."""
    adapters = []
    for name, path in options.lora_modules.items():
        try:
            adapters.append(adapter_from_folder(name, path, model.names))
        except InvalidInputError as error:
            raise ConfigError("router.lora_modules", f"{name}={path}", f"an adapter that can be served ({error})") from error
    return adapters


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, which would raise the signal again and so spoil the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to _serve_http."""
        yield


async def _serve_http(
    api: HttpApi, options: RouterOptions, dispatcher: Dispatcher, http_socket: socket.socket, leave: asyncio.Event
) -> None:
    """Serve until a signal (short grace, then errors) or until `leave` is set (everything accepted is answered first)."""
    server = _Server(uvicorn_config(api.app, options, SHUTDOWN_LIMIT_S))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if api.is_shutting_down:
            server.force_exit = True  # asked twice
            return
        logger.info("shutting down")
        api.is_shutting_down = True
        server.should_exit = True
        loop.call_later(SHUTDOWN_GRACE_S, dispatcher.core.fail_all, "shutdown", "the router is shutting down", 503)

    async def stop_when_broken() -> None:
        await dispatcher.has_broken.wait()
        stop()

    async def drain_when_asked() -> None:
        await leave.wait()
        logger.info("draining: %d requests in flight", dispatcher.core.num_in_flight)
        api.is_draining = True
        await asyncio.sleep(KEEP_ALIVE_GOODBYE_S)
        server.config.timeout_graceful_shutdown = None
        server.should_exit = True

    watchers = [asyncio.create_task(stop_when_broken()), asyncio.create_task(drain_when_asked())]
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        await server.serve(sockets=[http_socket])
    finally:
        for watcher in watchers:
            watcher.cancel()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
