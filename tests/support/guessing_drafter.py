"""Drafters for the fake model, whose text no n-gram foresees."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.support.fake_runner import oracle_tokens


class OracleDrafter:
    """Knows the fake model's text, and errs from a random place on. prompts: by request_id, of those to draft for."""

    def __init__(self, num_tokens: int, rng: random.Random) -> None:
        self.prompts: dict[str, Sequence[int]] = {}
        self._num_tokens = num_tokens
        self._rng = rng

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        """See core.drafter.Drafter."""
        prompt = self.prompts.get(request_id)
        num_wanted = min(self._num_tokens, max_tokens)
        if prompt is None or num_wanted <= 0:
            return []
        num_output = len(token_ids) - len(prompt)
        drafts = oracle_tokens(prompt, num_output + num_wanted)[num_output:]
        num_right = self._rng.randrange(num_wanted + 1)
        return [token if place < num_right else token % 999 + 1 for place, token in enumerate(drafts)]

    def forget(self, request_id: str) -> None:
        """See core.drafter.Drafter."""
        self.prompts.pop(request_id, None)
