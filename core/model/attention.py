"""The interface between the model and whatever computes paged attention: one call per layer, prefill and decode mixed.

Implementations live beside this file (attention_torch.py). They own no memory: K and V stay in the pool.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where one step's tokens lie, for all layers alike. All tensors are int64; slot_mapping is on the pool's device, the others
    are on the CPU, where a backend plans from them.

    The batch is flat: request r owns rows query_start[r] to query_start[r + 1], and these are the *last* tokens of its
    sequence of seq_lens[r] tokens (so its row j is at position seq_lens[r] - (query_start[r + 1] - query_start[r]) + j).
    slot_mapping: [num_tokens], block_id * block_size + offset of each row's own K and V. block_tables: [num_requests,
    max_blocks], block_ids in sequence order; entries beyond a request's own are any valid block_id. query_start:
    [num_requests + 1]. seq_lens: [num_requests], this step's tokens included. num_common_blocks: leading entries that are surely
    the same in all block_tables; some or all requests may have more in common.
    """

    slot_mapping: Tensor
    block_tables: Tensor
    query_start: Tensor
    seq_lens: Tensor
    num_common_blocks: int = 0


class AttentionBackend(ABC):
    """Causal grouped-query attention over the paged KV pool.

    Batch invariance is the contract: the output row of a token is bit-identical for the same query and the same K and V
    at positions up to its own, whatever else is in the batch, whichever blocks hold them, and however the sequence was cut into
    steps. So reductions over positions may be split only at fixed absolute positions. Step thread only.
    """

    @abstractmethod
    def begin_step(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of this step share. Called once before the step's first `attend`."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sliding_window: int = 0,
        soft_cap: float = 0.0,
    ) -> Tensor:
        """Write this layer's K and V into the pool, then attend; the step's own tokens see each other causally.

        query: [num_rows, num_heads, head_dim]; key, value: [num_rows, num_kv_heads, head_dim], all of the model's dtype,
        positions already applied. num_rows may exceed num_tokens: the rest is padding, which is neither written nor
        attended. key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim] views of the pool, strided by
        block and, where other processes have the other heads, by token; of another dtype perhaps (kv_format.py). Query head h
        reads KV head h // (num_heads // num_kv_heads). scale multiplies the scores. sliding_window: a token sees so many
        positions, its own included; 0: all up to its own. soft_cap: scaled scores become soft_cap * tanh(score / soft_cap); 0.0:
        they stay. Both may differ from layer to layer. Returns [num_rows, num_heads, head_dim] of query's dtype; padding rows are
        zero.
        """
