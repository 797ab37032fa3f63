"""How long a simulated node's work takes: a plain model with a constant for each thing that takes time.

    step     = overhead + computed tokens * (per token + per position attended to) + positions that decoding requests read
    transfer = latency + blocks * per block, one after the other on a node's link
The defaults are what arithmetic says of a model of 70 billion weights (80 layers of 8,192, grouped KV of 320 KiB per token) on
eight H100 that reach 40 % of their peak: 140 GFLOP per token and 2.6 MFLOP per attended position at 3.2 PFLOP/s, KV read at
26 TB/s, blocks of 512 tokens (160 MiB) moved between nodes at 50 GB/s and from a shared store at 20.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """All times in milliseconds. step_tokens: prompt tokens that one step computes at most."""

    step_overhead_ms: float = 10.0
    ms_per_token: float = 0.044
    ms_per_attended: float = 8e-7
    ms_per_read: float = 1.25e-5
    step_tokens: int = 8192
    transfer_latency_ms: float = 5.0
    link_ms_per_block: float = 3.3
    store_ms_per_block: float = 8.4
    hop_ms: float = 0.5  # a message between router and node
    event_delay_ms: float = 10.0  # from a block's end in a pool to the router's index
    heartbeat_interval_ms: float = 500.0

    def compute_ms(self, num_tokens: int, first_position: int) -> float:
        """What these prompt tokens add to the steps that compute them."""
        return num_tokens * (self.ms_per_token + self.ms_per_attended * (first_position + num_tokens / 2))

    def decode_step_ms(self, num_read_tokens: int) -> float:
        """A step that decodes requests with num_read_tokens tokens of KV in all, and nothing else."""
        return self.step_overhead_ms + num_read_tokens * self.ms_per_read
