"""A node's process: builds the engine's outside world into a loop of commands in, steps, news out. Both roles run this.

Two threads: this one steps the engine, core/node_link's owns the socket. What differs between the roles is passed in.
"""

from __future__ import annotations

import dataclasses
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from core.clock import MonotonicClock
from core.config import EXIT_USAGE, LOG_FORMAT, Config, parse_config
from core.cores import claim_cores, parse_cores
from core.engine import EngineCore
from core.engine_model import EngineModel
from core.errors import ConfigError, KVRelayError
from core.grammar import GrammarCompiler
from core.kv.connector import KVConnector
from core.kv.pool_memory import KVPoolMemory
from core.metrics import engine_metric_families
from core.node_core import NodeCore, NodeIdentity, model_info
from core.node_link import NodeLink
from core.stats import EngineStats
from core.step import AdapterStore, ModelRunner
from core.wire import messages
from core.wire.curve import NODE, load_keys

_logger = logging.getLogger(__name__)
NODE_SECTIONS = ("model", "engine", "connector", "node", "security")
_PUBLISH_INTERVAL_S = 0.1
_IDLE_WAIT_S = 0.2
_MAX_COMMANDS_PER_STEP = 1024  # a flood of them must not keep running requests from their next token
_TRANSFER_WAIT_S = 0.005  # while only transfers are in flight, and the connector does not wake us itself


