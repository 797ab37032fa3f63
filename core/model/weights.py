"""A decoder's weights, read from memory-mapped safetensors, sharded or not, and cast to the dtype that is served.

Projections that read the same input are stacked here, so that one multiplication does the work of three.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from core.model.architecture import ModelArchitecture
from core.model.linear import Linear, MakeLinear, TorchLinear, make_torch_linear
from core.model.weight_names import NAMES_BY_FAMILY, WeightNames
from core.model.weight_reader import WeightReader

HOST = torch.device("cpu")
ROUTER_OUTPUTS_MULTIPLE = 16  # with fewer outputs the product of a row depends on the other rows (see lora.RANK_MULTIPLE)


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A dense feed-forward, or one expert. gate_up_proj: gate and up stacked, hidden -> 2 * intermediate."""

    gate_up_proj: Linear
    down_proj: Linear


@dataclass(frozen=True, slots=True)
class MixtureWeights:
    """A mixture of experts. router: hidden -> a score per expert, then the shared expert's if there is one, then padding."""

    router: Linear
    experts: tuple[MlpWeights, ...]
    shared_expert: MlpWeights | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer.

    qkv_proj: queries, keys, values stacked, hidden -> (num_heads + 2 * num_kv_heads) * head_dim. Norms are what normed values are
    multiplied by; post_attention_norm is that of the feed-forward's input. q_norm, k_norm: [head_dim]. Norms that the
    architecture lacks are None.
    """

    input_norm: Tensor
    qkv_proj: Linear
    o_proj: Linear
    post_attention_norm: Tensor
    mlp: MlpWeights | MixtureWeights
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    attention_output_norm: Tensor | None = None
    feed_forward_output_norm: Tensor | None = None

    @property
    def gate_up_proj(self) -> Linear:
        """The dense feed-forward's, where there is one."""
        assert isinstance(self.mlp, MlpWeights)
        return self.mlp.gate_up_proj

    @property
    def down_proj(self) -> Linear:
        """The dense feed-forward's, where there is one."""
        assert isinstance(self.mlp, MlpWeights)
        return self.mlp.down_proj


@dataclass(frozen=True, slots=True)
class LlamaWeights:
    """The whole model. embed_tokens: [vocab, hidden]. lm_head multiplies by the same tensor where the model ties them."""

    embed_tokens: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    lm_head: Linear


def load_llama_weights(
    model_dir: Path,
    architecture: ModelArchitecture,
    dtype: torch.dtype,
    device: torch.device = HOST,
    make_linear: MakeLinear = make_torch_linear,
) -> LlamaWeights:
    """Read all weights, to `device`. Raises ModelLoadError naming the first tensor that is missing or misshaped."""
    prefix = architecture.weights_prefix
    head = f"{prefix.removesuffix('model')}lm_head.weight"
    vocab_shape = (architecture.vocab_size, architecture.hidden_size)
    with WeightReader(model_dir, dtype, device) as reader:
        embed_tokens = reader.read(f"{prefix}.embed_tokens.weight", vocab_shape)
        lm_head = embed_tokens if architecture.tie_word_embeddings else reader.read(head, vocab_shape)
        return LlamaWeights(
            embed_tokens=embed_tokens,
            layers=tuple(
                _LayerReader(reader, architecture, f"{prefix}.layers.{i}", make_linear).read(kind.has_experts)
                for i, kind in enumerate(architecture.layer_kinds)
            ),
            norm=read_norm(reader, architecture, f"{prefix}.norm", architecture.hidden_size),
            lm_head=make_linear("lm_head", lm_head, None),
        )


def read_norm(reader: WeightReader, architecture: ModelArchitecture, name: str, size: int) -> Tensor:
    """[size]. With an offset in float32: what is near 1 has fewer bits left for its own."""
    weight = reader.read(f"{name}.weight", (size,))
    return weight.float() + architecture.norm_offset if architecture.norm_offset else weight


