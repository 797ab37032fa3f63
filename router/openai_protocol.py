"""The OpenAI API's bodies as typed structs: what clients send to the two generation endpoints, and errors.

Only shapes live here; those of answers are in openai_responses.py. request_validation.py judges values. Fields that this
server does not know are ignored, as OpenAI-compatible servers do; fields that it knows and cannot honour are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec

from core.errors import InvalidInputError, NotRepresentable

MAX_SEARCHED_BYTES = 256 * 1024  # a body whose wrong value is looked for, to show it: that takes longer than decoding


# -- requests ----------------------------------------------------------------------------------------------------------
class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a stream ends with a usage chunk, and whether every chunk carries the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """The schema of a response_format, as the client wrote it. It is always kept to, whatever `strict` says."""

    schema: msgspec.Raw = msgspec.Raw()
    name: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """type: text, json_object, or json_schema with its json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the output must look like: exactly one of the first five. json: a schema, or its text."""

    json: msgspec.Raw = msgspec.Raw()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


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
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: msgspec.Raw = msgspec.Raw()  # structured_outputs.json and so on, as vLLM once named them
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Known and not served: refused when they ask for something.
    suffix: Any = None


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
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
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
    tools: list[dict[str, Any]] | None = None
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


# -- errors ------------------------------------------------------------------------------------------------------------
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
