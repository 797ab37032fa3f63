"""What a node does with a command and a step, without threads or sockets: shared by the real process and the simulation.

Commands come in as wire messages; answers are returned as wire messages.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

from core.engine import EngineCore
from core.engine_model import EngineModel
from core.errors import InvalidInputError, OverloadedError
from core.kv.load_cost import MeasuredCosts
from core.kv_event_stream import KVEventStream
from core.request import RequestStage
from core.step_output import StepOutput
from core.wire import messages

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Who a node is: generation differs for every start of its process."""

    node_id: str
    role: str
    generation: int


class NodeCore:
    """One node's engine and its conversation with the router. Step thread only."""

    def __init__(self, identity: NodeIdentity, engine: EngineCore) -> None:
        self.identity = identity
        self.engine = engine
        self.is_draining = False
        self._kv_events = KVEventStream(engine)

    def handle(self, command: messages.RouterMessage) -> list[messages.NodeMessage]:
        """Carry out one command; returns what is to be answered at once."""
        if isinstance(command, messages.Generate):
            return self._generate(command)
        if isinstance(command, messages.Abort):
            for request_id in command.request_ids:
                self.engine.abort_request(request_id)
        elif isinstance(command, messages.AuditRequest):
            audit = self.engine.audit()
            node_id = self.identity.node_id
            counts = audit.counts
            if command.block_hashes:
                counts = {**counts, messages.LEADING_BLOCKS: self.engine.num_cached_blocks(command.block_hashes)}
            return [messages.AuditReply(audit_id=command.audit_id, node_id=node_id, counts=counts, problems=audit.problems)]
        elif isinstance(command, messages.LoadAdapter):
            return self._load_adapter(command)
        elif isinstance(command, messages.UnloadAdapter):
            self.engine.adapters.forget(command.fingerprint.hex())
        elif isinstance(command, messages.KVSnapshotRequest):
            return self._kv_events.start()
        elif isinstance(command, messages.Drain):
            self.is_draining = True
            self._kv_events.stop()
        elif isinstance(command, messages.RegisterAgain):
            num_dropped = self.engine.abort_all()
            self.engine.adapters.forget_all()
            self._kv_events.stop()
            if num_dropped:
                _logger.warning("the router is gone or has forgotten this node: dropped %d requests", num_dropped)
        return []

    def step(self) -> tuple[list[messages.NodeMessage], int]:
        """One engine step: its news, and how many tokens it computed (0: only transfers can bring more)."""
        output = self.engine.step()
        updates = updates_from_output(output)
        news = self._kv_events.collect()  # first: whoever hears that a prompt is done may ask for its blocks
        news += [messages.Updates(updates)] if updates else []
        news += [_adapter_reply(bytes.fromhex(load.adapter), load.error) for load in output.adapter_loads]
        return news, output.num_tokens

    def settle(self) -> list[messages.NodeMessage]:
        """News of ended transfers alone; see EngineCore.handoff_wait_s."""
        updates = updates_from_output(self.engine.settle())
        return [*self._kv_events.collect(), *([messages.Updates(updates)] if updates else [])]

    def heartbeat(self) -> messages.Heartbeat:
        """Load and stats of this moment; a copy, so that another thread may send it."""
        self.engine.record_gauges()
        stats = copy.deepcopy(self.engine.stats)
        return messages.Heartbeat(
            node_id=self.identity.node_id,
            generation=self.identity.generation,
            load=messages.NodeLoad(
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                num_waiting_tokens=self.engine.num_waiting_tokens(),
                kv_usage=stats.kv_usage_ratio,
            ),
            stats=stats,
            is_draining=self.is_draining,
            costs=node_costs(self.engine.measured_costs(), self.engine.model.layout.block_bytes),
        )

    def _load_adapter(self, command: messages.LoadAdapter) -> list[messages.NodeMessage]:
        try:
            is_here = self.engine.adapters.add(command.fingerprint.hex(), command.path)
        except InvalidInputError as error:
            return [_adapter_reply(command.fingerprint, str(error))]
        return [_adapter_reply(command.fingerprint)] if is_here else []

    def _generate(self, command: messages.Generate) -> list[messages.NodeMessage]:
        if self.is_draining:
            return [_refusal(command.request_id, "this node is draining")]
        if self.engine.has_request(command.request_id):  # a refusal would end the one that runs
            _logger.warning("ignored a second request with the id %s", command.request_id)
            return []
        adapter = command.adapter_fingerprint.hex()
        if adapter and not self.engine.adapters.is_known(adapter):
            return [_refusal(command.request_id, f"the adapter {command.adapter_name} ({adapter}) is not loaded here")]
        try:
            self.engine.add_request(
                command.request_id,
                command.prompt_token_ids,
                command.output_token_ids,
                command.sampling,
                stage=RequestStage(command.stage),
                priority=command.priority,
                cache_salt=command.cache_salt,
                time_left_s=command.time_left_s,
                kv_sources=command.kv_sources,
                adapter=adapter,
            )
        except (InvalidInputError, OverloadedError, ValueError) as error:
            return [_refusal(command.request_id, str(error))]
        return []


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


def node_costs(measured: MeasuredCosts, block_bytes: int) -> messages.NodeCosts:
    """What a node tells the router of its measurements."""

    def milliseconds(seconds: float) -> float:
        return min(1000.0 * seconds, messages.MAX_COST_MS)  # what is more is no message

    return messages.NodeCosts(
        prefill_overhead_ms=milliseconds(measured.prefill_overhead_s),
        prefill_ms_per_token=milliseconds(measured.prefill_s_per_token),
        prefill_ms_per_attended=milliseconds(measured.prefill_s_per_attended),
        load_latency_ms=milliseconds(measured.load_latency_s),
        load_ms_per_block=milliseconds(measured.load_s_per_byte * block_bytes),
        decode_step_ms=milliseconds(measured.decode_step_s),
    )


def _adapter_reply(fingerprint: bytes, error: str = "") -> messages.AdapterReply:
    return messages.AdapterReply(fingerprint, error[: messages.MAX_TEXT_CHARS])


def _refusal(request_id: str, error: str) -> messages.Updates:
    return messages.Updates((messages.RequestUpdate(request_id, finish_reason="error", error=error[: messages.MAX_TEXT_CHARS]),))


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
        error=finished.error[: messages.MAX_TEXT_CHARS] if finished else "",
        is_prefill_done=is_prefill_done,
        num_cached_tokens=output.num_cached_tokens.get(request_id, 0),
        logprobs=tuple(logprobs[: len(token_ids)]) if logprobs is not None else None,
        prompt_logprobs=tuple(prompt_logprobs) if prompt_logprobs is not None else None,
    )
