"""From a client's request to what the engine needs: sampling parameters, prompts and limits, each checked once, here.

Every refusal is an InvalidInputError that names field, value and what is allowed.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from core.adapter_files import Adapter
from core.errors import InvalidInputError, KVRelayError
from core.sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams
from router.beam_search import MAX_BEAM_WIDTH, BeamOptions
from router.chat_validation import MAX_NAME_CHARS, check_messages
from router.openai_protocol import ChatRequest, CompletionRequest, GenerationRequest
from router.structured_outputs import RequestedGrammar, requested_grammar
from router.tool_calls import ToolSupport, ToolUse, plan_tools

DEFAULT_COMPLETION_TOKENS = 16  # the OpenAI API's; chat goes on to the end of the context
MAX_CACHE_SALT_CHARS = 256
MAX_USER_CHARS = 1024
MAX_LENGTH_PENALTY = 10.0  # as an exponent of a length: more would overflow
PRIORITY_RANGE = (-(2**31), 2**31 - 1)
NOT_SERVED = ("suffix",)
NOT_WITH_BEAMS = (  # what a search ranks is the model's own distribution
    *("top_p", "top_k", "min_p", "min_tokens", "stop", "stop_token_ids", "prompt_logprobs", "logit_bias"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
CHAT_NOT_SERVED = ("continue_final_message", "chat_template", "functions", "audio", "echo")


class UnknownModelError(KVRelayError):
    """The request names a model that is not served here."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What requests are checked against. max_model_len: prompt and output together, in tokens. adapter_names: served, too."""

    served_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    max_choices: int
    eos_token_ids: tuple[int, ...] = ()
    adapter_names: Collection[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPlan:
    """A checked request: which sequences to run and how to answer. sampling has no seed and no max_tokens of its own yet.

    max_tokens None: the rest of the context. echo_only: an echo with max_tokens 0, which samples a token and drops it.
    num_choices per prompt are answered, the best of num_candidates; with beams those are the width of the search.
    grammar: sampling's, with the field that asked for it; whether it compiles is not checked yet.
    """

    sampling: SamplingParams
    grammar: RequestedGrammar | None
    max_tokens: int | None
    is_default_max_tokens: bool
    num_choices: int
    num_candidates: int
    beams: BeamOptions | None
    tool_use: ToolUse | None
    seed: int
    priority: int
    cache_salt: str
    is_stream: bool
    include_usage: bool
    has_continuous_usage: bool
    echo: bool
    echo_only: bool
    include_stop: bool
    skip_special_tokens: bool
    return_token_ids: bool
    return_prompt_logprobs: bool
    adapter: Adapter | None = None
    session_key: str = ""

    def sampling_for(self, num_prompt_tokens: int, choice: int, limits: ModelLimits) -> SamplingParams:
        """Parameters of one choice of a prompt. Raises InvalidInputError when prompt and output exceed the context."""
        check_prompt_length(num_prompt_tokens, limits)
        room = limits.max_model_len - num_prompt_tokens
        max_tokens = room if self.max_tokens is None else self.max_tokens
        if self.is_default_max_tokens:
            max_tokens = min(max_tokens, room)
        if max_tokens > room:
            raise InvalidInputError(
                "max_tokens",
                max_tokens,
                f"at most {room}: the context is {limits.max_model_len} tokens and the prompt has {num_prompt_tokens}",
            )
        sampling = replace(self.sampling, max_tokens=max_tokens, seed=_wrap_seed(self.seed + choice))
        if self.num_candidates > self.num_choices and sampling.logprobs is None:
            sampling = replace(sampling, logprobs=0)  # by which the best are chosen
        sampling.validate(limits.vocab_size)
        return sampling


def check_model_name(model: str | None, limits: ModelLimits) -> None:
    """Raise UnknownModelError; no name means the served model."""
    if model is not None and model not in limits.served_names and model not in limits.adapter_names:
        raise UnknownModelError(f"The model `{model[:MAX_NAME_CHARS]}` does not exist; served here: {limits.served_names[0]}")


def plan_completion(request: CompletionRequest, limits: ModelLimits) -> GenerationPlan:
    """Check everything of a completion that does not need its prompts."""
    echo = bool(request.echo)
    prompt_logprobs = request.prompt_logprobs
    if echo and request.logprobs is not None:
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return _plan(request, limits, request.logprobs, prompt_logprobs, DEFAULT_COMPLETION_TOKENS)


def plan_chat(request: ChatRequest, limits: ModelLimits, tools: ToolSupport = ToolSupport()) -> GenerationPlan:  # noqa: B008
    """Check everything of a chat completion that does not need its prompt."""
    _refuse_given(request, CHAT_NOT_SERVED)
    if request.best_of is not None and not request.use_beam_search and request.best_of != (request.n or 1):
        raise InvalidInputError("best_of", request.best_of, f"absent or equal to n ({request.n or 1}) in a chat")
    if request.top_logprobs and not request.logprobs:
        raise InvalidInputError("top_logprobs", request.top_logprobs, "with logprobs true only")
    check_messages(request.messages, limits.max_model_len)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return _plan(request, limits, logprobs, request.prompt_logprobs, None, plan_tools(request, tools))


def split_prompts(prompt: str | list[str | int | list[int]], limits: ModelLimits) -> list[str | list[int]]:
    """The four forms of a prompt as a list of texts or token lists. Raises InvalidInputError for a mixture or an empty list.

    A list that is too long in whatever form is refused before it is looked through.
    """
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        check_prompt_length(len(prompt), limits)
    elif len(prompt) > limits.max_choices:
        raise InvalidInputError("prompt", f"{len(prompt)} prompts", f"at most {limits.max_choices} choices")
    for part in prompt:
        if isinstance(part, list):
            check_prompt_length(len(part), limits)
    if prompt and all(isinstance(part, int) for part in prompt):
        return [prompt]  # type: ignore[list-item]
    if prompt and (all(isinstance(part, str) for part in prompt) or all(isinstance(part, list) for part in prompt)):
        return list(prompt)  # type: ignore[arg-type]
    raise InvalidInputError(
        "prompt", prompt, "a text, a list of texts, a list of token ids, or a list of those; none of them empty"
    )


def check_prompt_length(num_prompt_tokens: int, limits: ModelLimits) -> None:
    """Raise InvalidInputError when no output fits behind so many prompt tokens."""
    if num_prompt_tokens >= limits.max_model_len:
        allowed = f"fewer than the model's {limits.max_model_len} tokens of context"
        raise InvalidInputError("prompt", f"{num_prompt_tokens} tokens", allowed)


def check_prompt_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidInputError when there is no token or one that the model does not have."""
    if not token_ids:
        raise InvalidInputError("prompt", "", "at least one token")
    for wrong in (min(token_ids), max(token_ids)):
        if not 0 <= wrong < vocab_size:
            raise InvalidInputError("prompt", wrong, f"token ids from 0 to {vocab_size - 1}")


# -- inside ------------------------------------------------------------------------------------------------------------
def _plan(
    request: GenerationRequest,
    limits: ModelLimits,
    logprobs: int | None,
    prompt_logprobs: int | None,
    default_max_tokens: int | None,
    tool_use: ToolUse | None = None,
) -> GenerationPlan:
    _refuse_given(request, NOT_SERVED)
    is_stream, options = bool(request.stream), request.stream_options
    if options is not None and not is_stream:
        raise InvalidInputError("stream_options", msgspec.to_builtins(options), "with stream true only")
    if request.prompt_logprobs is not None and is_stream:
        raise InvalidInputError("prompt_logprobs", request.prompt_logprobs, "without stream only")
    max_tokens, is_default = _max_tokens(request, default_max_tokens)
    echo_only = bool(request.echo) and max_tokens == 0
    if echo_only:
        max_tokens = 1
    for name, value in (("user", request.user), ("prompt_cache_key", request.prompt_cache_key)):
        if value is not None and len(value) > MAX_USER_CHARS:
            raise InvalidInputError(name, f"{len(value)} characters", f"at most {MAX_USER_CHARS} characters")
    grammar = requested_grammar(request)
    if tool_use is not None and tool_use.grammar is not None:
        if grammar is not None:
            raise InvalidInputError(grammar.field, grammar.source.text, "absent with a tool_choice that forces a call")
        grammar = tool_use.grammar
    sampling = replace(_sampling(request, logprobs, prompt_logprobs), grammar=grammar.source if grammar else None)
    num_choices, num_candidates = _num_choices(request, limits)
    beams = _beams(request, sampling, num_candidates)
    if beams is not None and grammar is not None:
        raise InvalidInputError(grammar.field, grammar.source.text, "absent with use_beam_search")
    if beams is not None and request.temperature is None:
        sampling = replace(sampling, temperature=0.0)
    # Out-of-range values are refused before a long prompt is tokenized; max_tokens is judged again with the prompt.
    replace(sampling, max_tokens=max_tokens if max_tokens is not None else limits.max_model_len).validate(limits.vocab_size)
    return GenerationPlan(
        sampling=sampling,
        grammar=grammar,
        max_tokens=max_tokens,
        is_default_max_tokens=is_default,
        num_choices=num_choices,
        num_candidates=num_candidates,
        beams=beams,
        tool_use=tool_use,
        seed=request.seed if request.seed is not None else secrets.randbits(62),
        priority=_priority(request),
        cache_salt=_cache_salt(request),
        is_stream=is_stream,
        include_usage=bool(options and options.include_usage),
        has_continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        echo=bool(request.echo),
        echo_only=echo_only,
        include_stop=bool(request.include_stop_str_in_output),
        skip_special_tokens=request.skip_special_tokens is not False,
        return_token_ids=bool(request.return_token_ids),
        return_prompt_logprobs=request.prompt_logprobs is not None,
        session_key=request.prompt_cache_key or request.user or "",
    )


def _sampling(request: GenerationRequest, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "min_tokens",
            "ignore_eos",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        )
        if (value := getattr(request, name)) is not None
    }
    stop = request.stop if request.stop is not None else ()
    return SamplingParams(
        **given,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        logit_bias=_logit_bias(request.logit_bias or {}),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _max_tokens(request: GenerationRequest, default: int | None) -> tuple[int | None, bool]:
    given = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    if given is None:
        return default, True
    lowest = 0 if request.echo else 1
    if given < lowest:
        name = "max_completion_tokens" if request.max_completion_tokens is not None else "max_tokens"
        raise InvalidInputError(name, given, f"{lowest} or more")
    return given, False


def _num_choices(request: GenerationRequest, limits: ModelLimits) -> tuple[int, int]:
    """How many choices to answer with, and of how many candidates they are the best."""
    num_choices = 1 if request.n is None else request.n
    if not 1 <= num_choices <= limits.max_choices:
        raise InvalidInputError("n", num_choices, f"1 to {limits.max_choices}")
    if request.best_of is None:
        return num_choices, num_choices
    if not num_choices <= request.best_of <= limits.max_choices:
        raise InvalidInputError("best_of", request.best_of, f"from n ({num_choices}) to {limits.max_choices}")
    if request.stream and request.best_of > num_choices:
        allowed = f"absent or equal to n ({num_choices}) with stream true: which are the best is known at the end"
        raise InvalidInputError("best_of", request.best_of, allowed)
    return num_choices, request.best_of


def _beams(request: GenerationRequest, sampling: SamplingParams, width: int) -> BeamOptions | None:
    """Beam search as it was asked for; None when it was not. Raises InvalidInputError for what cannot be had with it."""
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    if not request.use_beam_search:
        if penalty != 1.0:
            raise InvalidInputError("length_penalty", penalty, "absent, or with use_beam_search true")
        return None
    if request.stream:
        raise InvalidInputError("stream", True, "false with use_beam_search: what is best is known at the end")
    if request.echo and (sampling.prompt_logprobs is not None or request.max_tokens == 0):
        raise InvalidInputError("echo", True, "false, or without logprobs and with max_tokens of 1 or more, with use_beam_search")
    if width > MAX_BEAM_WIDTH:
        field = "n" if request.best_of is None else "best_of"
        raise InvalidInputError(field, width, f"1 to {MAX_BEAM_WIDTH} with use_beam_search")
    if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
        allowed = f"a number from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        raise InvalidInputError("length_penalty", penalty, allowed)
    default = SamplingParams()
    for name in NOT_WITH_BEAMS:
        value = getattr(sampling, name)
        if value != getattr(default, name) and not (name == "top_k" and value == -1):
            raise InvalidInputError(name, value, f"absent, or without use_beam_search (default {getattr(default, name)!r})")
    return BeamOptions(width, penalty, sampling.ignore_eos, bool(request.include_stop_str_in_output))


def _priority(request: GenerationRequest) -> int:
    priority = request.priority or 0
    if not PRIORITY_RANGE[0] <= priority <= PRIORITY_RANGE[1]:
        raise InvalidInputError("priority", priority, f"{PRIORITY_RANGE[0]} to {PRIORITY_RANGE[1]}")
    return priority


def _cache_salt(request: GenerationRequest) -> str:
    if request.cache_salt is not None and not 1 <= len(request.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise InvalidInputError("cache_salt", request.cache_salt, f"1 to {MAX_CACHE_SALT_CHARS} characters")
    return request.cache_salt or ""


def _logit_bias(by_key: dict[str, float]) -> dict[int, float]:
    if len(by_key) > MAX_LOGIT_BIAS_ENTRIES:
        raise InvalidInputError("logit_bias", f"{len(by_key)} entries", f"at most {MAX_LOGIT_BIAS_ENTRIES}")
    biases = {}
    for key, bias in by_key.items():
        try:
            biases[int(key)] = bias
        except ValueError:
            raise InvalidInputError("logit_bias", key, "token ids as keys") from None
    return biases


def _refuse_given(request: GenerationRequest, names: Sequence[str]) -> None:
    for name in names:
        if value := getattr(request, name):
            raise InvalidInputError(name, value, "absent: it is not supported")


def _wrap_seed(seed: int) -> int:
    """Into 64 bits, so that seed + choice stays in range next to the largest seed."""
    return (seed + 2**63) % 2**64 - 2**63
