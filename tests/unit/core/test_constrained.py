"""Requests with a grammar in an engine: waiting for it, jumping, drafts, limits, preemption. A fake model, real grammars."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from core.errors import GrammarLimitError, InvalidInputError
from core.grammar import GrammarMatcher, PendingGrammar
from core.grammar_compiler import LlgCompiler
from core.request import FinishReason
from core.sampling_params import GrammarSource
from router.tokenizer import Tokenizer
from tests.support.engine_bench import LENGTH, PREFILL, STOP, EngineBench
from tests.support.fake_runner import EOS_TOKEN_ID, VOCAB_SIZE, oracle_tokens
from tests.unit.router.tiny_model import build_byte_level_folder

PROMPT = list(range(5, 25))
SCHEMA = GrammarSource(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {"hello world": {"type": "string", "maxLength": 4}, "kind": {"enum": ["a cat", "a dog"]}},
            "required": ["hello world", "kind"],
            "additionalProperties": False,
            "x-guidance": {"whitespace_flexible": False},
        }
    ),
)
DIGITS = GrammarSource("regex", "[0-9]{30}")


class SettledCompiler(LlgCompiler):
    """Its matchers are there when start() returns: an engine in a loop would step a thousand times meanwhile."""

    def start(self, source: GrammarSource, output_token_ids: Sequence[int]) -> Any:
        pending = super().start(source, output_token_ids)
        pending._future.exception(60)
        return pending


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_byte_level_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def compiler(folder: Path) -> Iterator[SettledCompiler]:
    compiler = SettledCompiler(folder, VOCAB_SIZE, (EOS_TOKEN_ID,))
    yield compiler
    compiler.close()


class KnowingDrafter:
    """Right at first, then a token that no grammar here allows, or an end."""

    def __init__(self, expected: list[int]) -> None:
        self._expected = expected

    def propose(self, request_id: str, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        num_output = len(token_ids) - len(PROMPT)
        drafts = self._expected[num_output : num_output + 1 + num_output % 4]
        return [*drafts, (EOS_TOKEN_ID, VOCAB_SIZE - 1, 3)[num_output % 3], 5][:max_tokens]

    def forget(self, request_id: str) -> None:
        pass


def run_alone(compiler: LlgCompiler, grammar: GrammarSource, max_tokens: int = 100, **options: Any) -> EngineBench:
    bench = EngineBench(grammar_compiler=compiler, **options)
    bench.add("r", PROMPT, max_tokens=max_tokens, grammar=grammar)
    bench.run()
    bench.assert_nothing_leaked()
    return bench


def text_of(folder: Path, token_ids: list[int]) -> str:
    return Tokenizer(folder).decode(token_ids, skip_special_tokens=True)


def test_engine_schema_is_followed_to_its_end_and_jumping_saves_steps(folder: Path, compiler: LlgCompiler) -> None:
    jumping, stepping = (run_alone(compiler, SCHEMA, jump_decoding=jumps) for jumps in (True, False))
    assert jumping.tokens == stepping.tokens
    assert jumping.tokens["r"][-1] == EOS_TOKEN_ID
    parsed = json.loads(text_of(folder, jumping.tokens["r"]))
    assert set(parsed) == {"hello world", "kind"} and parsed["kind"] in ("a cat", "a dog")
    assert jumping.finished["r"].reason is stepping.finished["r"].reason is STOP
    num_tokens = len(jumping.tokens["r"])
    assert stepping.engine.stats.num_forced_tokens == 0
    assert stepping.engine.stats.num_generation_tokens == jumping.engine.stats.num_generation_tokens == num_tokens
    num_sampled = num_tokens - jumping.engine.stats.num_forced_tokens
    assert num_sampled <= jumping.engine.stats.num_steps < num_tokens / 1.5


def test_engine_single_choice_needs_no_step(compiler: LlgCompiler) -> None:
    bench = run_alone(compiler, GrammarSource("choice", '["hello"]'))
    assert bench.engine.stats.num_steps == 0 and bench.finished["r"].reason is STOP
    assert bench.engine.stats.num_forced_tokens == len(bench.tokens["r"]) > 0


@pytest.mark.parametrize("max_tokens", range(1, 20))
def test_engine_max_tokens_cuts_at_the_same_place_however_tokens_come(compiler: LlgCompiler, max_tokens: int) -> None:
    jumping, stepping = (run_alone(compiler, SCHEMA, max_tokens, jump_decoding=jumps) for jumps in (True, False))
    assert jumping.tokens == stepping.tokens
    assert jumping.finished == stepping.finished
    assert len(jumping.tokens["r"]) == max_tokens and jumping.finished["r"].reason is LENGTH


@pytest.mark.parametrize("jump_decoding", [True, False])
@pytest.mark.parametrize("overlap_steps", ["on", "off"])
@pytest.mark.parametrize("num_batched", [16, 256])
def test_engine_mixed_batch_every_request_gets_what_it_gets_alone(
    compiler: LlgCompiler, jump_decoding: bool, overlap_steps: str, num_batched: int
) -> None:
    """Forced tokens come in chunks under a small budget, next to requests without a grammar, whose tokens do not change."""
    alone = {grammar: run_alone(compiler, grammar).tokens["r"] for grammar in (SCHEMA, DIGITS)}
    bench = EngineBench(
        grammar_compiler=compiler,
        jump_decoding=jump_decoding,
        overlap_steps=overlap_steps,
        max_num_batched_tokens=num_batched,
    )
    bench.add("schema", PROMPT, max_tokens=100, grammar=SCHEMA)
    bench.add("free", PROMPT, max_tokens=40)
    bench.add("digits", PROMPT, max_tokens=100, grammar=DIGITS)
    bench.run()
    bench.assert_nothing_leaked()
    assert bench.tokens == {"schema": alone[SCHEMA], "free": oracle_tokens(PROMPT, 40), "digits": alone[DIGITS]}


@pytest.mark.parametrize("jump_decoding", [True, False])
def test_engine_drafts_that_leave_the_grammar_are_cut_and_change_no_token(
    folder: Path, compiler: LlgCompiler, jump_decoding: bool
) -> None:
    alone = {grammar: run_alone(compiler, grammar).tokens["r"] for grammar in (SCHEMA, DIGITS)}
    for grammar, tokens in alone.items():
        bench = run_alone(compiler, grammar, drafter=KnowingDrafter(tokens), jump_decoding=jump_decoding)
        assert bench.tokens["r"] == tokens
        stats = bench.engine.stats
        if grammar == DIGITS:
            assert stats.num_draft_tokens > 0 and sum(stats.accepted_by_position.values()) > 0
        for plan in bench.runner.plans:
            for request_id, drafts in plan.draft_token_ids.items():
                assert len(plan.token_masks[request_id]) == len(drafts) + 1
                for draft, mask in zip(drafts, plan.token_masks[request_id], strict=False):
                    assert mask[draft // 8] >> draft % 8 & 1, "a draft that cannot come true"


@pytest.mark.parametrize("jump_decoding", [True, False])
def test_engine_preempted_and_moved_requests_go_on_as_they_began(compiler: LlgCompiler, jump_decoding: bool) -> None:
    expected = run_alone(compiler, SCHEMA).tokens["r"]
    # Too small a pool for three: somebody is preempted, and starts over with its grammar where it was.
    bench = EngineBench(grammar_compiler=compiler, num_blocks=22, jump_decoding=jump_decoding, enable_prefix_caching=False)
    for name in "abc":
        bench.add(name, PROMPT, max_tokens=60, grammar=SCHEMA)
    bench.run()
    assert bench.engine.stats.num_preemptions > 0
    assert all(tokens == expected for tokens in bench.tokens.values())
    bench.assert_nothing_leaked()
    for num_known in range(1, len(expected)):
        moved = EngineBench(grammar_compiler=compiler, jump_decoding=jump_decoding)
        moved.add("m", PROMPT, max_tokens=100, output=expected[:num_known], grammar=SCHEMA)
        moved.run()
        assert moved.tokens["m"] == expected[num_known:] and moved.finished["m"].reason is STOP


def test_engine_forced_tokens_that_are_hits_are_not_told_as_cached_ones(compiler: LlgCompiler) -> None:
    """Whoever sent the request knows its prompt alone, and takes more hits than that for a lie."""
    bench = run_alone(compiler, SCHEMA)
    bench.add("again", PROMPT, max_tokens=100, grammar=SCHEMA)
    bench.run()
    assert bench.tokens["again"] == bench.tokens["r"]
    assert bench.engine.stats.prefix_cache_hit_tokens > len(PROMPT), "a test of hits behind the prompt needs some"
    assert bench.num_cached_tokens["again"] == len(PROMPT)


def test_engine_prefill_stage_samples_one_token_of_the_grammar(compiler: LlgCompiler) -> None:
    expected = run_alone(compiler, SCHEMA).tokens["r"]
    bench = EngineBench(grammar_compiler=compiler)
    bench.add("p", PROMPT, max_tokens=100, stage=PREFILL, grammar=SCHEMA)
    bench.run()
    assert bench.tokens["p"] == expected[:1] and bench.finished["p"].reason is LENGTH


def test_engine_request_waits_for_its_grammar_and_lets_others_pass(folder: Path, compiler: LlgCompiler) -> None:
    class Held:
        is_there = False

        def __init__(self, source: GrammarSource) -> None:
            self._inner: PendingGrammar = compiler.start(source, [])

        def poll(self) -> GrammarMatcher | None:
            return self._inner.poll() if Held.is_there else None

    class HoldingCompiler(SettledCompiler):
        def start(self, source: GrammarSource, output_token_ids: Sequence[int]) -> Any:
            return Held(source)

    bench = EngineBench(grammar_compiler=HoldingCompiler(folder, VOCAB_SIZE, (EOS_TOKEN_ID,)), max_num_seqs=2)
    bench.add("first", PROMPT, max_tokens=8, grammar=DIGITS)
    bench.add("second", PROMPT, max_tokens=4)
    bench.add("third", PROMPT[1:], max_tokens=4)
    for _ in range(12):
        bench.step()
    assert set(bench.finished) == {"second", "third"} and bench.tokens["first"] == []
    assert bench.engine.stats.waiting_by_reason["constraint"] == 1
    bench.add("aborted", PROMPT, grammar=DIGITS)
    bench.engine.abort_request("aborted")
    Held.is_there = True
    bench.run()
    assert len(bench.tokens["first"]) == 8 and bench.tokens["aborted"] == []
    bench.assert_nothing_leaked()


def test_engine_wrong_grammar_ends_its_request_alone(compiler: LlgCompiler) -> None:
    bench = EngineBench(grammar_compiler=compiler)
    bench.add("wrong", PROMPT, grammar=GrammarSource("regex", "("))
    bench.add("right", PROMPT, max_tokens=4)
    bench.run()
    assert bench.finished["wrong"].reason is FinishReason.ERROR and "regex" in bench.finished["wrong"].error
    assert bench.tokens["right"] == oracle_tokens(PROMPT, 4)
    with pytest.raises(InvalidInputError, match="kind"):
        bench.add("worse", PROMPT, grammar=GrammarSource("nonsense", "a"))
    with pytest.raises(InvalidInputError, match="without grammars"):
        EngineBench().add("r", PROMPT, grammar=DIGITS)


def test_engine_grammar_without_an_end_is_cut_by_max_tokens(compiler: LlgCompiler) -> None:
    endless = GrammarSource("grammar", 'start: "a" start')
    jumping, stepping = (run_alone(compiler, endless, max_tokens=20, jump_decoding=jumps) for jumps in (True, False))
    assert len(jumping.tokens["r"]) == 20 and jumping.finished["r"].reason is LENGTH
    # Without jumps all of what is forced is looked through anew at each step, which soon is too much: an error, and no harm.
    assert stepping.finished["r"].reason in (LENGTH, FinishReason.ERROR)


def test_engine_grammar_beyond_its_limits_ends_its_request_alone(compiler: LlgCompiler) -> None:
    """Compiles, and then has more ways to go on than the library follows: found out when a token is taken."""
    text = json.dumps({"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(2000)}})
    for drafter in (None, KnowingDrafter([93, 4, 82])):
        bench = EngineBench(grammar_compiler=compiler, drafter=drafter)
        bench.add("r", PROMPT, max_tokens=50, grammar=GrammarSource("json_schema", text))
        bench.add("other", PROMPT, max_tokens=8)
        bench.run()
        assert bench.finished["r"].reason is FinishReason.ERROR
        assert bench.tokens["other"] == oracle_tokens(PROMPT, 8)
        bench.assert_nothing_leaked()


@pytest.mark.parametrize(
    ("fails_in", "with_drafts"),
    [("token_masks", False), ("forced_tokens", False), ("accept", False), ("token_masks", True), ("count_valid", True)],
)
def test_engine_grammar_that_fails_on_the_way_ends_its_request_alone(
    compiler: LlgCompiler, fails_in: str, with_drafts: bool
) -> None:
    drafter = KnowingDrafter(run_alone(compiler, DIGITS).tokens["r"]) if with_drafts else None
    bench = EngineBench(grammar_compiler=compiler, drafter=drafter)
    bench.add("fails", PROMPT, max_tokens=50, grammar=DIGITS)
    bench.add("other", PROMPT, max_tokens=20)
    for _ in range(3):
        bench.step()
    matcher = bench.engine._scheduler.requests["fails"].grammar

    class Failing:
        def __getattr__(self, name: str) -> Any:
            if name != fails_in:
                return getattr(matcher, name)
            if fails_in == "accept":
                return lambda _token_ids: False
            raise GrammarLimitError("too much")

    bench.engine._scheduler.requests["fails"].grammar = Failing()  # type: ignore[assignment]
    bench.run()
    assert bench.finished["fails"].reason is FinishReason.ERROR
    assert bench.tokens["other"] == oracle_tokens(PROMPT, 20)
    bench.assert_nothing_leaked()


def test_engine_ignore_eos_and_min_tokens_end_with_the_grammar(compiler: LlgCompiler) -> None:
    bench = EngineBench(grammar_compiler=compiler)
    bench.add("r", PROMPT, max_tokens=100, grammar=DIGITS, ignore_eos=True, min_tokens=90)
    bench.run()
    assert bench.tokens["r"][-1] == EOS_TOKEN_ID and bench.finished["r"].reason is STOP


def test_engine_stop_token_within_forced_tokens_ends_the_request(folder: Path, compiler: LlgCompiler) -> None:
    expected = run_alone(compiler, SCHEMA).tokens["r"]
    stop_id = expected[3]
    for jumps in (True, False):
        bench = EngineBench(grammar_compiler=compiler, jump_decoding=jumps)
        bench.add("r", PROMPT, max_tokens=100, grammar=SCHEMA, stop_token_ids=(stop_id,))
        bench.run()
        assert bench.tokens["r"] == expected[: expected.index(stop_id) + 1]
        assert bench.finished["r"].stop_token_id == stop_id


def test_engine_forced_tokens_have_logprobs_of_certainty(compiler: LlgCompiler) -> None:
    bench = EngineBench(grammar_compiler=compiler)
    bench.add("r", PROMPT, max_tokens=100, grammar=SCHEMA, logprobs=2)
    steps = []
    while bench.engine.has_work():
        steps.append(bench.step())
    listed = [entry for output in steps for entry in output.logprobs.get("r", [])]
    # The fake runner reports none, so that those here are of forced tokens: each with itself as the only alternative.
    assert len(listed) == bench.engine.stats.num_forced_tokens > 0
    assert all(dataclasses.astuple(entry)[1:] == (0.0, 1, ((entry.token_id, 0.0),)) for entry in listed)
    assert re.fullmatch(r"\{.*\}", text_of(Path(str(compiler._model_dir)), bench.tokens["r"]), re.DOTALL)
