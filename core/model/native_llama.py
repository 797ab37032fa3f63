"""The Llama decoder on this project's own CPU kernels (native/src): what llama.py computes, in five calls per layer.

For architectures without peculiarities, in bfloat16 or float32. Rows need no padding: any number gives a row the same bits.
Layers that an adapter changes are computed in single operations with the same arithmetic, so that other rows keep their bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from core.model.architecture import ModelArchitecture
from core.model.attention_native import NativeAttention
from core.model.lora import AdapterRows, LayerAdapter
from core.model.native_linear import NATIVE_DTYPES, NativeLinear
from core.model.rotary import RotaryEmbedding
from core.model.weights import LayerWeights, LlamaWeights


class NativeLlamaModel:
    """Weights and the forward pass; see LlamaModel, whose interface this is. Not thread-safe: rows pass through one workspace."""

    row_multiple = 1

    def __init__(
        self,
        native: Any,
        architecture: ModelArchitecture,
        weights: LlamaWeights,
        rotary: RotaryEmbedding,
        attention: NativeAttention,
    ) -> None:
        """native: the extension. All projections of `weights` are NativeLinear."""
        self._native = native
        self._architecture = architecture
        self._weights = weights
        self._rotary = rotary
        self._attention = attention
        self._scale = architecture.head_dim**-0.5
        dtype = NATIVE_DTYPES[weights.embed_tokens.dtype]
        self._norm = getattr(native, f"norm_{dtype}")
        self._activate = getattr(native, f"activate_{dtype}")
        self._rotate_and_store = getattr(native, f"rotate_and_store_{dtype}")
        self._workspace = _Workspace(architecture, weights.embed_tokens.dtype)
        self._part_seconds = dict.fromkeys(("linears", "attention", "norms and rotary"), 0.0)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        adapters: Sequence[AdapterRows] = (),
        num_tokens: int = 0,
    ) -> Tensor:
        """See LlamaModel.forward; num_rows is any number of at least 1."""
        space = self._workspace.take(len(token_ids))
        torch.index_select(self._weights.embed_tokens, 0, token_ids, out=space.hidden)
        for index, (layer, kv_cache) in enumerate(zip(self._weights.layers, kv_caches, strict=True)):
            adapted = [(rows, rows.layers[index]) for rows in adapters]
            if adapted:
                self._adapted_layer(space, layer, positions, kv_cache, adapted)
            else:
                self._layer(space, layer, positions, kv_cache)
        hidden = torch.empty_like(space.hidden)
        self._normalize(space.hidden, self._weights.norm, hidden)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab] float32, as accumulated, for hidden states [num_rows, hidden] of any number of rows."""
        head = self._weights.lm_head
        assert isinstance(head, NativeLinear)
        started = time.perf_counter()
        logits = head.in_float32(hidden)
        self._part_seconds["linears"] += time.perf_counter() - started
        return logits

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds of the forward passes by part since the last call."""
        taken = dict(self._part_seconds)
        self._part_seconds = dict.fromkeys(taken, 0.0)
        return taken

    def _layer(self, space: _Rows, layer: LayerWeights, positions: Tensor, kv_cache: tuple[Tensor, Tensor]) -> None:
        native, epsilon, num_rows = self._native, self._architecture.rms_norm_eps, space.num_rows
        started = time.perf_counter()
        native.norm_linear(
            _packed(layer.qkv_proj),
            space.hidden_at,
            layer.input_norm.data_ptr(),
            epsilon,
            space.normed_at,
            space.qkv_at,
            num_rows,
        )
        after_qkv = time.perf_counter()
        self._rotate(space, positions, kv_cache)
        after_rotary = time.perf_counter()
        attended = self._attend(space, kv_cache)
        after_attention = time.perf_counter()
        native.linear_onto(_packed(layer.o_proj), attended.data_ptr(), space.hidden_at, num_rows)
        native.feed_forward(
            _packed(layer.gate_up_proj),
            _packed(layer.down_proj),
            layer.post_attention_norm.data_ptr(),
            epsilon,
            space.hidden_at,
            space.normed_at,
            space.gate_up_at,
            space.activated_at,
            num_rows,
        )
        ended, parts = time.perf_counter(), self._part_seconds
        parts["linears"] += after_qkv - started + ended - after_attention
        parts["norms and rotary"] += after_rotary - after_qkv
        parts["attention"] += after_attention - after_rotary

    def _adapted_layer(
        self,
        space: _Rows,
        layer: LayerWeights,
        positions: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        adapted: Sequence[tuple[AdapterRows, LayerAdapter]],
    ) -> None:
        """The same in single operations, with the adapters' parts added to their rows of each projection."""
        self._normalize(space.hidden, layer.input_norm, space.normed)
        space.qkv.copy_(layer.qkv_proj(space.normed))
        for rows, adapter in adapted:
            rows.add(space.qkv, space.normed, adapter.qkv)
        self._rotate(space, positions, kv_cache)
        attended = self._attend(space, kv_cache)
        output = layer.o_proj(attended)
        for rows, adapter in adapted:
            rows.add(output, attended, adapter.o)
        space.hidden += output
        self._normalize(space.hidden, layer.post_attention_norm, space.normed)
        gate_up = layer.gate_up_proj(space.normed)
        for rows, adapter in adapted:
            rows.add(gate_up, space.normed, adapter.gate_up)
        self._activate(gate_up.data_ptr(), space.activated_at, space.num_rows, self._architecture.intermediate_size)
        output = layer.down_proj(space.activated)
        for rows, adapter in adapted:
            rows.add(output, space.activated, adapter.down)
        space.hidden += output

    def _rotate(self, space: _Rows, positions: Tensor, kv_cache: tuple[Tensor, Tensor]) -> None:
        """Queries, turned, into space.query; keys, turned, and values into the pool."""
        key_cache, value_cache = kv_cache
        slots = self._attention.slot_mapping
        architecture = self._architecture
        sizes = (
            space.num_rows,
            slots.shape[0],
            architecture.num_heads,
            architecture.num_kv_heads,
            architecture.head_dim,
            key_cache.shape[1],
            key_cache.stride(0),
            key_cache.stride(1),
        )
        self._rotate_and_store(
            space.qkv_at,
            space.query_at,
            positions.data_ptr(),
            self._rotary.cos.data_ptr(),
            self._rotary.sin.data_ptr(),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            slots.data_ptr(),
            sizes,
        )

    def _attend(self, space: _Rows, kv_cache: tuple[Tensor, Tensor]) -> Tensor:
        """[num_rows, num_heads * head_dim]."""
        return self._attention.attend_stored(space.query, *kv_cache, self._scale).flatten(1)

    def _normalize(self, inputs: Tensor, weight: Tensor, outputs: Tensor) -> None:
        num_rows, size = inputs.shape
        self._norm(inputs.data_ptr(), weight.data_ptr(), outputs.data_ptr(), num_rows, size, self._architecture.rms_norm_eps)


