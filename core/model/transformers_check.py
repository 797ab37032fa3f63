"""Whether a model of transformers computes the same through paged attention, tried once before it serves.

Its code is not ours: a bias that never reaches the attention function, or a layer that mixes tokens by other means, would show in
no error. So a short sequence is computed both ways; and alone and in company, since broken batch invariance is worth a warning.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from core.errors import ModelLoadError
from core.model.architecture import ModelArchitecture
from core.model.attention import AttentionBackend, AttentionBatch
from core.model.linear import padded_num_rows
from core.model.transformers_model import TransformersModel

NUM_TOKENS = 37
COMPANY = (5, NUM_TOKENS, 21)  # tokens of three sequences in one batch, of which the middle one is compared
# Largest distance of a token's hidden state from the expected one, relative to its size, by dtype: roundings of other orders of
# summation. Of the median token, since a rounding may send a few to another expert.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}

_logger = logging.getLogger(__name__)


@torch.inference_mode()
def check_model(
    model: TransformersModel,
    architecture: ModelArchitecture,
    attention: AttentionBackend,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raises ModelLoadError saying what is computed otherwise; warns where a row depends on its batch."""
    name = architecture.class_name
    tokens = torch.randint(architecture.vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).to(device)
    others = [torch.zeros(count, dtype=torch.int64, device=device) for count in COMPANY]
    try:
        alone = _run(model, architecture, attention, block_size, dtype, [tokens])
        seen = sorted(model.paged.layers_seen)
        company = _run(model, architecture, attention, block_size, dtype, [others[0], tokens, others[2]])
        reference = model.forward_unpaged(tokens)
    except ModelLoadError as error:
        raise ModelLoadError(f"{name} is not supported: {error}") from error
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise ModelLoadError(f"{name} is not supported: its class fails with paged attention ({error})") from error
    if seen != list(range(architecture.num_layers)):
        raise ModelLoadError(
            f"{name} is not supported: its {architecture.num_layers} layers attend {len(seen)} times, "
            f"{len(set(seen))} of them at least once; allowed: once each"
        )
    if any(kind.sliding_window for kind in architecture.layers) and not any(model.paged.windows_seen):
        raise ModelLoadError(f"{name} is not supported: its config has a sliding window, of which its attention is not told")
    distance = float(((alone - reference).float().norm(dim=-1) / reference.float().norm(dim=-1)).median())
    if not distance <= TOLERANCE[dtype]:  # NaN is not
        raise ModelLoadError(
            f"{name} is not supported: with paged attention its hidden states differ by {distance:.2g} of their size "
            f"from those with its own; allowed: {TOLERANCE[dtype]:g}"
        )
    if not torch.equal(alone, company[COMPANY[0] : COMPANY[0] + NUM_TOKENS]):
        _logger.warning("%s: its class in transformers is not batch-invariant: a request's bits depend on its batch", name)


def _run(
    model: TransformersModel,
    architecture: ModelArchitecture,
    attention: AttentionBackend,
    block_size: int,
    dtype: torch.dtype,
    sequences: list[Tensor],
) -> Tensor:
    """Hidden states of all sequences' tokens, computed at once over a pool of their own."""
    lengths = [len(tokens) for tokens in sequences]
    device = sequences[0].device
    max_blocks = -(-max(lengths) // block_size)
    shape = (len(sequences) * max_blocks, block_size, architecture.num_kv_heads, architecture.head_dim)
    caches = [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(architecture.num_layers)
    ]
    slots = [torch.arange(count) + i * max_blocks * block_size for i, count in enumerate(lengths)]
    attention.begin_step(
        AttentionBatch(
            slot_mapping=torch.cat(slots).to(device),
            block_tables=torch.arange(len(sequences) * max_blocks).view(len(sequences), max_blocks),
            query_start=torch.tensor([0, *lengths]).cumsum(0),
            seq_lens=torch.tensor(lengths),
        )
    )
    num_tokens = sum(lengths)
    num_padding = padded_num_rows(num_tokens) - num_tokens
    padding = torch.zeros(num_padding, dtype=torch.int64, device=device)
    token_ids = torch.cat((*sequences, padding))
    positions = torch.cat((*(torch.arange(count, device=device) for count in lengths), padding))
    return model.forward(token_ids, positions, caches, num_tokens=num_tokens)[:num_tokens]
