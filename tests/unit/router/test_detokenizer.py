"""Streaming text against plain oracles: one decode of everything, and a character-by-character search for stop strings."""

from __future__ import annotations

import random
import time

import pytest

from router.detokenizer import Detokenizer
from router.tokenizer import Tokenizer

TEXTS = [
    "hello world and the quick brown fox",
    "日本語のテキスト 你好世界 — naïve café",
    "🙂🙃👩‍👩‍👧‍👦 family, Ελληνικά, \u0001\u0000 controls",
    "a\n\nb\t c   d",
    "",
]


def stream(detokenizer: Detokenizer, token_ids: list[int], source: random.Random) -> tuple[list[str], str | None, int]:
    """Push in groups of random size; returns the pieces, the stop string and how many tokens counted."""
    pieces, place, num_counted = [], 0, 0
    while place < len(token_ids):
        size = source.randint(1, 4)
        delta = detokenizer.push(token_ids[place : place + size])
        pieces.append(delta.text)
        num_counted += delta.num_tokens
        if delta.stop_string is not None:
            return pieces, delta.stop_string, num_counted
        place += size
    rest = detokenizer.finish()
    return [*pieces, rest.text], rest.stop_string, num_counted


def stop_oracle(text: str, stops: list[str], include: bool) -> str:
    """Grow the text by one character until it ends in a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[:end] if include else text[: end - max(len(stop) for stop in found)]
    return text


@pytest.mark.parametrize("text", TEXTS)
def test_detokenizer_byte_level_random_groups_equal_one_decode(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for seed in range(20):
        pieces, _, num_counted = stream(Detokenizer(tokenizer), token_ids, random.Random(seed))
        assert "".join(pieces) == text
        assert num_counted == len(token_ids)
        assert not any("\ufffd" in piece for piece in pieces)


def test_detokenizer_byte_level_random_bytes_equal_one_decode(tokenizer: Tokenizer) -> None:
    source = random.Random(1)
    for _ in range(300):
        token_ids = source.choices(range(tokenizer.vocab_size), k=source.randint(1, 30))
        for skip in (True, False):
            pieces, _, _ = stream(Detokenizer(tokenizer, skip_special_tokens=skip), token_ids, source)
            assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_detokenizer_holds_back_half_a_character_until_it_is_whole(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in "a"]
    smile = tokenizer.encode("😀", add_special_tokens=False)
    assert len(smile) > 1, "the corpus must not have this one"
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(token_ids + smile[:-1]).text == "a"
    assert detokenizer.push(smile[-1:]).text == "😀"


def test_detokenizer_incomplete_character_at_the_end_is_flushed_as_replacement(tokenizer: Tokenizer) -> None:
    smile = tokenizer.encode("😀", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(smile[:-1]).text == ""
    assert detokenizer.finish().text == "\ufffd"


@pytest.mark.parametrize("text", ["hello world", "hello 你好 world", "é hello", "abc hello hello"])
def test_detokenizer_byte_fallback_random_groups_equal_one_decode(fallback_tokenizer: Tokenizer, text: str) -> None:
    token_ids = fallback_tokenizer.encode("▁" + text.replace(" ", "▁"), add_special_tokens=False)
    whole = fallback_tokenizer.decode(token_ids, skip_special_tokens=True)
    assert whole == text
    for seed in range(10):
        pieces, _, _ = stream(Detokenizer(fallback_tokenizer), token_ids, random.Random(seed))
        assert "".join(pieces) == text


def test_detokenizer_byte_fallback_after_a_prompt_keeps_the_leading_space(fallback_tokenizer: Tokenizer) -> None:
    prompt = fallback_tokenizer.encode("▁hello", add_special_tokens=False)
    world = fallback_tokenizer.encode("▁world", add_special_tokens=False)
    pieces, _, _ = stream(Detokenizer(fallback_tokenizer, prompt), world, random.Random(0))
    assert "".join(pieces) == " world"


@pytest.mark.parametrize("kind", ["tokenizer", "fallback_tokenizer"])
def test_detokenizer_endless_invalid_bytes_cost_linear_time(kind: str, request: pytest.FixtureRequest) -> None:
    chosen: Tokenizer = request.getfixturevalue(kind)
    token_id = next(token for token in range(chosen.vocab_size) if chosen.decode([token], skip_special_tokens=True) == "\ufffd")
    detokenizer = Detokenizer(chosen)
    began_s = time.perf_counter()
    text = "".join(detokenizer.push([token_id]).text for _ in range(20_000)) + detokenizer.finish().text
    assert set(text) == {"\ufffd"}
    assert time.perf_counter() - began_s < 5.0, "20,000 tokens take half a second when the cost is linear, hours when not"


def test_detokenizer_stop_strings_random_texts_agree_with_the_oracle(tokenizer: Tokenizer) -> None:
    source = random.Random(7)
    for _ in range(400):
        text = "".join(source.choices("ab c\n好", k=source.randint(0, 25)))
        stops = ["".join(source.choices("ab c\n好", k=source.randint(1, 4))) for _ in range(source.randint(1, 3))]
        include = source.random() < 0.5
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        pieces, stop_string, _ = stream(Detokenizer(tokenizer, stop=stops, include_stop=include), token_ids, source)
        assert "".join(pieces) == stop_oracle(text, stops, include), (text, stops)
        assert (stop_string is not None) == any(stop in text for stop in stops)


def test_detokenizer_stop_string_across_tokens_is_never_shown(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in "xEND OF"]
    detokenizer = Detokenizer(tokenizer, stop=["END OF TEXT", "ND O"])
    texts = [detokenizer.push([token_id]).text for token_id in token_ids[:5]]
    assert texts == ["x", "", "", "", ""]
    delta = detokenizer.push(token_ids[5:])
    assert (delta.text, delta.stop_string, delta.num_tokens) == ("E", "ND O", 1)


def test_detokenizer_of_two_stop_strings_in_one_token_the_first_complete_one_ends_the_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("hello", add_special_tokens=False)
    assert len(token_ids) == 1
    for stops, wanted in [(["hello", "el"], "h"), (["lo", "l", "ell"], "he"), (["llo", "ello"], "h")]:
        delta = Detokenizer(tokenizer, stop=stops).push(token_ids)
        assert delta.text == wanted == stop_oracle("hello", stops, include=False)


def test_detokenizer_text_held_for_a_stop_string_is_flushed_at_the_end(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("see the EN", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, stop=["END"])
    assert detokenizer.push(token_ids).text + detokenizer.finish().text == "see the EN"


def test_detokenizer_min_tokens_lets_early_stop_strings_pass(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.encode(char, add_special_tokens=False)[0] for char in "a.b.c."]
    for min_tokens, wanted in [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c"), (6, "a.b.c.")]:
        detokenizer = Detokenizer(tokenizer, stop=["."], min_tokens=min_tokens)
        pieces, _, _ = stream(detokenizer, token_ids, random.Random(min_tokens))
        assert "".join(pieces) == wanted, min_tokens
