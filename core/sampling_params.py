"""What a client may ask of sampling, validated once at the edge and carried unchanged to the sampler.

A plain value: it is part of the wire messages as it stands, so that there is one definition and no copy to drift.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from core.errors import InvalidInputError

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS_ENTRIES = 1024
GRAMMAR_KINDS = ("json_schema", "regex", "choice", "grammar")
MAX_GRAMMAR_CHARS = 64 * 1024
GREEDY_TEMPERATURE = 1e-5  # below this a temperature only amplifies rounding: such requests are greedy


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """What a request's output must look like, as text: a JSON schema, a regular expression that all of the output matches, a
    JSON list of strings of which it is one, or a grammar in Lark's or GBNF's syntax.
    """

    kind: str
    text: str

    def validate(self) -> None:
        """Raise InvalidInputError for an unknown kind or a text that is too long; whether it compiles is not known here."""
        if self.kind not in GRAMMAR_KINDS:
            raise InvalidInputError("grammar.kind", self.kind, f"one of {', '.join(GRAMMAR_KINDS)}")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise InvalidInputError("grammar", f"{len(self.text)} characters", f"at most {MAX_GRAMMAR_CHARS} characters")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters with the meaning that vLLM and the OpenAI API give them.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 switch the filter off. `seed` is always set when a request
    reaches a node (the router draws one when the client gave none), so that a moved request goes on as it began.
    `logprobs` / `prompt_logprobs` count the alternatives wanted per token (0: the token's own only; None: none).
    `stop` is applied by the router on text; nodes look at token ids alone. `grammar` forbids every token that leaves it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSource | None = None

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """True when sampling depends on the tokens seen so far."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidInputError naming the first field that is out of range. `vocab_size`: the model's token count."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0, low_is_open=True)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_is_open=True)
        _check_int("top_k", self.top_k, -1, vocab_size)
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens, allowed=f"0 to max_tokens ({self.max_tokens})")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _check_int(name, count, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidInputError("stop", f"{len(self.stop)} strings", f"at most {MAX_STOP_STRINGS} strings")
        if any(not text for text in self.stop):
            raise InvalidInputError("stop", "", "strings that are not empty")
        if (longest := max(map(len, self.stop), default=0)) > MAX_STOP_CHARS:
            raise InvalidInputError("stop", f"{longest} characters", f"strings of at most {MAX_STOP_CHARS} characters")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidInputError("stop_token_ids", f"{len(self.stop_token_ids)} ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, vocab_size - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise InvalidInputError("logit_bias", f"{len(self.logit_bias)} entries", f"at most {MAX_LOGIT_BIAS_ENTRIES}")
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0, vocab_size - 1)
            _check_range(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.grammar is not None:
            self.grammar.validate()


def _check_range(name: str, value: float, low: float, high: float, *, low_is_open: bool = False) -> None:
    is_low_enough = value > low if low_is_open else value >= low
    if not (math.isfinite(value) and is_low_enough and value <= high):
        raise InvalidInputError(name, value, f"a number {'above' if low_is_open else 'from'} {low:g} to {high:g}")


def _check_int(name: str, value: int, low: int, high: int, *, allowed: str | None = None) -> None:
    if not low <= value <= high:
        raise InvalidInputError(name, value, allowed or f"a whole number from {low} to {high}")
