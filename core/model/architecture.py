"""A decoder's shape: what the forward pass must know of a model besides its weights.

Read from config.json by core/model/families, carried out by llama.py (and by transformers_model.py for what only transformers
knows). Its repr is part of the model's fingerprint: whatever changes what a block of KV holds is a field here.
"""

from __future__ import annotations

from dataclasses import dataclass

TRANSFORMERS_FAMILY = "transformers"  # ModelArchitecture.family of what transformers' own class computes


@dataclass(frozen=True, slots=True)
class RotaryScaling:
    """How RoPE's frequencies are stretched beyond the trained context; see rotary.py for the formulas.

    rope_type: default, linear, llama3, yarn or longrope; fields that a type does not use keep their defaults. attention_factor
    None: derived from factor (and mscale, mscale_all_dim if both are set). factors: longrope's divisors, one per pair.
    """

    rope_type: str = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What one decoder layer has of its own.

    sliding_window: how many positions a token attends to, its own included (0: all). rotary: global (the model's rope_theta and
    rope_scaling), local (local_rope_theta, unscaled) or none (no position at all). has_experts: its feed-forward is the
    mixture of experts.
    """

    sliding_window: int = 0
    rotary: str = "global"
    has_experts: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """A mixture of experts: each token goes through num_experts_per_token of num_experts.

    intermediate_size: of one expert. is_normalized: the chosen experts' weights sum to one. shared_intermediate_size: of the
    expert that every token goes through beside them (0: there is none).
    """

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    is_normalized: bool
    shared_intermediate_size: int = 0


@dataclass(frozen=True, slots=True)
class ModelArchitecture:
    """A decoder's shape, in the names that Hugging Face configs use. Sizes are in elements. Defaults are Llama's.

    attention_bias: of queries, keys and values; attention_output_bias: of the projection behind them. family: how tensors are
    named (weight_names.py), or transformers, whose own class is then the model. layers: one per decoder layer, or empty: all are
    LayerKind(). rotary_dim: leading elements of a head that are turned (0: all). activation: silu or gelu_tanh. norm_offset: is
    added to the weights of norms. attention_scale: of scores (0: head_dim ** -0.5). Soft caps (0: none) bend scores and logits to
    cap * tanh(x / cap). has_qk_norm: heads of queries and keys are normed before they are turned. has_output_norms: so is what
    attention and feed-forward add. weights_prefix: of the decoder's tensors. class_name, config_digest: of a model of family
    transformers: its class, and what else it is made from.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_position_embeddings: int
    attention_output_bias: bool = False
    family: str = "llama"
    layers: tuple[LayerKind, ...] = ()
    local_rope_theta: float = 0.0
    rotary_dim: int = 0
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float = 0.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    has_qk_norm: bool = False
    has_output_norms: bool = False
    experts: ExpertsShape | None = None
    weights_prefix: str = "model"
    class_name: str = ""
    config_digest: str = ""

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """One per decoder layer."""
        return self.layers or (LayerKind(),) * self.num_layers

    @property
    def score_scale(self) -> float:
        """What queries times keys is multiplied by."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def is_plain_llama(self) -> bool:
        """No more than the Llama papers describe: every layer alike, RMSNorm, rotary embedding of whole heads with one table of
        angles, causal attention to all positions, SwiGLU. Biases may be in the projections, and tensors may be fused.
        """
        extras = (self.layers, self.rotary_dim, self.norm_offset, self.attention_scale, self.attention_soft_cap)
        more_extras = (self.logit_soft_cap, self.has_qk_norm, self.has_output_norms, self.experts)
        return (
            not any(extras)
            and not any(more_extras)
            and self.activation == "silu"
            and self.embedding_scale == 1.0
            and self.family != TRANSFORMERS_FAMILY
        )

    @property
    def takes_adapters(self) -> bool:
        """LoRA adapters name the tensors of a dense Llama."""
        return self.experts is None and self.family in ("llama", "gemma")
