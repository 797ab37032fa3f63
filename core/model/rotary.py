"""Rotary position embedding (RoPE, https://arxiv.org/abs/2104.09864) with the scalings that models use.

The first rotary_dim elements of a head (all of them, in most models) are read as pairs (i, i + rotary_dim/2); pair i is turned by
position * inverse_frequency[i].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from core.model.architecture import ModelArchitecture, RotaryScaling


class RotaryEmbedding:
    """cos and sin of every position, [max_positions, rotary_dim/2] float32, computed once, on the CPU, for `device`.

    is_local: those of the layers whose LayerKind.rotary is local.
    """

    def __init__(
        self,
        architecture: ModelArchitecture,
        max_positions: int,
        device: torch.device | str = "cpu",
        is_local: bool = False,
    ) -> None:
        rotary_dim = architecture.rotary_dim or architecture.head_dim
        theta = architecture.local_rope_theta if is_local else architecture.rope_theta
        scaling = RotaryScaling() if is_local else architecture.rope_scaling
        frequencies, amplitude = inverse_frequencies(rotary_dim, theta, scaling)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
        self.cos = (angles.cos() * amplitude).to(device)
        self.sin = (angles.sin() * amplitude).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's angles, both [num_tokens, 1, rotary_dim/2] float32. positions: [num_tokens] int64."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`heads` [num_tokens, num_heads, head_dim] turned by each token's angles, in float32, rounded once to its dtype.

    cos, sin: [num_tokens, 1, rotary_dim/2]; what a head has beyond rotary_dim stays.
    """
    rotary_dim = 2 * cos.shape[-1]
    first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if rotary_dim == heads.shape[-1]:
        return torch.cat(turned, dim=-1).to(heads.dtype)
    return torch.cat((*(part.to(heads.dtype) for part in turned), heads[..., rotary_dim:]), dim=-1)


def inverse_frequencies(rotary_dim: int, theta: float, scaling: RotaryScaling) -> tuple[Tensor, float]:
    """([rotary_dim/2] float32 radians per position, factor on cos and sin) for a scaling type."""
    base = 1.0 / (theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim))
    if scaling.rope_type == "default":
        return base, 1.0
    if scaling.rope_type == "linear":
        return base / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3_frequencies(base, scaling), 1.0
    if scaling.rope_type == "longrope":
        return base / torch.tensor(scaling.factors), _longrope_amplitude(scaling)
    assert scaling.rope_type == "yarn", scaling.rope_type
    return _yarn_frequencies(theta, rotary_dim, scaling), _yarn_amplitude(scaling)


def _llama3_frequencies(base: Tensor, scaling: RotaryScaling) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""
    wavelengths = 2 * math.pi / base
    trained = scaling.original_max_position_embeddings
    blend = (trained / wavelengths - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blended = (1 - blend) * base / scaling.factor + blend * base
    scaled = torch.where(wavelengths > trained / scaling.low_freq_factor, base / scaling.factor, blended)
    return torch.where(wavelengths < trained / scaling.high_freq_factor, base, scaled)


def _yarn_frequencies(theta: float, head_dim: int, scaling: RotaryScaling) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071, section 3.2): by how often a pair turns within the trained context."""

    def pair_turning(num_rotations: float) -> float:
        trained = scaling.original_max_position_embeddings
        return head_dim * math.log(trained / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_turning(scaling.beta_fast), pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    periods = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (scaling.factor * periods)) * (1 - kept) + (1.0 / periods) * kept


def _yarn_amplitude(scaling: RotaryScaling) -> float:
    def magnitude(factor: float, mscale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.factor, scaling.mscale) / magnitude(scaling.factor, scaling.mscale_all_dim)
    return magnitude(scaling.factor)


def _longrope_amplitude(scaling: RotaryScaling) -> float:
    """LongRoPE (https://arxiv.org/abs/2402.13753), as Phi-3 scales attention with it."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(scaling.factor) / math.log(scaling.original_max_position_embeddings))