class NodeServer:
    """One node of a role, "prefill" or "decode". run() returns the process's exit code.

    connector_memory: what the connector reads and writes. num_blocks: of the engine's KV pool, where that is not the same.
    """

    def __init__(
        self,
        config: Config,
        role: str,
        model: EngineModel,
        connector_memory: KVPoolMemory,
        runner: ModelRunner,
        connector: KVConnector | None,
        *,
        num_blocks: int | None = None,
        grammar_compiler: GrammarCompiler | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        options = config.node
        num_blocks = connector_memory.num_blocks if num_blocks is None else num_blocks
        engine = EngineCore(
            config.engine,
            model,
            num_blocks,
            runner,
            connector,
            MonotonicClock(),
            grammar_compiler=grammar_compiler,
            adapters=adapters,
            has_model_thread=config.engine.overlaps_steps,
        )
        self._options = options
        self._is_stopping = False
        self._last_publish_s = float("-inf")
        self._stats = EngineStats()  # the published copy
        generation = secrets.randbits(62)
        node_id = options.node_id or f"{role}-{socket.gethostname()}-{generation:016x}"[:48]
        self._core = NodeCore(NodeIdentity(node_id, role, generation), engine)
        self._labels = {"model_name": config.model.name, "node_id": node_id, "role": role}
        metrics_address = self._serve_metrics()
        keys = load_keys(config.security.keys, NODE)
        if connector is not None:  # last of what can fail: a node that cannot start must leave no store behind
            connector.cluster_secret = keys.derive_secret("connector") if keys is not None else b""
            connector.register_kv_cache(connector_memory)
        self._link = NodeLink(
            options.router,
            messages.Register(
                node_id=node_id,
                role=role,
                generation=generation,
                model=model_info(config.model.name, model),
                max_num_seqs=config.engine.max_num_seqs,
                num_blocks=num_blocks,
                connector=connector.name if connector else "none",
                metrics_address=metrics_address,
                kv_address=connector.kv_address if connector else "",
            ),
            keys,
        )
        for source in (connector, grammar_compiler):
            if source is not None:
                source.on_result = self._link.wake_step_thread

    def run(self) -> int:
        """Serve until drained, refused or told to stop. This is the step thread."""
        core, node_id = self._core, self._core.identity.node_id
        self._publish(force=True)
        self._link.start()
        _logger.info("%s waits for the router at %s", node_id, self._options.router)
        was_registered = False
        while not self._is_stopping and not self._link.refusal:
            for _ in range(min(len(self._link.commands), _MAX_COMMANDS_PER_STEP)):
                self._send_all(core.handle(self._link.commands.popleft()))
            if core.engine.has_work():
                news, num_tokens = core.step()
                self._send_all(news)
                if not news and num_tokens == 0:
                    self._link.wait_for_command(_TRANSFER_WAIT_S)
                while (wait_s := core.engine.handoff_wait_s()) > 0.0 and not self._is_stopping:
                    self._link.wait_for_command(min(wait_s, _TRANSFER_WAIT_S))
                    self._send_all(core.settle())
            elif core.is_draining:
                break
            elif not self._link.commands:
                self._link.wait_for_command(_IDLE_WAIT_S)
            if self._link.is_registered and not was_registered and not self._link.refusal:
                was_registered = True
                _logger.info("%s is registered and ready", node_id)
            self._publish()
        self._link.close()
        core.engine.close()
        if self._link.refusal:
            _logger.error("the router refused this node: %s", self._link.refusal)
            return 1
        _logger.info("%s ends", node_id)
        return 0

    def _send_all(self, news: Iterable[messages.NodeMessage]) -> None:
        for message in news:
            self._link.send(message)

    def _publish(self, *, force: bool = False) -> None:
        """Hand the I/O thread a copy of load and stats, at most every tenth of a second."""
        now_s = time.monotonic()
        if force or now_s - self._last_publish_s >= _PUBLISH_INTERVAL_S:
            self._last_publish_s = now_s
            heartbeat = self._core.heartbeat()
            self._stats = heartbeat.stats
            self._link.set_heartbeat(heartbeat)

    def _serve_metrics(self) -> str:
        """Serve /metrics on loopback; the address, or an empty string when it is off. Raises ConfigError."""
        if self._options.metrics_port < 0:
            return ""
        registry = CollectorRegistry()
        registry.register(_StatsCollector(self))
        port = self._options.metrics_port
        try:
            server, _thread = start_http_server(port, addr="127.0.0.1", registry=registry)
        except OSError as error:
            raise ConfigError("node.metrics_port", port, f"a free port, or 0 for any ({error.strerror})") from error
        return f"127.0.0.1:{server.server_port}"

    def metric_families(self) -> list[Metric]:
        """This node's metrics, of the last published state. Any thread."""
        return engine_metric_families([(self._labels, self._stats)])

    def stop(self) -> None:
        """Make run() return after the step in progress. Any thread, or a signal handler."""
        self._is_stopping = True
        self._link.wake_step_thread()


class _StatsCollector(Collector):
    """Lets prometheus_client ask a node for its metrics at each scrape."""

    def __init__(self, node: NodeServer) -> None:
        self._node = node

    def collect(self) -> list[Metric]:
        """The node's families."""
        return self._node.metric_families()


def _with_own_cores(config: Config) -> Config:
    """Bind the process to node.cpus, if there are any; it computes with as many threads then. Raises ConfigError."""
    cores = parse_cores(config.node.cpus)
    if not cores:
        return config
    try:
        claim_cores(cores)
    except OSError as error:
        raise ConfigError("node.cpus", config.node.cpus, f"cores that can be had here ({error})") from error
    num_threads = config.engine.num_threads or len(cores)
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, num_threads=num_threads))


def run_node_process(role: str, compose: Callable[[Config], NodeServer], argv: list[str] | None) -> int:
    """Main of both roles: flags, logging, `compose`, serve. A user's mistake is one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        config = parse_config(f"kvrelay {role}-node", f"One {role} node of a cluster.", NODE_SECTIONS, argv)
        load_keys(config.security.keys, NODE)  # a mistake shows at once, not after a large model has been loaded
        config = _with_own_cores(config)  # before anything starts threads: they inherit it
        node = compose(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: node.stop())
        return node.run()
    except KVRelayError as error:
        print(f"kvrelay {role}-node: {error}", file=sys.stderr)
        return EXIT_USAGE