@dataclass(frozen=True, slots=True)
class _LayerReader:
    """Reads what lies below `layer`, such as model.layers.3."""

    reader: WeightReader
    architecture: ModelArchitecture
    layer: str
    make_linear: MakeLinear

    def read(self, has_experts: bool) -> LayerWeights:
        architecture, names = self.architecture, NAMES_BY_FAMILY[self.architecture.family]
        hidden, head_dim = architecture.hidden_size, architecture.head_dim
        q_outputs, kv_outputs = architecture.num_heads * head_dim, architecture.num_kv_heads * head_dim
        attention_norm, feed_forward_norm = names.attention_output_norm, names.feed_forward_output_norm
        has_qk_norm, has_output_norms = architecture.has_qk_norm, architecture.has_output_norms
        qkv = _parts(names.qkv, (q_outputs, kv_outputs, kv_outputs))
        output = [("o_proj", hidden)]
        return LayerWeights(
            input_norm=self._norm("input_layernorm", hidden),
            qkv_proj=self._linear("self_attn", "qkv_proj", qkv, hidden, architecture.attention_bias),
            o_proj=self._linear("self_attn", "o_proj", output, q_outputs, architecture.attention_output_bias),
            post_attention_norm=self._norm(names.feed_forward_norm, hidden),
            mlp=self._mixture(names) if has_experts else self._mlp("mlp", architecture.intermediate_size, names.gate_up),
            q_norm=self._norm("self_attn.q_norm", head_dim) if has_qk_norm else None,
            k_norm=self._norm("self_attn.k_norm", head_dim) if has_qk_norm else None,
            attention_output_norm=self._norm(attention_norm, hidden) if has_output_norms else None,
            feed_forward_output_norm=self._norm(feed_forward_norm, hidden) if has_output_norms else None,
        )

    def _mixture(self, names: WeightNames) -> MixtureWeights:
        shape, hidden = self.architecture.experts, self.architecture.hidden_size
        assert shape is not None
        module = names.mixture
        scores = [self.reader.read(f"{self.layer}.{module}.gate.weight", (shape.num_experts, hidden))]
        if shape.shared_intermediate_size:
            scores.append(self.reader.read(f"{self.layer}.{module}.shared_expert_gate.weight", (1, hidden)))
        router = torch.cat(scores)
        # Not made by make_linear: small, and rounding here would change which experts are chosen.
        padded = functional.pad(router, (0, 0, 0, -router.shape[0] % ROUTER_OUTPUTS_MULTIPLE))
        return MixtureWeights(
            router=TorchLinear(padded),
            experts=tuple(
                self._mlp(f"{module}.experts.{i}", shape.intermediate_size, names.expert_gate_up, names.expert_down)
                for i in range(shape.num_experts)
            ),
            shared_expert=self._mlp(f"{module}.shared_expert", shape.shared_intermediate_size, names.gate_up)
            if shape.shared_intermediate_size
            else None,
        )

    def _mlp(self, module: str, intermediate: int, gate_up: tuple[str, ...], down: str = "down_proj") -> MlpWeights:
        hidden, has_bias = self.architecture.hidden_size, self.architecture.mlp_bias
        parts = _parts(gate_up, (intermediate, intermediate))
        return MlpWeights(
            gate_up_proj=self._linear(module, "gate_up_proj", parts, hidden, has_bias),
            down_proj=self._linear(module, "down_proj", [(down, hidden)], intermediate, has_bias),
        )

    def _linear(self, module: str, name: str, parts: list[tuple[str, int]], num_inputs: int, has_bias: bool) -> Linear:
        prefix = f"{self.layer}.{module}"
        weight = self.reader.read_stacked(prefix, parts, num_inputs)
        bias = self.reader.read_stacked(prefix, parts, num_inputs, "bias") if has_bias else None
        return self.make_linear(f"{prefix}.{name}", weight, bias)

    def _norm(self, name: str, size: int) -> Tensor:
        return read_norm(self.reader, self.architecture, f"{self.layer}.{name}", size)


def _parts(names: tuple[str, ...], outputs: tuple[int, ...]) -> list[tuple[str, int]]:
    """(name, outputs) of each tensor; a single name stands for all of them, stacked."""
    return list(zip(names, outputs, strict=True)) if len(names) > 1 else [(names[0], sum(outputs))]
