"""Makes the model that a description speaks of, with its weights: our own decoder, or transformers' class for other families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.model.architecture import TRANSFORMERS_FAMILY, ModelArchitecture
from core.model.attention import AttentionBackend
from core.model.attention_cuda import make_cuda_attention
from core.model.attention_native import NativeAttention
from core.model.attention_torch import TorchAttention
from core.model.decoder import DecoderModel
from core.model.description import ModelDescription
from core.model.kv_format import kv_format_of
from core.model.linear import MakeLinear, make_torch_linear
from core.model.linear_fixed_rows import make_fixed_rows_linear
from core.model.llama import LlamaModel
from core.model.native_linear import native_linear_maker
from core.model.native_llama import NativeLlamaModel, is_native
from core.model.quantized_linear import quantizing_linears
from core.model.rotary import RotaryEmbedding
from core.model.shared_tiles import CascadeRule
from core.model.weights import load_llama_weights


@dataclass(frozen=True, slots=True)
class DecoderPart:
    """What one of several processes computes of a decoder.

    architecture: of the part. wrap_linears: from what makes a projection, what makes the part's of the whole model's.
    """

    architecture: ModelArchitecture
    wrap_linears: Callable[[MakeLinear], MakeLinear] = lambda make_linear: make_linear


def load_decoder(
    model_dir: Path,
    description: ModelDescription,
    dtype: torch.dtype,
    device: torch.device,
    native: Any,
    cascade: CascadeRule | None,
    is_batch_invariant: bool = False,
    part: DecoderPart | None = None,
) -> tuple[DecoderModel, AttentionBackend]:
    """With weights of `dtype` on `device`, and the attention that it was made with. native: the compiled extension, or None.
    is_batch_invariant: also on CUDA, by slower kernels. part: None: all of it.

    Raises ModelLoadError.
    """
    part = part or DecoderPart(description.architecture)
    architecture, block_size = part.architecture, description.kv_layout.block_size
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    attention: AttentionBackend
    is_kv_native = description.kv_layout.dtype == description.dtype
    if device.type == "cuda" and is_kv_native:
        attention = make_cuda_attention(is_batch_invariant, device, dtype, block_size, heads, kv_heads, architecture.head_dim)
    elif native is None or architecture.head_dim % 2 or not is_kv_native:
        attention = TorchAttention(block_size, heads, kv_heads, device, cascade, kv_format_of(description.kv_layout))
    else:
        attention = NativeAttention(native, block_size)
    if architecture.family == TRANSFORMERS_FAMILY:
        # Not at the top: importing transformers takes seconds, which the families of our own need not wait for.
        from core.model.transformers_check import check_model
        from core.model.transformers_model import TransformersModel

        model = TransformersModel.load(model_dir, architecture, dtype, device, attention)
        check_model(model, architecture, attention, block_size, dtype, device)
        return model, attention
    make_linear = make_torch_linear if native is None else native_linear_maker(native)
    if device.type == "cuda" and is_batch_invariant:
        make_linear = make_fixed_rows_linear
    make_linear = quantizing_linears(description.quantization, dtype, device, make_linear)
    weights = load_llama_weights(model_dir, description.architecture, dtype, device, part.wrap_linears(make_linear))
    rotary = RotaryEmbedding(architecture, description.max_model_len, device)
    if isinstance(attention, NativeAttention) and is_native(architecture, weights):
        return NativeLlamaModel(native, architecture, weights, rotary, attention), attention
    local_rotary = None
    if architecture.local_rope_theta:
        local_rotary = RotaryEmbedding(architecture, description.max_model_len, device, is_local=True)
    return LlamaModel(architecture, weights, rotary, attention, local_rotary), attention
