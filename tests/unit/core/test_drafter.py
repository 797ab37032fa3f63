"""Prompt lookup against a plain search."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from core.config import EngineOptions
from core.drafter import NgramDrafter, create_drafter


def plain_lookup(token_ids: Sequence[int], num_tokens: int, longest: int, shortest: int) -> list[int]:
    """What followed the latest earlier occurrence of the longest n-gram."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - length - 1, -1, -1):
            if list(token_ids[start : start + length]) == list(token_ids[-length:]):
                return list(token_ids[start + length : start + length + num_tokens])
    return []


# Token ids whose bytes look like parts of each other's.
tokens = st.lists(st.sampled_from((0, 1, 256, 257, 65536, 1 << 24, 0x01010101)), min_size=1, max_size=40)


@given(tokens, st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
def test_ngram_drafter_finds_what_a_plain_search_finds(token_ids: list[int], num_tokens: int, shortest: int, more: int) -> None:
    drafter = NgramDrafter(num_tokens, shortest + more, shortest)
    for length in range(1, len(token_ids) + 1):  # as the request grows
        known = token_ids[:length]
        assert drafter.propose("a", known, 100) == plain_lookup(known, num_tokens, shortest + more, shortest)


def test_ngram_drafter_gives_no_more_than_are_left_and_forgets() -> None:
    drafter = NgramDrafter(4, 2, 2)
    known = [1, 2, 3, 4, 5, 6, 1, 2]
    assert [drafter.propose("a", known, left) for left in (9, 2, 0, -1)] == [[3, 4, 5, 6], [3, 4], [], []]
    drafter.forget("a")
    assert drafter.propose("a", [7, 8, 9, 7, 8], 9) == [9, 7, 8]
    assert drafter._packed.keys() == {"a"}
    drafter.forget("a")
    drafter.forget("a")
    assert not drafter._packed


def test_create_drafter_none_unless_tokens_are_asked_for() -> None:
    assert create_drafter(EngineOptions()) is None
    assert create_drafter(EngineOptions(num_speculative_tokens=3)) is not None
