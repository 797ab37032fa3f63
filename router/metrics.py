"""The router's own metrics and the exposition of everything it knows: its counters, its nodes' liveness and their engine stats.

Rendering of engine stats lives in core/metrics. RouterCore and the HTTP handlers write here, all from the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from core.clock import Clock
from core.metrics import engine_metric_families
from router.registry import NodeRegistry

# fmt: off
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0,
)
INTER_TOKEN_BUCKETS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075,
    0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0,
)
# fmt: on
DECISION_BUCKETS = (10e-6, 25e-6, 50e-6, 100e-6, 200e-6, 300e-6, 500e-6, 0.001, 0.005, 0.025, 0.1)
TOKEN_BUCKETS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


class RouterMetrics:
    """All metrics of one router in its own CollectorRegistry, so that several routers can live in one process."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            family = Histogram(f"kvrelay_{name}", text, ["model_name"], buckets=tuple(buckets), registry=self.registry)
            return family.labels(model_name)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvrelay_{name}", text, labels, registry=self.registry)

        self.time_to_first_token = histogram("time_to_first_token_seconds", "Arrival to first token", LATENCY_BUCKETS)
        self.inter_token_latency = histogram("inter_token_latency_seconds", "Between output tokens", INTER_TOKEN_BUCKETS)
        self.time_per_output_token = histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, per request", INTER_TOKEN_BUCKETS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token", LATENCY_BUCKETS)
        self.queue_time = histogram("request_queue_seconds", "Arrival to first dispatch", LATENCY_BUCKETS)
        self.prefill_time = histogram("request_prefill_seconds", "First dispatch to first token", LATENCY_BUCKETS)
        self.handoff_time = histogram(
            "request_handoff_seconds", "First token from the prefill node to the next from the decode node", LATENCY_BUCKETS
        )
        self.decode_time = histogram("request_decode_seconds", "First to last token", LATENCY_BUCKETS)
        self.routing_decision = histogram("routing_decision_seconds", "Choice of nodes for a request", DECISION_BUCKETS)
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request", TOKEN_BUCKETS)
        self.generation_tokens = histogram("request_generation_tokens", "Output tokens per request", TOKEN_BUCKETS)
        self.prompt_cached_tokens = counter("prompt_cached_tokens_total", "Prompt tokens that nodes found in a cache or store")
        self.request_success = counter("request_success_total", "Requests that ended with their answer", ("finished_reason",))
        self.request_errors = counter("request_errors_total", "Requests that ended with an error", ("kind",))
        self.routed_requests = counter("routed_requests_total", "Dispatches to nodes", ("policy", "node", "reason"))
        self.decisions = counter("router_decisions_total", "Choices of a node, or of doing without one", ("role", "reason"))
        self.local_prefill = counter("local_prefill_total", "Prefills left to a decode node", ("reason",))
        self.retries = counter("retries_total", "Dispatches that followed a fault", ("reason",))
        self.migrations = counter("migrations_total", "Requests that moved mid-stream", ("reason", "outcome"))
        self.moved_tokens = counter("moved_tokens_total", "Known tokens of requests that moved, by source of KV", ("source",))
        self.admission_rejections = counter("admission_rejections_total", "Requests turned away at once", ("reason",))
        self.wire_gaps = counter("wire_gaps_total", "Registrations ended because messages of the node were lost")
        self.index_gaps = counter("router_index_gaps_total", "Times a node's KV events were missing, so that all were asked for")
        self.index_blocks = Gauge(
            "kvrelay_router_index_blocks", "Blocks known to be in a node's cache", ["node_id"], registry=self.registry
        )
        self.wire_errors = counter("wire_errors_total", "Messages from nodes that could not be read")
        self.failed_handshakes = counter("failed_handshakes_total", "Connections to the control port without the right keys")

    def watch_nodes(self, nodes: NodeRegistry, clock: Clock) -> None:
        """Add the nodes' liveness and engine stats to what is exposed. Call once."""
        self.registry.register(_NodeCollector(nodes, clock, self.model_name))

    def forget_node(self, node_id: str) -> None:
        """Drop the series of a node that is gone for good: names differ for every start, so they would add up without end."""
        self.routed_requests.remove_by_labels({"node": node_id})

    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self.registry)


class _NodeCollector(Collector):
    def __init__(self, nodes: NodeRegistry, clock: Clock, model_name: str) -> None:
        self._nodes = nodes
        self._clock = clock
        self._model_name = model_name

    def collect(self) -> Iterable[Metric]:
        labels = ["model_name", "node_id", "role"]
        up = GaugeMetricFamily("kvrelay_node_up", "1 while the node is connected and its step thread moves", labels=labels)
        age = GaugeMetricFamily("kvrelay_node_heartbeat_age_seconds", "Since the node's last heartbeat", labels=labels)
        in_flight = GaugeMetricFamily("kvrelay_node_requests_in_flight", "Dispatches that have not ended", labels=labels)
        stats = []
        for node in sorted(self._nodes.nodes.values(), key=lambda node: node.node_id):
            values = [self._model_name, node.node_id, node.role]
            up.add_metric(values, float(node.status.value in ("up", "draining")))
            age.add_metric(values, self._clock.now_s() - node.last_heartbeat_s)
            in_flight.add_metric(values, len(node.in_flight) if node.is_connected else 0)
            if node.is_connected:
                stats.append((dict(zip(labels, values, strict=True)), node.stats))
        return [up, age, in_flight, *engine_metric_families(stats)]
