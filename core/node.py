"""A node's process: builds the engine's outside world into a loop of commands in, steps, news out. Both roles run this.

Two threads: this one steps the engine, core/node_link's owns the socket. What differs between the roles is passed in.
"""

from __future__ import annotations

import copy
import logging
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from core.clock import MonotonicClock
from core.config import EXIT_USAGE, LOG_FORMAT, Config, parse_config
from core.engine import EngineCore
from core.engine_model import EngineModel
from core.errors import InvalidInputError, KVRelayError, OverloadedError
from core.kv.connector import KVConnector
from core.kv.pool_memory import KVPoolMemory
from core.metrics import engine_metric_families
from core.node_link import NodeLink
from core.request import RequestStage
from core.stats import EngineStats
from core.step import ModelRunner
from core.step_output import StepOutput
from core.wire import messages

_logger = logging.getLogger(__name__)
NODE_SECTIONS = ("model", "engine", "connector", "node")
_PUBLISH_INTERVAL_S = 0.1
_IDLE_WAIT_S = 0.2
_TRANSFER_WAIT_S = 0.005  # while only transfers are in flight, and the connector does not wake us itself


def model_info(name: str, model: EngineModel) -> messages.ModelInfo:
    """What a node tells the router about its model."""
    return messages.ModelInfo(
        model_name=name,
        model_fingerprint=model.namespace.model_fingerprint,
        layout_fingerprint=model.layout.fingerprint,
        block_size=model.layout.block_size,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.layout.dtype,
    )


class NodeServer:
    """One node of a role, "prefill" or "decode". run() returns the process's exit code."""

    def __init__(
        self,
        config: Config,
        role: str,
        model: EngineModel,
        pool: KVPoolMemory,
        runner: ModelRunner,
        connector: KVConnector | None,
    ) -> None:
        options = config.node
        if connector is not None:
            connector.register_kv_cache(pool)
        engine = EngineCore(config.engine, model, pool.num_blocks, runner, connector, MonotonicClock())
        self._options = options
        self._engine = engine
        self._is_draining = False
        self._is_stopping = False
        self._last_publish_s = float("-inf")
        self._stats = EngineStats()  # the published copy
        generation = secrets.randbits(62)
        self._node_id = options.node_id or f"{role}-{socket.gethostname()}-{generation:016x}"[:48]
        self._labels = {"model_name": config.model.name, "node_id": self._node_id, "role": role}
        metrics_address = self._serve_metrics()
        self._link = NodeLink(
            options.router,
            messages.Register(
                node_id=self._node_id,
                role=role,
                generation=generation,
                model=model_info(config.model.name, model),
                max_num_seqs=config.engine.max_num_seqs,
                num_blocks=pool.num_blocks,
                connector=connector.name if connector else "none",
                metrics_address=metrics_address,
            ),
        )
        self._generation = generation
        if connector is not None:
            connector.on_result = self._link.wake_step_thread

    def run(self) -> int:
        """Serve until drained, refused or told to stop. This is the step thread."""
        self._publish(force=True)
        self._link.start()
        _logger.info("%s waits for the router at %s", self._node_id, self._options.router)
        was_registered = False
        while not self._is_stopping and not self._link.refusal:
            self._handle_commands()
            if self._engine.has_work():
                output = self._engine.step()
                if updates := updates_from_output(output):
                    self._link.send(messages.Updates(updates))
                elif output.num_tokens == 0:
                    self._link.wait_for_command(_TRANSFER_WAIT_S)
            elif self._is_draining:
                break
            else:
                self._link.wait_for_command(_IDLE_WAIT_S)
            if self._link.is_registered.is_set() and not was_registered and not self._link.refusal:
                was_registered = True
                _logger.info("%s is registered and ready", self._node_id)
            self._publish()
        self._link.close()
        self._engine.close()
        if self._link.refusal:
            _logger.error("the router refused this node: %s", self._link.refusal)
            return 1
        _logger.info("%s ends", self._node_id)
        return 0

    # -- commands ------------------------------------------------------------------------------------------------------
    def _handle_commands(self) -> None:
        while self._link.commands:
            command = self._link.commands.popleft()
            if isinstance(command, messages.Generate):
                self._generate(command)
            elif isinstance(command, messages.Abort):
                for request_id in command.request_ids:
                    self._engine.abort_request(request_id)
            elif isinstance(command, messages.AuditRequest):
                audit = self._engine.audit()
                self._link.send(
                    messages.AuditReply(
                        audit_id=command.audit_id, node_id=self._node_id, counts=audit.counts, problems=audit.problems
                    )
                )
            elif isinstance(command, messages.Drain):
                self._is_draining = True
                self._publish(force=True)
            elif isinstance(command, messages.RegisterAgain):
                _logger.warning("the router does not know this node: dropping all requests and registering again")
                self._engine.abort_all()

    def _generate(self, command: messages.Generate) -> None:
        if self._is_draining:
            self._refuse(command.request_id, "this node is draining")
            return
        try:
            self._engine.add_request(
                command.request_id,
                command.prompt_token_ids,
                command.output_token_ids,
                command.sampling,
                stage=RequestStage(command.stage),
                priority=command.priority,
                cache_salt=command.cache_salt,
                time_left_s=command.time_left_s,
            )
        except (InvalidInputError, OverloadedError, ValueError) as error:
            self._refuse(command.request_id, str(error))

    def _refuse(self, request_id: str, error: str) -> None:
        self._link.send(messages.Updates((messages.RequestUpdate(request_id, finish_reason="error", error=error),)))

    # -- news ----------------------------------------------------------------------------------------------------------
    def _publish(self, *, force: bool = False) -> None:
        """Hand the I/O thread a copy of load and stats, at most every tenth of a second."""
        now_s = time.monotonic()
        if not force and now_s - self._last_publish_s < _PUBLISH_INTERVAL_S:
            return
        self._last_publish_s = now_s
        self._engine.record_store_stats()
        stats = copy.deepcopy(self._engine.stats)
        self._stats = stats
        self._link.set_heartbeat(
            messages.Heartbeat(
                node_id=self._node_id,
                generation=self._generation,
                load=messages.NodeLoad(
                    num_running=stats.num_running,
                    num_waiting=stats.num_waiting,
                    num_waiting_tokens=self._engine.num_waiting_tokens(),
                    kv_usage=stats.kv_usage_ratio,
                ),
                stats=stats,
                is_draining=self._is_draining,
            )
        )

    def _serve_metrics(self) -> str:
        """Serve /metrics on loopback; the address, or an empty string when it is off."""
        if self._options.metrics_port < 0:
            return ""
        registry = CollectorRegistry()
        registry.register(_StatsCollector(self))
        server, _thread = start_http_server(self._options.metrics_port, addr="127.0.0.1", registry=registry)
        return f"127.0.0.1:{server.server_port}"

    def metric_families(self) -> list[Metric]:
        """This node's metrics, of the last published state. Any thread."""
        return engine_metric_families([(self._labels, self._stats)])

    def stop(self) -> None:
        """Make run() return after the step in progress. Any thread, or a signal handler."""
        self._is_stopping = True
        self._link.wake_step_thread()


