"""Grammars by llguidance: schemas, regular expressions, choices and Lark or GBNF grammars become matchers over a model's tokens.

Nodes use it to constrain sampling, the router to refuse what does not compile. Loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from core.errors import GrammarLimitError, InvalidInputError
from core.grammar import GrammarMatcher
from core.model_files import TOKENIZER_FILE
from core.sampling_params import GrammarSource

_logger = logging.getLogger(__name__)
# A chain of rules or references is followed by recursion: with 64 MiB, one that fills the longest text ends in an error or a
# grammar, where 8 MiB end in a fault that takes the process along.
_STACK_BYTES = 64 * 1024 * 1024
# Time and memory for expressions grow with the square of their length (tens of thousands of optional parts take gigabytes).
MAX_EXPRESSION_CHARS = 4096
MAX_LARK_CHARS = 10 * 1024
_MAX_NESTING = 100  # of schemas; the library parses JSON to 128 levels
_MAX_CACHED = 64
_MAX_ERROR_CHARS = 300
# What grammars take at most in a step, in the library's units: some 15 ms for a mask, some 50 MB for what it remembers.
_LIMITS = LLParserLimits(max_lexer_states=25_000, verbose_errors=False)
# Small models that may write white space tend to write nothing else: a line break and deep indentation fit, more does not.
_JSON_DEFAULTS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}


class LlgMatcher:
    """core.grammar.GrammarMatcher over an LLMatcher, which it owns. end_mask allows end_token_ids[0] alone.

    The library stops when nothing but an end token may follow; of several it is always the same one that is forced then.
    """

    __slots__ = ("_end_mask", "_end_token_ids", "_matcher", "is_terminated")

    def __init__(self, matcher: LLMatcher, end_token_ids: Sequence[int], end_mask: bytes) -> None:
        self.is_terminated = False
        self._matcher = matcher
        self._end_token_ids = end_token_ids
        self._end_mask = end_mask

    def accept(self, token_ids: Sequence[int]) -> bool:
        """See GrammarMatcher."""
        if not token_ids:
            return True
        matcher = self._matcher
        may_end = token_ids[-1] in self._end_token_ids
        text = list(token_ids[:-1] if may_end else token_ids)
        if matcher.try_consume_tokens(text) != len(text):
            self._check_limits()
            return False
        self.is_terminated = may_end and matcher.is_accepting()  # an end is not told to the library: it would reject some
        return self.is_terminated or not may_end or matcher.consume_token(token_ids[-1])

    def count_valid(self, draft_token_ids: Sequence[int]) -> int:
        """See GrammarMatcher."""
        if self._matcher.is_stopped():
            return int(draft_token_ids[:1] == [self._end_token_ids[0]])
        return self._matcher.validate_tokens(list(draft_token_ids)) if draft_token_ids else 0

    def token_masks(self, draft_token_ids: Sequence[int]) -> list[bytes]:
        """See GrammarMatcher."""
        matcher = self._matcher
        masks = [self._mask()]
        num_consumed = 0
        for token_id in draft_token_ids:
            if token_id in self._end_token_ids and matcher.is_accepting():
                masks += [self._end_mask] * (len(draft_token_ids) - num_consumed)
                break
            if not matcher.consume_token(token_id):
                raise GrammarLimitError(f"the grammar cannot follow a draft: {_one_line(matcher.get_error())}")
            num_consumed += 1
            masks.append(self._mask())
        if num_consumed:
            matcher.rollback(num_consumed)
        self._check_limits()
        return masks

    def _mask(self) -> bytes:
        return self._end_mask if self._matcher.is_stopped() else self._matcher.compute_bitmask()

    def forced_tokens(self) -> list[int]:
        """See GrammarMatcher."""
        if self._matcher.is_stopped():
            self._check_limits()  # at which it stops as well
            return [] if self.is_terminated else [self._end_token_ids[0]]
        tokens = self._matcher.compute_ff_tokens()
        self._check_limits()
        return tokens

    def _check_limits(self) -> None:
        if self._matcher.is_error():
            raise GrammarLimitError(f"the grammar takes too long to follow: {_one_line(self._matcher.get_error())}")


class LlgCompiler:
    """core.grammar.GrammarCompiler for one tokenizer; check() is the router's use of it.

    One thread compiles, in order of arrival. It starts, and reads the tokenizer, when there is something to compile.
    """

    def __init__(self, model_dir: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        """model_dir: where tokenizer.json is. vocab_size: of the logits. eos_token_ids: allowed where a grammar may end."""
        self.on_result: Callable[[], None] = lambda: None
        self._model_dir = model_dir
        self._vocab_size = vocab_size
        self._end_token_ids = list(eos_token_ids)
        self._end_mask = b""
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[GrammarSource, LLMatcher | InvalidInputError] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None

    def start(self, source: GrammarSource, output_token_ids: Sequence[int]) -> _Pending:
        """See GrammarCompiler."""
        future = self._thread().submit(self._make, source, list(output_token_ids))
        future.add_done_callback(lambda _future: self.on_result())
        return _Pending(future)

    def check(self, source: GrammarSource) -> Future[None]:
        """Compile for the sake of the error: the future raises InvalidInputError for what is no grammar."""
        return self._thread().submit(self._check, source)

    def close(self) -> None:
        """See GrammarCompiler. Does not wait for a compilation that is under way."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _thread(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = _thread_with_large_stack()
        return self._pool

    # -- the thread's side ---------------------------------------------------------------------------------------------
    def _check(self, source: GrammarSource) -> None:
        self._compile(source)

    def _make(self, source: GrammarSource, output_token_ids: list[int]) -> GrammarMatcher:
        matcher = LlgMatcher(self._compile(source).deep_copy(), self._end_token_ids, self._end_mask)
        if output_token_ids and not matcher.accept(output_token_ids):
            raise InvalidInputError("output_token_ids", output_token_ids, "tokens that follow the grammar")
        matcher.token_masks([])  # the first of a place takes longest: what it found is remembered
        return matcher

    def _compile(self, source: GrammarSource) -> LLMatcher:
        """A matcher at the start, to be copied. Refusals are remembered as well: they can take as long."""
        known = self._compiled.pop(source, None)
        if known is None:
            try:
                known = self._compile_anew(source)
            except InvalidInputError as error:
                known = error
            except Exception as error:  # whatever the library has not foreseen is this grammar's fault, not the engine's
                _logger.exception("compiling a %s failed", source.kind)
                known = _refusal(source, _one_line(str(error)))
        self._compiled[source] = known
        if len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        if isinstance(known, InvalidInputError):
            raise InvalidInputError(known.field, known.value, known.allowed)
        return known

    def _compile_anew(self, source: GrammarSource) -> LLMatcher:
        source.validate()
        if self._tokenizer is None:
            self._tokenizer = _read_tokenizer(self._model_dir, self._vocab_size, self._end_token_ids)
            self._end_token_ids = self._end_token_ids or [self._tokenizer.eos_token]
            num_words = -(-self._tokenizer.vocab_size // 32)
            self._end_mask = (1 << self._end_token_ids[0]).to_bytes(4 * num_words, "little")
        matcher = LLMatcher(self._tokenizer, _definition(source), log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            matcher.compute_ff_tokens()  # the first steps take longest, and show some of what will not work at all
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refusal(source, _one_line(matcher.get_error()))
        return matcher


class _Pending:
    """core.grammar.PendingGrammar."""

    def __init__(self, future: Future[GrammarMatcher]) -> None:
        self._future = future

    def poll(self) -> GrammarMatcher | None:
        """See PendingGrammar."""
        return self._future.result() if self._future.done() else None


# -- inside ------------------------------------------------------------------------------------------------------------
def _thread_with_large_stack() -> ThreadPoolExecutor:
    previous = threading.stack_size(_STACK_BYTES)
    try:
        pool = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        pool.submit(int).result()  # starts the thread
    finally:
        threading.stack_size(previous)
    return pool


def _read_tokenizer(model_dir: Path, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """Raises InvalidInputError for a tokenizer that the library cannot spell out in bytes."""
    try:
        description = json.loads((model_dir / TOKENIZER_FILE).read_text(encoding="utf-8"))
        description["truncation"] = description["padding"] = None  # of training; forced text is tokenized whole
        num_tokens = LLTokenizer(json.dumps(description)).vocab_size
        return LLTokenizer(json.dumps(description), n_vocab=max(vocab_size, num_tokens), eos_token=eos_token_ids or None)
    except Exception as error:  # the library raises bare ones for what it cannot read
        _logger.warning("grammars cannot be used with the tokenizer in %s: %s", model_dir, error)
        raise InvalidInputError("grammar", "given", f"absent: this model's tokenizer cannot be constrained ({error})") from error


def _definition(source: GrammarSource) -> str:
    """In the library's own language. Raises InvalidInputError."""
    if source.kind == "json_schema":
        return _schema_definition(source)
    if source.kind == "choice":
        return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(source.text))
    limit = MAX_EXPRESSION_CHARS if source.kind == "regex" else MAX_LARK_CHARS
    if len(source.text) > limit:
        raise InvalidInputError("grammar", f"{len(source.text)} characters", f"at most {limit} characters as a {source.kind}")
    if source.kind == "regex":
        return LLMatcher.grammar_from_regex(source.text)
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(source.text))
    except Exception as error:  # its parser of GBNF raises bare ones
        raise _refusal(source, _one_line(str(error))) from error


def _schema_definition(source: GrammarSource) -> str:
    try:
        schema = json.loads(source.text)
        num_chars = sum(map(len, _patterns(schema, _MAX_NESTING)))
        if num_chars > MAX_EXPRESSION_CHARS:
            allowed = f"at most {MAX_EXPRESSION_CHARS} characters in all patterns of a schema"
            raise InvalidInputError("grammar", f"{num_chars} characters", allowed)
        is_laid_out = isinstance(schema, dict) and "x-guidance" in schema
        text = f'{{"allOf":[{source.text}]}}' if isinstance(schema, bool) else source.text  # defaults need an object
        return LLMatcher.grammar_from_json_schema(text, defaults=None if is_laid_out else _JSON_DEFAULTS)
    except (ValueError, RecursionError) as error:
        raise _refusal(source, _one_line(str(error))) from error


def _patterns(schema: object, levels_left: int) -> Iterator[str]:
    """All regular expressions in a schema, wherever they are. Raises ValueError when it is nested too deeply."""
    if levels_left == 0:
        raise ValueError(f"a schema has at most {_MAX_NESTING} levels")
    if isinstance(schema, dict):
        for key, value in schema.items():
            if key in ("pattern", "whitespace_pattern") and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value, levels_left - 1)
    elif isinstance(schema, list):
        for value in schema:
            yield from _patterns(value, levels_left - 1)


def _refusal(source: GrammarSource, why: str) -> InvalidInputError:
    if "NoExtensionBias" in why:  # what the library says where it finds no way to an end
        why = "no text, or none that ends, matches it"
    return InvalidInputError("grammar", source.text, f"a {source.kind} that compiles ({why})")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:_MAX_ERROR_CHARS]
