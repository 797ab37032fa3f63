"""EngineStats as Prometheus metric families, under the names that every process exposes. Values only; serving them is the
caller's.

A node renders its own stats, the router those of all nodes from their heartbeats: one function, one set of names.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from core.stats import EngineStats

PREFIX = "kvrelay_"
NodeStats = tuple[dict[str, str], EngineStats]

_GAUGES = {
    "num_requests_running": ("Requests in the running batch.", "num_running"),
    "num_requests_waiting": ("Requests that wait, for whatever reason.", "num_waiting"),
    "oldest_waiting_age_seconds": ("Age of the request at the head of the queue.", "oldest_waiting_age_s"),
    "kv_cache_usage_ratio": ("Share of the pool's blocks that are in use, 0 to 1.", "kv_usage_ratio"),
    "prompt_tokens_per_step": ("Prompt tokens computed in the last step.", "step_prompt_tokens"),
    "generation_tokens_per_step": ("Tokens sampled in the last step.", "step_generation_tokens"),
    "kv_transfers_in_flight": ("Transfers that the connector has not reported yet.", "num_transfers_in_flight"),
    "adapters": ("LoRA adapters in memory.", "num_adapters"),
    "connector_circuit_open": ("1 while the store is not asked because it kept failing.", "circuit_is_open"),
    "store_reachable": ("0 while the store is known to be away: everything is a miss.", "store_is_reachable"),
    "store_bytes": ("Bytes of KV in the store, as far as this node knows.", "store_bytes"),
    "store_blocks": ("Blocks in the store, as far as this node knows.", "store_blocks"),
}
_COUNTERS = {
    "steps": ("Engine steps that ran the model.", "num_steps"),
    "preempted_requests": ("Times a running request lost its blocks.", "num_preemptions"),
    "prompt_tokens": ("Prompt tokens of admitted requests, hits included.", "num_prompt_tokens"),
    "generation_tokens": ("Tokens sampled.", "num_generation_tokens"),
    "prefix_cache_queries": ("Tokens asked of the local prefix cache, once per request.", "prefix_cache_query_tokens"),
    "prefix_cache_hits": ("Tokens found in the local prefix cache, once per request.", "prefix_cache_hit_tokens"),
    "external_prefix_cache_queries": ("Tokens asked of the store after local hits, once per request.", "external_query_tokens"),
    "external_prefix_cache_hits": ("Tokens that a store supplied, once per request.", "external_hit_tokens"),
    "adapter_loads": ("LoRA adapters that were read into memory.", "num_adapter_loads"),
    "spec_decode_num_drafts": ("Steps of a request that had draft tokens.", "num_drafts"),
    "forced_tokens": ("Generated tokens that a grammar forced, and no step sampled.", "num_forced_tokens"),
    "spec_decode_num_draft_tokens": ("Draft tokens that steps verified.", "num_draft_tokens"),
    "store_evictions": ("Blocks that this node evicted from the store.", "store_evictions"),
}
# name -> (help, attribute holding a dict, label of the dict's key)
_LABELLED_COUNTERS = {
    "kv_transfer_bytes": ("KV bytes moved.", "transfer_bytes", "direction"),
    "kv_load_or_recompute": ("Decisions to load or to compute KV that a store has.", "load_or_recompute", "choice"),
    "connector_errors": ("Faults of the store, by call or outcome.", "connector_errors", "kind"),
    "store_tier_hit_blocks": ("Blocks loaded from one tier of the store.", "tier_hit_blocks", "tier"),
    "request_finished": ("Requests that ended on this node.", "requests_finished", "finished_reason"),
    "spec_decode_num_accepted_tokens_per_pos": ("Draft tokens that came true.", "accepted_by_position", "position"),
    "step_seconds": ("Time spent in steps.", "step_seconds", "phase"),
}

_LABELLED_GAUGES = {
    "store_tier_reachable": ("0 while this tier of the store is known to be away.", "tier_is_reachable", "tier"),
    "store_tier_blocks": ("Blocks in this tier of the store, as far as this node knows.", "tier_blocks", "tier"),
}


def engine_metric_families(nodes: Sequence[NodeStats]) -> list[Metric]:
    """One family per metric over all nodes. Each node comes with its labels (model_name, node_id, role), the same set for all."""
    label_names = list(nodes[0][0]) if nodes else []
    families: list[Metric] = []
    for name, (text, attribute) in _GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=label_names)
        for labels, stats in nodes:
            gauge.add_metric([labels[key] for key in label_names], float(getattr(stats, attribute)))
        families.append(gauge)
    for name, (text, attribute) in _COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=label_names)
        for labels, stats in nodes:
            counter.add_metric([labels[key] for key in label_names], float(getattr(stats, attribute)))
        families.append(counter)
    for name, (text, attribute, key_label) in _LABELLED_COUNTERS.items():
        counter = CounterMetricFamily(PREFIX + name, text, labels=[*label_names, key_label])
        for labels, stats in nodes:
            for key, value in getattr(stats, attribute).items():
                counter.add_metric([*(labels[name] for name in label_names), key], float(value))
        families.append(counter)
    for name, (text, attribute, key_label) in _LABELLED_GAUGES.items():
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*label_names, key_label])
        for labels, stats in nodes:
            for key, value in getattr(stats, attribute).items():
                gauge.add_metric([*(labels[name] for name in label_names), key], float(value))
        families.append(gauge)
    return [*families, *_structured_families(nodes, label_names)]


def _structured_families(nodes: Sequence[NodeStats], label_names: list[str]) -> list[Metric]:
    """Families whose samples are not one attribute each."""
    waiting = GaugeMetricFamily(
        PREFIX + "num_requests_waiting_by_reason", "Waiting requests by what they wait for.", labels=[*label_names, "reason"]
    )
    blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "Blocks of the pool by state.", labels=[*label_names, "state"])
    transfers = CounterMetricFamily(
        PREFIX + "kv_transfer_blocks", "Blocks of ended transfers.", labels=[*label_names, "direction", "outcome"]
    )
    accepted = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens", "Draft tokens that came true, at whatever position.", labels=label_names
    )
    sources = CounterMetricFamily(
        PREFIX + "prompt_tokens_by_source", "Where the KV of prompts came from.", labels=[*label_names, "source"]
    )
    for labels, stats in nodes:
        values = [labels[key] for key in label_names]
        for reason, count in stats.waiting_by_reason.items():
            waiting.add_metric([*values, reason], count)
        for state, count in (
            ("free", stats.num_blocks_free - stats.num_blocks_cached),
            ("cached", stats.num_blocks_cached),
            ("used", stats.num_blocks_total - stats.num_blocks_free),
        ):
            blocks.add_metric([*values, state], count)
        for key, count in stats.transfer_blocks.items():
            direction, _, outcome = key.partition(".")
            transfers.add_metric([*values, direction, outcome], count)
        accepted.add_metric(values, sum(stats.accepted_by_position.values()))
        for source, count in (
            ("local", stats.prefix_cache_hit_tokens),
            ("external", stats.external_hit_tokens),
            ("recomputed", stats.recomputed_prompt_tokens),
        ):
            sources.add_metric([*values, source], count)
    return [waiting, blocks, transfers, accepted, sources]
