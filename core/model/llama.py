"""The Llama decoder (https://arxiv.org/abs/2302.13971, with grouped-query attention), over one flat batch of tokens.

Tokens of all requests lie one after another, without padding between them; only attention knows which belong together. It decides
nothing: the runner says which tokens, positions and blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from core.model.attention import AttentionBackend
from core.model.description import ModelArchitecture
from core.model.linear import ROW_MULTIPLE, padded_num_rows
from core.model.lora import AdapterRows, LayerAdapter
from core.model.rotary import RotaryEmbedding, rotate
from core.model.weights import LayerWeights, LlamaWeights

LayerAdapters = Sequence[tuple[AdapterRows, LayerAdapter]]  # the step's adapters, each with its part of one layer
FEED_FORWARD_ROWS = 128  # rows whose activations are worked on at a time, so that their float32 copies stay in the cache


class LlamaModel:
    """Weights and the forward pass. Not thread-safe: the attention backend holds the step's plan. row_multiple: a batch has a
    multiple of that many rows.
    """

    row_multiple = ROW_MULTIPLE

    def __init__(
        self, architecture: ModelArchitecture, weights: LlamaWeights, rotary: RotaryEmbedding, attention: AttentionBackend
    ) -> None:
        self._architecture = architecture
        self._weights = weights
        self._rotary = rotary
        self._attention = attention
        self._scale = architecture.head_dim**-0.5

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        adapters: Sequence[AdapterRows] = (),
    ) -> Tensor:
        """Hidden states after the last layer and norm, [num_rows, hidden], of the weights' dtype.

        token_ids, positions: [num_rows] int64, num_rows a multiple of ROW_MULTIPLE, rows after the batch's tokens are padding.
        kv_caches: per layer the K and V views of the pool. Writes K and V of the tokens there. The attention backend's
        begin_step must have seen the same batch. adapters: with the rows that each of them is for; no row is in two.
        """
        cos, sin = self._rotary.at(positions)
        hidden = functional.embedding(token_ids, self._weights.embed_tokens)
        for index, (layer, kv_cache) in enumerate(zip(self._weights.layers, kv_caches, strict=True)):
            adapted = [(rows, rows.layers[index]) for rows in adapters]
            normed = self._norm(hidden, layer.input_norm)
            hidden = hidden + self._self_attention(layer, adapted, normed, cos, sin, kv_cache)
            normed = self._norm(hidden, layer.post_attention_norm)
            hidden = hidden + _feed_forward(layer, adapted, normed)
        return self._norm(hidden, self._weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab] of the weights' dtype, for hidden states [num_rows, hidden] of any number of rows."""
        num_rows = hidden.shape[0]
        padded = functional.pad(hidden, (0, 0, 0, padded_num_rows(num_rows) - num_rows))
        return self._weights.lm_head(padded)[:num_rows]

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds by part of the forward pass since the last call; empty: not measured."""
        return {}

    def _self_attention(
        self,
        layer: LayerWeights,
        adapted: LayerAdapters,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        num_heads, num_kv_heads = self._architecture.num_heads, self._architecture.num_kv_heads
        qkv = layer.qkv_proj(normed)
        for rows, adapter in adapted:
            rows.add(qkv, normed, adapter.qkv)
        qkv = qkv.view(-1, num_heads + 2 * num_kv_heads, self._architecture.head_dim)
        turned = rotate(qkv[:, : num_heads + num_kv_heads], cos, sin)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        value = qkv[:, num_heads + num_kv_heads :]
        attended = self._attention.attend(query, key, value, *kv_cache, self._scale).flatten(1)
        output = layer.o_proj(attended)
        for rows, adapter in adapted:
            rows.add(output, attended, adapter.o)
        return output

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (https://arxiv.org/abs/1910.07467), computed in float32."""
        return functional.rms_norm(hidden, (hidden.shape[-1],), weight, self._architecture.rms_norm_eps)


def _feed_forward(layer: LayerWeights, adapted: LayerAdapters, normed: Tensor) -> Tensor:
    """SwiGLU (https://arxiv.org/abs/2002.05202): down(silu(gate(x)) * up(x))."""
    gate_up = layer.gate_up_proj(normed)
    for adapter_rows, adapter in adapted:
        adapter_rows.add(gate_up, normed, adapter.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    activated = torch.empty_like(gate, memory_format=torch.contiguous_format)
    for rows in range(0, gate.shape[0], FEED_FORWARD_ROWS):
        part = slice(rows, rows + FEED_FORWARD_ROWS)
        activated[part] = silu(gate[part]).mul_(up[part])
    output = layer.down_proj(activated)
    for adapter_rows, adapter in adapted:
        adapter_rows.add(output, activated, adapter.down)
    return output


def silu(values: Tensor) -> Tensor:
    """x / (1 + exp(-x)) in float32, rounded once to values' dtype.

    Not torch's silu: that one computes the end of each thread's range by scalar code with other roundings, so that an
    element's bits depend on the number of rows and threads. torch.exp is the same for every element.
    """
    exact = values.float()
    return (exact / exact.neg().exp_().add_(1.0)).to(values.dtype)
