"""The OpenAI API's bodies as typed structs: what clients send to the two generation endpoints, and what they get.

Only shapes live here. request_validation.py judges values, answers.py fills the responses. Fields that this server does
not know are ignored, as OpenAI-compatible servers do; fields that it knows and cannot honour are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from core.errors import InvalidInputError, NotRepresentable

MAX_SEARCHED_BYTES = 256 * 1024  # a body whose wrong value is looked for, to show it: that takes longer than decoding
UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType


# -- requests ----------------------------------------------------------------------------------------------------------
class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a stream ends with a usage chunk, and whether every chunk carries the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """Only {"type": "text"} is served."""

    type: str


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What completions and chat completions share. None and absent mean the default; see SamplingParams for meanings."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    n: int | None = None
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    # Known and not served: refused when they ask for something.
    response_format: ResponseFormat | None = None
    suffix: Any = None
    use_beam_search: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions. prompt: text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One turn. What a template may use beside role and content is carried along."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[ChatMessage]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    # Known and not served.
    continue_final_message: bool | None = None
    chat_template: str | None = None
    functions: Any = None
    audio: Any = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /tokenize: either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/load_lora_adapter. load_inplace: the name may be another adapter's, whose place this one takes."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str


class CachedRequest(msgspec.Struct, kw_only=True):
    """Body of /cached: hashes of a prompt's full blocks, first to last, in hexadecimal digits."""

    block_hashes: Annotated[
        list[Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]], msgspec.Meta(min_length=1, max_length=2**17)
    ]


# -- responses ---------------------------------------------------------------------------------------------------------
class PromptTokensDetails(msgspec.Struct):
    """How many prompt tokens were not computed, because a cache or store had them."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of all choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """One alternative at a prompt position, keyed by its token id in the response."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists over tokens; the first prompt token of an echo has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One choice, whole or as a chunk of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Body of a completion, and of each chunk of a streamed one."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct):
    """One alternative of a chat token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(msgspec.Struct):
    """One chat token with its alternatives."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat choice."""

    role: str = "assistant"
    content: str
    refusal: None = None


class AssistantDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    """One choice of a whole chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    """One choice of a chunk."""

    index: int
    delta: AssistantDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatResponse(msgspec.Struct, kw_only=True):
    """Body of a chat completion."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat completion."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ErrorBody(msgspec.Struct):
    """OpenAI's description of an error. param: the field that is wrong; code: the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int | str | None = None


class ErrorResponse(msgspec.Struct):
    """Body of every answer that is no success, and the last event of a stream that failed."""

    error: ErrorBody


Body = TypeVar(
    "Body",
    CompletionRequest,
    ChatRequest,
    TokenizeRequest,
    DetokenizeRequest,
    CachedRequest,
    LoadAdapterRequest,
    UnloadAdapterRequest,
)


def decode_body(body: bytes, body_type: type[Body]) -> Body:
    """JSON to a request. Raises InvalidInputError naming the field, or "body" when it is no JSON at all."""
    try:
        return msgspec.json.decode(body, type=body_type)
    except msgspec.ValidationError as error:
        what, _, path = str(error).rstrip("`").partition(" - at `$")
        field, value, allowed = path.lstrip("."), _value_at(body, path), what
        if missing := re.match("Object missing required field `([^`]+)", what):
            field, value, allowed = f"{field}.{missing[1]}".lstrip("."), None, "a value: the field is required"
        elif expected := re.match("Expected `([^`]+)`", what):
            allowed = expected[1].replace(" | ", " or ")
        elif "out of range" in what:
            allowed = "a number that is finite and has fewer digits"
        raise InvalidInputError(field or "body", value, allowed) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError("body", body[:40].decode(errors="replace"), f"a JSON object ({error})") from error
    except RecursionError as error:
        raise InvalidInputError("body", "", "JSON that is less deeply nested") from error


def _value_at(body: bytes, path: str) -> object:
    """The offending value, for the message; None when the path is not a plain one. Decodes no more than the way to it."""
    if len(body) > MAX_SEARCHED_BYTES:
        return None
    raw = msgspec.Raw(body)
    try:
        for part in path.replace("[", ".").replace("]", "").split("."):
            if part.isdecimal():
                raw = msgspec.json.decode(raw, type=list[msgspec.Raw])[int(part)]
            elif part:
                raw = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])[part]
    except (msgspec.DecodeError, KeyError, IndexError, ValueError, RecursionError):
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError):  # a number that no float holds, among others
        return NotRepresentable(bytes(raw)[:120].decode(errors="replace"))
