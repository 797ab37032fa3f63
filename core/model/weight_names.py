"""How each family names the tensors that mean the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WeightNames:
    """Names below model.layers.N. Defaults are Llama's. Several names are stacked in this order; a single one is stacked already.

    feed_forward_norm: of the feed-forward's input. The output norms are those that ModelArchitecture.has_output_norms speaks of.
    mixture: the module of a layer with experts; expert_down, expert_gate_up: below its experts.N.
    """

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    feed_forward_norm: str = "post_attention_layernorm"
    attention_output_norm: str = ""
    feed_forward_output_norm: str = ""
    mixture: str = "mlp"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"


NAMES_BY_FAMILY = {
    "llama": WeightNames(),
    "phi3": WeightNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    "gemma": WeightNames(
        feed_forward_norm="pre_feedforward_layernorm",
        attention_output_norm="post_attention_layernorm",
        feed_forward_output_norm="post_feedforward_layernorm",
    ),
    "mixtral": WeightNames(mixture="block_sparse_moe", expert_gate_up=("w1", "w3"), expert_down="w2"),
    "qwen_moe": WeightNames(),
}
