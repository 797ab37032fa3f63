"""Selection and scoring against a plain search that goes on to the end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from core.step import TokenLogprob
from router.beam_search import Beam, BeamOptions, BeamSearch
from tests.unit.router.tiny_language import NextLogprobs, search_plainly, tiny_language

PROMPT = (5, 3)


def run_search(
    options: BeamOptions, next_logprobs: NextLogprobs, eos_token_ids: list[int], max_tokens: int
) -> tuple[list[Beam], int]:
    """The best sequences, and how many steps it took to know them."""
    search = BeamSearch(options, eos_token_ids, max_tokens)
    num_steps = 0
    while search.running:
        entries = []
        for beam in search.running:
            ranked = next_logprobs((*PROMPT, *beam.token_ids))
            top = tuple(ranked[: options.num_alternatives])
            entries.append(TokenLogprob(token_id=top[0][0], logprob=top[0][1], rank=1, top=top))
        search.advance(entries)
        num_steps += 1
    return search.best(), num_steps


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 5),
    max_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-2.0, -0.5, 0.0, 0.5, 1.0, 2.5]),
    num_eos=st.integers(0, 3),
    ignore_eos=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_beam_search_any_language_finds_what_a_plain_search_to_the_end_finds(
    seed: int, width: int, max_tokens: int, length_penalty: float, num_eos: int, ignore_eos: bool
) -> None:
    next_logprobs = tiny_language(seed, vocab_size=14)
    eos_token_ids = list(range(num_eos))
    found, _ = run_search(BeamOptions(width, length_penalty, ignore_eos, False), next_logprobs, eos_token_ids, max_tokens)
    expected = search_plainly(
        next_logprobs,
        PROMPT,
        width=width,
        max_tokens=max_tokens,
        length_penalty=length_penalty,
        eos_token_ids=eos_token_ids,
        ignore_eos=ignore_eos,
    )
    assert [(beam.token_ids, beam.cumulative_logprob) for beam in found] == expected
    for beam in found:
        assert [entry.token_id for entry in beam.logprobs] == list(beam.token_ids)
        assert abs(sum(entry.logprob for entry in beam.logprobs) - beam.cumulative_logprob) < 1e-9
        assert beam.is_stopped == (beam.token_ids[-1] in eos_token_ids and not ignore_eos)


def test_beam_search_that_nothing_can_change_any_more_ends_early() -> None:
    sure_end = [(0, -0.01), *((token_id, -6.0 - token_id) for token_id in range(1, 8))]
    _, num_steps = run_search(BeamOptions(2, 0.0, False, False), lambda _known: sure_end, [0], max_tokens=50)
    assert num_steps < 5


def test_beam_search_sampled_token_outside_the_best_is_one_more_alternative() -> None:
    search = BeamSearch(BeamOptions(1, 1.0, False, False), [], max_tokens=1)
    search.advance([TokenLogprob(token_id=9, logprob=-0.1, rank=1, top=((4, -1.0), (5, -2.0)))])
    assert search.best()[0].token_ids == (9,)
