"""The OpenAI API's answers as typed structs: whole ones and chunks of streams. answer_formats.py fills them."""

from __future__ import annotations

import msgspec

UNSET = msgspec.UNSET
UnsetType = msgspec.UnsetType


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


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """A function and its arguments as JSON text; in a stream, what a chunk adds to them."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(msgspec.Struct):
    """One call of an answer."""

    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to one call. id, type and the function's name come with its first chunk."""

    index: int
    function: FunctionCall
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    """The answer of a chat choice. content None: it consists of calls."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class AssistantDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a chunk adds to the answer."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


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
