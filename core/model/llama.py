"""The Llama decoder (https://arxiv.org/abs/2302.13971, with grouped-query attention), over one flat batch of tokens.

Tokens of all requests lie one after another, without padding between them; only attention knows which belong together. It decides
nothing: the runner says which tokens, positions and blocks. What families add to Llama is behind fields of ModelArchitecture.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from core.model.activations import ACTIVATIONS, gate_and_up, soft_cap
from core.model.architecture import LayerKind, ModelArchitecture
from core.model.attention import AttentionBackend
from core.model.linear import ROW_MULTIPLE, padded_num_rows
from core.model.lora import AdapterRows, LayerAdapter
from core.model.mixture import mix_experts
from core.model.rotary import RotaryEmbedding, rotate
from core.model.weights import LayerWeights, LlamaWeights, MixtureWeights

LayerAdapters = Sequence[tuple[AdapterRows, LayerAdapter]]  # the step's adapters, each with its part of one layer
Angles = tuple[Tensor, Tensor]  # cosines and sines of the step's positions


class LlamaModel:
    """Weights and the forward pass. Not thread-safe: the attention backend holds the step's plan. row_multiple: a batch has a
    multiple of that many rows.
    """

    row_multiple = ROW_MULTIPLE

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: LlamaWeights,
        rotary: RotaryEmbedding,
        attention: AttentionBackend,
        local_rotary: RotaryEmbedding | None = None,
    ) -> None:
        """local_rotary: for layers whose LayerKind says so."""
        self._architecture = architecture
        self._weights = weights
        self._rotary = rotary
        self._local_rotary = local_rotary
        self._attention = attention
        self._activation = ACTIVATIONS[architecture.activation]
        self._layers = list(zip(weights.layers, architecture.layer_kinds, strict=True))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        adapters: Sequence[AdapterRows] = (),
        num_tokens: int = 0,
    ) -> Tensor:
        """Hidden states after the last layer and norm, [num_rows, hidden], of the weights' dtype.

        token_ids, positions: [num_rows] int64, num_rows a multiple of ROW_MULTIPLE, rows after the batch's tokens are padding.
        kv_caches: per layer the K and V views of the pool. Writes K and V of the tokens there. The attention backend's
        begin_step must have seen the same batch. adapters: with the rows that each of them is for; no row is in two.
        num_tokens: rows that are no padding (0: all, as far as the model can tell); a mixture of experts computes no others.
        """
        angles: dict[str, Angles | None] = {"global": self._rotary.at(positions), "none": None}
        if self._local_rotary is not None:
            angles["local"] = self._local_rotary.at(positions)
        hidden = self._embed(token_ids)
        for index, ((layer, kind), kv_cache) in enumerate(zip(self._layers, kv_caches, strict=True)):
            adapted = [(rows, rows.layers[index]) for rows in adapters]
            normed = self._norm(hidden, layer.input_norm)
            attended = self._self_attention(layer, kind, adapted, normed, angles[kind.rotary], kv_cache)
            hidden = hidden + self._output_norm(attended, layer.attention_output_norm)
            normed = self._norm(hidden, layer.post_attention_norm)
            added = self._feed_forward(layer, adapted, normed, num_tokens or len(normed))
            hidden = hidden + self._output_norm(added, layer.feed_forward_output_norm)
        return self._norm(hidden, self._weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab] of the weights' dtype, for hidden states [num_rows, hidden] of any number of rows."""
        num_rows = hidden.shape[0]
        padded = functional.pad(hidden, (0, 0, 0, padded_num_rows(num_rows) - num_rows))
        logits = self._weights.lm_head(padded)[:num_rows]
        cap = self._architecture.logit_soft_cap
        return soft_cap(logits, cap) if cap else logits

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedded = functional.embedding(token_ids, self._weights.embed_tokens)
        scale = self._architecture.embedding_scale
        # The scale is rounded before it is used, as in training.
        return embedded if scale == 1.0 else embedded * embedded.new_tensor(scale)

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds by part of the forward pass since the last call; empty: not measured."""
        return {}

    def _self_attention(
        self,
        layer: LayerWeights,
        kind: LayerKind,
        adapted: LayerAdapters,
        normed: Tensor,
        angles: Angles | None,
        kv_cache: tuple[Tensor, Tensor],
    ) -> Tensor:
        architecture = self._architecture
        num_heads, num_kv_heads = architecture.num_heads, architecture.num_kv_heads
        qkv = layer.qkv_proj(normed)
        for rows, adapter in adapted:
            rows.add(qkv, normed, adapter.qkv)
        qkv = qkv.view(-1, num_heads + 2 * num_kv_heads, architecture.head_dim)
        turned, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            heads = (self._norm(turned[:, :num_heads], layer.q_norm), self._norm(turned[:, num_heads:], layer.k_norm))
            turned = torch.cat(heads, dim=1)
        if angles is not None:
            turned = rotate(turned, *angles)
        query, key = turned[:, :num_heads], turned[:, num_heads:]
        attended = self._attention.attend(
            query,
            key,
            value,
            *kv_cache,
            architecture.score_scale,
            sliding_window=kind.sliding_window,
            soft_cap=architecture.attention_soft_cap,
        ).flatten(1)
        output = layer.o_proj(attended)
        for rows, adapter in adapted:
            rows.add(output, attended, adapter.o)
        return output

    def _feed_forward(self, layer: LayerWeights, adapted: LayerAdapters, normed: Tensor, num_tokens: int) -> Tensor:
        if isinstance(layer.mlp, MixtureWeights):
            assert self._architecture.experts is not None
            return mix_experts(layer.mlp, self._architecture.experts, self._activation, normed, num_tokens)
        gate_up = layer.mlp.gate_up_proj(normed)
        for rows, adapter in adapted:
            rows.add(gate_up, normed, adapter.gate_up)
        activated = gate_and_up(gate_up, self._activation)
        output = layer.mlp.down_proj(activated)
        for rows, adapter in adapted:
            rows.add(output, activated, adapter.down)
        return output

    def _norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (https://arxiv.org/abs/1910.07467) over the last dimension, computed in float32."""
        shape, eps = (hidden.shape[-1],), self._architecture.rms_norm_eps
        if weight.dtype == hidden.dtype:
            return functional.rms_norm(hidden, shape, weight, eps)
        return functional.rms_norm(hidden.float(), shape, weight, eps).to(hidden.dtype)

    def _output_norm(self, added: Tensor, weight: Tensor | None) -> Tensor:
        return added if weight is None else self._norm(added, weight)
