"""A cluster on a virtual clock that serves a trace: simulated nodes, the real policy, messages between them that take time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.router.cost_model import CostModel
from bench.router.trace import TraceRequest
from bench.router.virtual_node import Job, NodeNews, VirtualNode
from bench.router.virtual_router import VirtualRouter
from bench.router.virtual_store import VirtualStore
from core.request import Request, RequestStage
from core.sampling_params import SamplingParams
from router.policy import Placement

MAX_NUM_SEQS = 256


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """num_mixed nodes that do both, or num_prefill and num_decode nodes; blocks per pool; of the store, 0 for none."""

    num_mixed: int
    num_prefill: int
    num_decode: int
    num_blocks: int
    num_store_blocks: int = 0

    def make_nodes(self, costs: CostModel) -> list[VirtualNode]:
        """The nodes, all with the same store."""
        roles = ["prefill"] * self.num_prefill + ["decode"] * (self.num_decode or self.num_mixed)
        store = VirtualStore(self.num_store_blocks) if self.num_store_blocks else None
        return [
            VirtualNode(f"{role}-{place:03}", role, self.num_blocks, MAX_NUM_SEQS, costs, store)
            for place, role in enumerate(roles)
        ]


@dataclass(slots=True)
class Served:
    """What became of one request. Hits are those of the node that computed the prompt, stored ones included."""

    num_prompt_tokens: int
    num_hit_tokens: int = 0
    num_stored_tokens: int = 0
    ttft_s: float = 0.0
    end_to_end_s: float = 0.0


@dataclass(slots=True)
class _InFlight:
    traced: TraceRequest
    node_id: str = ""
    wire_id: str = ""
    has_first_token: bool = False
    dispatches: int = field(default=0)


class VirtualCluster:
    """Serves a trace once. Everything follows from the trace, the shape, the costs and the policy."""

    def __init__(self, shape: ClusterShape, policy: str, costs: CostModel) -> None:
        self._costs = costs
        self._nodes = {node.node_id: node for node in shape.make_nodes(costs)}
        self._router = VirtualRouter(policy, self.nodes)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._due: dict[str, float] = {}  # when each node's next event is in the heap
        self.now_s = 0.0
        self.served: list[Served] = []
        self.num_prefills_by_reason: Counter[str] = Counter()  # on decode nodes
        self.num_requests_by_node: dict[str, int] = dict.fromkeys(self._nodes, 0)
        self._in_flight: dict[int, _InFlight] = {}
        self._num_open = 0

    def run(self, requests: Sequence[TraceRequest]) -> list[Served]:
        """Serve the trace to its end; in its order."""
        self.served = [Served(traced.num_prompt_tokens) for traced in requests]
        self._num_open = len(requests)
        for traced in requests:
            self._at(traced.arrival_s, lambda traced=traced: self._arrive(traced))  # type: ignore[misc]
        for node in self._nodes.values():
            self._heartbeat(node)
        while self._num_open:
            self.now_s, _number, action = heapq.heappop(self._events)
            action()
        return self.served

    @property
    def nodes(self) -> list[VirtualNode]:
        """All nodes."""
        return list(self._nodes.values())

    # -- router --------------------------------------------------------------------------------------------------------
    def _arrive(self, traced: TraceRequest) -> None:
        in_flight = self._in_flight[traced.index] = _InFlight(traced)
        names = traced.full_block_names
        placement = self._router.place_prefill(traced.num_prompt_tokens, names, self.now_s)
        if placement.node_id:
            self._dispatch(in_flight, placement, RequestStage.PREFILL)
        else:
            self.num_prefills_by_reason[placement.reason] += 1
            placement = self._router.place_decode(traced.num_prompt_tokens, names, self.now_s)
            self._dispatch(in_flight, placement, RequestStage.DECODE)

    def _dispatch(self, in_flight: _InFlight, placement: Placement, stage: RequestStage, num_sent_blocks: int = 0) -> None:
        traced, node_id = in_flight.traced, placement.node_id
        num_tokens = traced.num_prompt_tokens + in_flight.has_first_token
        in_flight.dispatches += 1
        in_flight.node_id, in_flight.wire_id = node_id, f"{traced.index}.{in_flight.dispatches}"
        names = [*traced.full_block_names]
        if stage is RequestStage.DECODE:
            names += traced.output_block_names()
        request = Request(
            request_id=in_flight.wire_id,
            token_ids=[0] * num_tokens,
            num_prompt_tokens=traced.num_prompt_tokens,
            sampling=SamplingParams(max_tokens=traced.num_output_tokens),
            stage=stage,
            block_hashes=names,
        )
        job = Job(traced.index, in_flight.wire_id, request, traced.num_output_tokens, num_sent_blocks)
        self._router.registry.start_dispatch(node_id, in_flight.wire_id, num_tokens, prefill_ms=placement.prefill_ms)
        self.num_requests_by_node[node_id] += 1
        node = self._nodes[node_id]
        self._at(self.now_s + self._costs.hop_ms / 1000, lambda: self._reach(node, job))

    def _take_first_token(self, job: Job) -> None:
        in_flight = self._in_flight[job.order]
        self._router.registry.nodes[in_flight.node_id].end_prefill(in_flight.wire_id)
        if in_flight.has_first_token:
            return
        in_flight.has_first_token = True
        served = self.served[job.order]
        served.num_hit_tokens, served.num_stored_tokens = job.num_hit_tokens, job.num_stored_tokens
        served.ttft_s = self.now_s - in_flight.traced.arrival_s

    def _take_end(self, job: Job) -> None:
        in_flight = self._in_flight[job.order]
        traced = in_flight.traced
        self._router.registry.end_dispatch(in_flight.node_id, in_flight.wire_id)
        if job.request.stage is RequestStage.PREFILL and traced.num_output_tokens > 1:
            names = traced.full_block_names
            placement = self._router.place_decode(traced.num_prompt_tokens + 1, names, self.now_s, is_handoff=True)
            self._dispatch(in_flight, placement, RequestStage.DECODE, len(names))
            return
        self.served[job.order].end_to_end_s = self.now_s - traced.arrival_s
        del self._in_flight[job.order]
        self._num_open -= 1

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _reach(self, node: VirtualNode, job: Job) -> None:
        node.add(job, self.now_s)
        self._schedule(node)

    def _heartbeat(self, node: VirtualNode) -> None:
        self._router.heartbeat(node, self.now_s)
        self._at(self.now_s + self._costs.heartbeat_interval_ms / 1000, lambda: self._heartbeat(node))

    def _schedule(self, node: VirtualNode) -> None:
        due_s = node.next_event_s
        if due_s is None or self._due.get(node.node_id) == due_s:
            return
        self._due[node.node_id] = due_s
        self._at(due_s, lambda: self._wake(node, due_s))

    def _wake(self, node: VirtualNode, due_s: float) -> None:
        if self._due.get(node.node_id) != due_s:
            return  # it was put off or brought forward since
        del self._due[node.node_id]
        self._tell(node, node.on_time(self.now_s))
        self._schedule(node)

    def _tell(self, node: VirtualNode, news: NodeNews) -> None:
        reaches_s = self.now_s + self._costs.hop_ms / 1000
        for job in news.first_tokens:
            self._at(reaches_s, lambda job=job: self._take_first_token(job))  # type: ignore[misc]
        for job in news.finished:
            self._at(reaches_s, lambda job=job: self._take_end(job))  # type: ignore[misc]
        if (changes := news.changes) is not None:
            told_s = self.now_s + self._costs.event_delay_ms / 1000
            self._at(told_s, lambda: self._router.take_events(node.node_id, changes))

    def _at(self, when_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when_s, self._num_events, action))
