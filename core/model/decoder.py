"""What the runner asks of a model, whichever code computes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from core.model.lora import AdapterRows


class DecoderModel(Protocol):
    """One flat batch at a time, on the step thread; the attention backend it was made with must have begun the same step.

    row_multiple: a batch has a multiple of that many rows.
    """

    row_multiple: int

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[tuple[Tensor, Tensor]],
        adapters: Sequence[AdapterRows] = (),
        num_tokens: int = 0,
    ) -> Tensor:
        """Hidden states after the last layer and norm, [num_rows, hidden], of the weights' dtype.

        token_ids, positions: [num_rows] int64, num_rows a multiple of row_multiple, rows after the batch's tokens are padding.
        kv_caches: per layer the K and V views of the pool. Writes K and V of the tokens there. adapters: with the rows that
        each of them is for; no row is in two. num_tokens: rows that are no padding (0: all, as far as the model can tell).
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[num_rows, vocab] of the weights' dtype, for hidden states [num_rows, hidden] of any number of rows."""

    def take_part_seconds(self) -> dict[str, float]:
        """Seconds by part of the forward pass since the last call; empty: not measured."""
