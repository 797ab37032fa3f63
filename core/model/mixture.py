"""The mixture of experts (https://arxiv.org/abs/2101.03961, top-k): the one path of Mixtral, Qwen2-MoE and Qwen3-MoE.

Each expert gathers the rows that chose it, padded to a multiple of linear.ROW_MULTIPLE, and its result is added to them. Experts
come in the same order for every row, so that a row's bits do not depend on who else chose which.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from core.model.activations import Activation, gate_and_up
from core.model.architecture import ExpertsShape
from core.model.linear import padded_num_rows
from core.model.weights import MixtureWeights, MlpWeights


def mix_experts(weights: MixtureWeights, shape: ExpertsShape, activation: Activation, normed: Tensor, num_tokens: int) -> Tensor:
    """The sum over each row's experts, weighted by the router, [num_rows, hidden] of normed's dtype, summed in float32.

    normed: [num_rows, hidden], num_rows a multiple of ROW_MULTIPLE. Rows from num_tokens on are padding: they go through no
    expert but the shared one, and what they get is not to be used.
    """
    scores = weights.router(normed).float()
    chances, experts = scores[:num_tokens, : shape.num_experts].softmax(-1).topk(shape.num_experts_per_token)
    if shape.is_normalized:
        chances = chances / chances.sum(-1, keepdim=True)
    mixed = torch.zeros(normed.shape, dtype=torch.float32, device=normed.device)
    if weights.shared_expert is not None:
        opened = scores[:, shape.num_experts : shape.num_experts + 1].neg().exp_().add_(1.0).reciprocal_()
        mixed += _expert(weights.shared_expert, activation, normed).float() * opened
    num_rows_by_expert = experts.flatten().bincount(minlength=shape.num_experts).tolist()
    # Choices sorted by expert; a row chooses an expert at most once.
    choices = torch.split(experts.flatten().sort(stable=True).indices, num_rows_by_expert)
    for expert, chosen in zip(weights.experts, choices, strict=True):
        if len(chosen):
            rows = chosen // shape.num_experts_per_token
            padded = functional.pad(rows, (0, padded_num_rows(len(rows)) - len(rows)))
            output = _expert(expert, activation, normed.index_select(0, padded))[: len(rows)]
            mixed.index_add_(0, rows, output.float() * chances.flatten()[chosen, None])
    return mixed.to(normed.dtype)


def _expert(weights: MlpWeights, activation: Activation, inputs: Tensor) -> Tensor:
    return weights.down_proj(gate_and_up(weights.gate_up_proj(inputs), activation))
