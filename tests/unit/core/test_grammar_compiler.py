"""Grammars over real and made tokenizers: masks against a plain oracle, forced tokens, drafts, replay, refusals."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer

from core.errors import InvalidInputError
from core.grammar import GrammarMatcher
from core.grammar_compiler import MAX_EXPRESSION_CHARS, MAX_LARK_CHARS, LlgCompiler
from core.sampling_params import GrammarSource
from router.structured_outputs import NO_WHITESPACE
from router.tokenizer import Tokenizer
from tests.unit.router.tiny_model import build_byte_fallback_folder, build_byte_level_folder

EOS = 2  # <|im_end|> of one tokenizer, </s> of the other
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 3},
        "kind": {"enum": ["cat", "dog", "café"]},
        "age": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 120}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]{1,2}/'
GBNF = 'root ::= item ("," item)*\nitem ::= "a" | "bb"'


class Bench:
    """One tokenizer, its compiler, and a vocabulary larger than the tokenizer's, as models have."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        self.vocab_size = self.tokenizer.vocab_size + 13
        self.compiler = LlgCompiler(folder, self.vocab_size, (EOS,))
        self.spelling = [self._spell(token_id) for token_id in range(self.tokenizer.vocab_size)]

    def _spell(self, token_id: int) -> bytes | None:
        """None: a special token, which is no text."""
        if token_id in self.tokenizer.special_token_ids or token_id == 0:
            return None
        known = self.tokenizer.token_bytes(token_id)
        if known is not None:
            return known
        piece = FastTokenizer.from_file(str(self.tokenizer.folder / "tokenizer.json")).id_to_token(token_id)
        byte = re.fullmatch("<0x([0-9A-F]{2})>", piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("▁", " ").encode()

    def matcher(self, kind: str, text: str, output: list[int] | None = None) -> GrammarMatcher:
        pending = self.compiler.start(GrammarSource(kind, text), output or [])
        deadline_s = time.monotonic() + 60
        while (matcher := pending.poll()) is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        return matcher

    def allowed(self, matcher: GrammarMatcher, drafts: list[int] | None = None) -> set[int]:
        mask = matcher.token_masks(drafts or [])[-1]
        assert len(mask) % 4 == 0 and len(mask) * 8 >= self.vocab_size
        found = {token_id for token_id in range(len(mask) * 8) if mask[token_id // 8] >> token_id % 8 & 1}
        assert all(token_id < self.tokenizer.vocab_size for token_id in found), "ids that no token has"
        return found

    def text(self, token_ids: list[int]) -> str:
        return b"".join(self.spelling[token_id] or b"" for token_id in token_ids).decode()

    def walk(self, matcher: GrammarMatcher, choose: Callable[[int], int], *, jumps: bool, max_tokens: int = 2000) -> list[int]:
        """Tokens of one output: choose(n) picks among n allowed ones, in order of their ids."""
        output: list[int] = []
        while not matcher.is_terminated:
            assert len(output) < max_tokens
            forced = matcher.forced_tokens() if jumps else []
            if not forced:
                allowed = sorted(self.allowed(matcher))
                forced = [allowed[choose(len(allowed))]]
            assert matcher.accept(forced)
            output += forced
        return output[:-1] if output and output[-1] == EOS else output


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    build = build_byte_level_folder if request.param == "byte_level" else build_byte_fallback_folder
    bench = Bench(build(tmp_path_factory.mktemp("model")))
    yield bench
    bench.compiler.close()


CHOICES = ["hello", "hello world", "hej", "日本", 'a "q" \\ \n', "<|im_end|>", "</s>"]


def test_choice_masks_equal_brute_force_at_every_prefix(bench: Bench) -> None:
    """Every token sequence that spells a choice, and no other token: byte tokens in the middle of a character included."""
    words = [choice.encode() for choice in CHOICES]
    seen: set[bytes] = set()
    paths: list[list[int]] = [[]]
    while paths:
        path = paths.pop()
        prefix = b"".join(bench.spelling[token_id] or b"" for token_id in path)
        if prefix in seen:
            continue
        seen.add(prefix)
        matcher = bench.matcher("choice", json.dumps(CHOICES), path)
        expected = {
            token_id
            for token_id, spelling in enumerate(bench.spelling)
            if spelling and any(word.startswith(prefix + spelling) for word in words)
        }
        if prefix in words:
            expected.add(EOS)
        allowed = bench.allowed(matcher)
        if forced := matcher.forced_tokens():
            assert allowed == {forced[0]} and allowed <= expected
        else:
            assert allowed == expected, prefix
        paths += [[*path, token_id] for token_id in allowed - {EOS}]
    assert set(words) <= seen


def is_laid_out_like_dumps(output: str) -> bool:
    layout = re.sub(r'"(\\.|[^"\\])*"', "", output)
    return layout.replace(", ", "").replace(": ", "") == re.sub(r"[ \n,:]", "", layout)


@pytest.mark.parametrize(
    ("kind", "text", "is_right"),
    [
        ("json_schema", json.dumps(PERSON), lambda out: jsonschema.validate(json.loads(out), PERSON) is None),
        ("json_schema", json.dumps(PERSON | {"x-guidance": NO_WHITESPACE}), is_laid_out_like_dumps),
        ("regex", r"[é-ü]{1,2}日本語?(🙂|🙃)+x{3}", lambda out: re.fullmatch("[é-ü]{1,2}日本語?(🙂|🙃)+x{3}", out)),
        ("choice", json.dumps(CHOICES), lambda out: out in CHOICES),
        ("grammar", LARK, lambda out: re.fullmatch(r"[0-9]{1,2}(\+[0-9]{1,2})*", out)),
        ("grammar", GBNF, lambda out: re.fullmatch("(a|bb)(,(a|bb))*", out)),
    ],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_matcher_any_walk_ends_in_the_grammar_and_jumping_changes_no_token(
    bench: Bench, kind: str, text: str, is_right: Callable[[str], object], data: st.DataObject
) -> None:
    picks: list[int] = []

    def choose(num_allowed: int) -> int:
        if num_allowed == 1:
            return 0
        # Late in a walk the last of the allowed or an end: else a list of white space or digits never ends.
        picks.append(data.draw(st.integers(0, num_allowed - 1)) if len(picks) < 60 else 0)
        return picks[-1]

    output = bench.walk(bench.matcher(kind, text), choose, jumps=True)
    assert is_right(bench.text(output)), bench.text(output)
    replay = iter(list(picks))
    stepwise = bench.walk(bench.matcher(kind, text), lambda num: 0 if num == 1 else next(replay), jumps=False)
    assert stepwise == output


def test_matcher_drafts_are_counted_and_masked_without_a_trace(bench: Bench) -> None:
    matcher = bench.matcher("regex", "[abc]{3}")
    a, b, z = (bench.spelling.index(letter) for letter in (b"a", b"b", b"o"))
    before = bench.allowed(matcher)
    assert matcher.count_valid([a, b, a, EOS]) == 4
    assert matcher.count_valid([a, b, z, a]) == 2
    assert matcher.count_valid([EOS, a]) == 0
    masks = matcher.token_masks([a, b, a])
    assert len(masks) == 4
    assert bench.allowed(matcher) == before
    for index, token_id in enumerate([a, b, a]):
        assert matcher.token_masks([])[0] == masks[index]
        assert matcher.accept([token_id])
    assert matcher.forced_tokens() == [EOS] and not matcher.is_terminated
    assert bench.allowed(matcher) == {EOS} and matcher.count_valid([EOS]) == 1
    assert matcher.accept([EOS]) and matcher.is_terminated and matcher.forced_tokens() == []


def test_matcher_drafts_up_to_an_optional_end_are_masked(bench: Bench) -> None:
    matcher = bench.matcher("regex", "ab*")
    a = bench.spelling.index(b"a")
    assert matcher.count_valid([a, EOS]) == 2
    assert len(matcher.token_masks([a, EOS])) == 3
    assert matcher.accept([a, EOS]) and matcher.is_terminated


def test_matcher_token_outside_is_refused(bench: Bench) -> None:
    matcher = bench.matcher("regex", "a+")
    assert not matcher.accept([bench.spelling.index(b"b")])


def test_matcher_end_token_is_allowed_where_the_grammar_may_end_and_ends_it(bench: Bench) -> None:
    matcher = bench.matcher("regex", "a(bc)?")
    assert EOS not in bench.allowed(matcher)
    assert matcher.accept([bench.spelling.index(b"a")])
    assert EOS in bench.allowed(matcher) and not matcher.is_terminated
    assert matcher.accept([EOS])
    assert matcher.is_terminated


def test_compiler_takes_the_schema_that_allows_any_json(bench: Bench) -> None:
    allowed = bench.allowed(bench.matcher("json_schema", "true"))
    assert {bench.spelling.index(start) for start in (b"{", b"[", b'"', b"1")} <= set(allowed)


def test_compiler_replays_output_and_refuses_one_that_does_not_follow(bench: Bench) -> None:
    b, c = bench.spelling.index(b"b"), bench.spelling.index(b"c")
    ended = bench.matcher("regex", "b*", [b, EOS])
    assert ended.is_terminated and ended.accept([]) and ended.is_terminated and ended.forced_tokens() == []
    assert bench.text(bench.matcher("regex", "b{2}c{2}", [b, b, c]).forced_tokens()) == "c"
    with pytest.raises(InvalidInputError, match="output_token_ids"):
        bench.matcher("regex", "b{2}c{2}", [c])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "("),
        ("regex", "a" * (MAX_EXPRESSION_CHARS + 1)),
        ("regex", r"(?=a)b"),
        ("json_schema", "[]"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "nonsense"}'),
        ("json_schema", '{"$ref": "http://127.0.0.1:9/x"}'),
        ("json_schema", json.dumps({"type": "string", "pattern": "a?" * MAX_EXPRESSION_CHARS})),
        ("json_schema", json.dumps({"properties": {f"p{i}": {"pattern": "a?" * 100} for i in range(100)}})),
        ("json_schema", '{"items":' * 120 + "{}" + "}" * 120),
        ("json_schema", '{"items":' * 7000 + "{}" + "}" * 7000),
        ("json_schema", json.dumps({"allOf": [{"oneOf": [{"required": [f"p{i}{j}"]} for j in range(4)]} for i in range(12)]})),
        ("grammar", "nonsense"),
        ("grammar", "start: other"),
        ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("grammar", "root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        ("grammar", 'start: "' + "a" * MAX_LARK_CHARS + '"'),
        ("grammar", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(40)) + '\nA40: "x"'),
        ("choice", json.dumps(["a" * 70000])),
        ("nonsense", "a"),
    ],
    ids=lambda value: value[:40],
)
def test_compiler_refuses_what_is_no_grammar_or_too_much(bench: Bench, kind: str, text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        bench.matcher(kind, text)
    assert len(str(caught.value)) < 1000
    bench.matcher("regex", "a")  # and goes on


@pytest.mark.parametrize(
    "text",
    [
        "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(700)) + '\na700: "x"',
        "start: A0\n" + "\n".join(f"A{i}: A{i + 1}" for i in range(700)) + '\nA700: "x"',
        "start: a0\n" + "\n".join(f'a{i}: "x" a{i + 1} "y"' for i in range(450)) + '\na450: "x"',
    ],
    ids=["rules", "terminals", "sequences"],
)
def test_compiler_long_chains_of_rules_do_not_overflow_the_stack(bench: Bench, text: str) -> None:
    assert len(text) <= MAX_LARK_CHARS
    assert bench.allowed(bench.matcher("grammar", text))


def test_compiler_long_chains_of_references_do_not_overflow_the_stack(bench: Bench) -> None:
    chain = {f"n{i}": {"allOf": [{"$ref": f"#/$defs/n{i + 1}"}]} for i in range(1200)}
    schema = {"$defs": {**chain, "n1200": {"type": "object"}}, "$ref": "#/$defs/n0"}
    assert bench.allowed(bench.matcher("json_schema", json.dumps(schema)))


def test_compiler_unreadable_tokenizer_is_an_error_of_the_request(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    compiler = LlgCompiler(tmp_path, 10, (0,))
    with pytest.raises(InvalidInputError, match="tokenizer"):
        compiler.check(GrammarSource("regex", "a")).result(60)
    compiler.close()


def test_compiler_on_result_is_called_for_success_and_failure(bench: Bench) -> None:
    calls: list[int] = []
    bench.compiler.on_result = lambda: calls.append(1)
    bench.matcher("regex", "a")
    with pytest.raises(InvalidInputError):
        bench.matcher("regex", "(")
    deadline_s = time.monotonic() + 60
    while len(calls) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    bench.compiler.on_result = lambda: None
