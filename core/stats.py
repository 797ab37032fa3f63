"""Counters and gauges of one engine, as a plain value: written by the engine, sent in heartbeats, rendered by core/metrics.

Counters are cumulative since the engine's start; gauges are of the last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

# Bounded, because these come from other processes: see core/wire/messages.
_Key = Annotated[str, Meta(max_length=64)]
Counts = Annotated[dict[_Key, int], Meta(max_length=64)]
Durations = Annotated[dict[_Key, float], Meta(max_length=64)]


@dataclass(slots=True)
class EngineStats:
    """One engine's counters and gauges. Times in seconds, sizes in bytes, everything else is a count.

    Hits and queries are counted in tokens, once per request at its first admission. transfers: "direction.outcome" -> number of
    blocks. waiting_by_reason: capacity, loading, constraint, lora.
    """

    # gauges
    num_running: int = 0
    num_waiting: int = 0
    waiting_by_reason: Counts = field(default_factory=dict)
    oldest_waiting_age_s: float = 0.0
    kv_usage_ratio: float = 0.0
    num_blocks_total: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    step_prompt_tokens: int = 0
    step_generation_tokens: int = 0
    num_transfers_in_flight: int = 0
    num_adapters: int = 0  # in memory
    circuit_is_open: bool = False
    store_is_reachable: bool = True
    store_complaint: Annotated[str, Meta(max_length=512)] = ""
    store_bytes: int = 0
    store_blocks: int = 0

    # counters
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    external_query_tokens: int = 0
    external_hit_tokens: int = 0
    recomputed_prompt_tokens: int = 0
    transfer_blocks: Counts = field(default_factory=dict)
    transfer_bytes: Counts = field(default_factory=dict)
    load_or_recompute: Counts = field(default_factory=dict)
    connector_errors: Counts = field(default_factory=dict)
    store_evictions: int = 0
    num_adapter_loads: int = 0
    requests_finished: Counts = field(default_factory=dict)
    step_seconds: Durations = field(default_factory=dict)
    num_drafts: int = 0  # steps of a request that had draft tokens
    num_draft_tokens: int = 0
    accepted_by_position: Counts = field(default_factory=dict)  # accepted draft tokens by their place in the draft, from "0"
    num_forced_tokens: int = 0  # of num_generation_tokens: those that a grammar left no choice about, and nobody sampled

    # by tier, where the store has several
    tier_is_reachable: Counts = field(default_factory=dict)  # gauge, 0 or 1
    tier_blocks: Counts = field(default_factory=dict)  # gauge
    tier_hit_blocks: Counts = field(default_factory=dict)
