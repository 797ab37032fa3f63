"""Makes the model that a description speaks of, with its weights: our own decoder, or transformers' class for other families."""

from __future__ import annotations

from pathlib import Path

import torch

from core.model.architecture import TRANSFORMERS_FAMILY
from core.model.attention import AttentionBackend
from core.model.decoder import DecoderModel
from core.model.description import ModelDescription
from core.model.llama import LlamaModel
from core.model.rotary import RotaryEmbedding
from core.model.weights import load_llama_weights


def load_decoder(
    model_dir: Path,
    description: ModelDescription,
    dtype: torch.dtype,
    attention: AttentionBackend,
    device: torch.device,
) -> DecoderModel:
    """With weights of `dtype` on `device`. Raises ModelLoadError."""
    architecture, block_size = description.architecture, description.kv_layout.block_size
    if architecture.family == TRANSFORMERS_FAMILY:
        # Not at the top: importing transformers takes seconds, which the families of our own need not wait for.
        from core.model.transformers_check import check_model
        from core.model.transformers_model import TransformersModel

        model = TransformersModel.load(model_dir, architecture, dtype, device, attention)
        check_model(model, architecture, attention, block_size, dtype, device)
        return model
    weights = load_llama_weights(model_dir, architecture, dtype, device)
    rotary = RotaryEmbedding(architecture, description.max_model_len, device)
    local_rotary = None
    if architecture.local_rope_theta:
        local_rotary = RotaryEmbedding(architecture, description.max_model_len, device, is_local=True)
    return LlamaModel(architecture, weights, rotary, attention, local_rotary)