def is_native(architecture: ModelArchitecture, weights: LlamaWeights) -> bool:
    """Whether NativeLlamaModel computes this model."""
    if not architecture.is_plain_llama:
        return False
    layers = weights.layers
    projections = [p for layer in layers for p in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)]
    return all(isinstance(linear, NativeLinear) for linear in (*projections, weights.lm_head))


def _packed(linear: Any) -> Any:
    return linear.packed


class _Rows:
    """Memory for num_rows rows on their way through a layer, as tensors and as addresses."""

    def __init__(self, hidden: Tensor, normed: Tensor, qkv: Tensor, query: Tensor, gate_up: Tensor, activated: Tensor) -> None:
        self.num_rows = hidden.shape[0]
        self.hidden, self.hidden_at = hidden, hidden.data_ptr()
        self.normed, self.normed_at = normed, normed.data_ptr()
        self.qkv, self.qkv_at = qkv, qkv.data_ptr()
        self.query, self.query_at = query, query.data_ptr()
        self.gate_up, self.gate_up_at = gate_up, gate_up.data_ptr()
        self.activated, self.activated_at = activated, activated.data_ptr()

    @classmethod
    def allocate(cls, architecture: ModelArchitecture, dtype: torch.dtype, num_rows: int) -> _Rows:
        heads, kv_heads, head_dim = architecture.num_heads, architecture.num_kv_heads, architecture.head_dim
        return cls(
            hidden=torch.empty(num_rows, architecture.hidden_size, dtype=dtype),
            normed=torch.empty(num_rows, architecture.hidden_size, dtype=dtype),
            qkv=torch.empty(num_rows, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
            query=torch.empty(num_rows, heads, head_dim, dtype=dtype),
            gate_up=torch.empty(num_rows, 2 * architecture.intermediate_size, dtype=dtype),
            activated=torch.empty(num_rows, architecture.intermediate_size, dtype=dtype),
        )

    def first(self, num_rows: int) -> _Rows:
        """The first rows of this memory."""
        every = (self.hidden, self.normed, self.qkv, self.query, self.gate_up, self.activated)
        return _Rows(*(part[:num_rows] for part in every))


class _Workspace:
    """Rows that steps use again: fresh megabytes cost more in first touches than what is done in them."""

    def __init__(self, architecture: ModelArchitecture, dtype: torch.dtype) -> None:
        self._architecture, self._dtype = architecture, dtype
        self._all = _Rows.allocate(architecture, dtype, 64)
        self._last = self._all

    def take(self, num_rows: int) -> _Rows:
        """Of num_rows rows, uninitialized; whoever had the last ones loses them."""
        if num_rows > self._all.num_rows:
            self._all = _Rows.allocate(self._architecture, self._dtype, max(num_rows, 2 * self._all.num_rows))
        if self._last.num_rows != num_rows or self._last.hidden_at != self._all.hidden_at:
            self._last = self._all.first(num_rows)
        return self._last