def updates_from_output(output: StepOutput) -> tuple[messages.RequestUpdate, ...]:
    """A step's news as wire messages, one per request that has any."""
    request_ids = dict.fromkeys(
        (*output.new_token_ids, *output.finished, *output.num_cached_tokens, *output.prompt_logprobs, *output.prefill_done)
    )
    prefill_done = set(output.prefill_done)
    return tuple(_update_of(request_id, output, request_id in prefill_done) for request_id in request_ids)


def _update_of(request_id: str, output: StepOutput, is_prefill_done: bool) -> messages.RequestUpdate:
    token_ids = output.new_token_ids.get(request_id, ())
    finished = output.finished.get(request_id)
    logprobs = output.logprobs.get(request_id)
    prompt_logprobs = output.prompt_logprobs.get(request_id)
    return messages.RequestUpdate(
        request_id=request_id,
        first_index=output.first_index.get(request_id, 0),
        token_ids=tuple(token_ids),
        finish_reason=finished.reason.value if finished else "",
        stop_token_id=finished.stop_token_id if finished else None,
        error=finished.error if finished else "",
        is_prefill_done=is_prefill_done,
        num_cached_tokens=output.num_cached_tokens.get(request_id, 0),
        logprobs=tuple(logprobs[: len(token_ids)]) if logprobs is not None else None,
        prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
    )


class _StatsCollector(Collector):
    """Lets prometheus_client ask a node for its metrics at each scrape."""

    def __init__(self, node: NodeServer) -> None:
        self._node = node

    def collect(self) -> list[Metric]:
        """The node's families."""
        return self._node.metric_families()


def run_node_process(role: str, compose: Callable[[Config], NodeServer], argv: list[str] | None) -> int:
    """Main of both roles: flags, logging, `compose`, serve. A user's mistake is one line and exit code 2."""
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    try:
        node = compose(parse_config(f"kvrelay {role}-node", f"One {role} node of a cluster.", NODE_SECTIONS, argv))
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: node.stop())
        return node.run()
    except KVRelayError as error:
        print(f"kvrelay {role}-node: {error}", file=sys.stderr)
        return EXIT_USAGE
