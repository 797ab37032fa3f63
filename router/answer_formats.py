"""OpenAI's response bodies of the two generation endpoints, whole or chunk by chunk, from choices as answers.py sums them up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core.step import TokenLogprob
from router.answers import ChoiceDelta, RunningChoice
from router.openai_responses import (
    UNSET,
    AssistantDelta,
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    ChatResponse,
    ChatTokenLogprob,
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    FunctionCall,
    PromptLogprob,
    PromptLogprobs,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
    UnsetType,
    Usage,
)
from router.request_validation import GenerationPlan
from router.tokenizer import Tokenizer
from router.tool_calls import CallPiece

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


class AnswerFormat(Protocol):
    """How one endpoint writes its answers."""

    def whole(self, choices: Sequence[RunningChoice], usage: Usage) -> msgspec.Struct:
        """The body of an answer that is not streamed."""
        ...

    def chunk(self, choice: RunningChoice, delta: ChoiceDelta, usage: Usage | UnsetType | None) -> msgspec.Struct:
        """One event of a stream."""
        ...

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        """The last event of a stream that was asked for its usage."""
        ...


@dataclass(slots=True)
class CompletionAnswers:
    """/v1/completions."""

    response_id: str
    created: int
    model: str
    plan: GenerationPlan
    tokenizer: Tokenizer

    def whole(self, choices: Sequence[RunningChoice], usage: Usage) -> CompletionResponse:
        """See AnswerFormat."""
        return self._response([self._choice(choice, choice.total, has_echo=self.plan.echo) for choice in choices], usage)

    def chunk(self, choice: RunningChoice, delta: ChoiceDelta, usage: Usage | UnsetType | None) -> CompletionResponse:
        """See AnswerFormat."""
        return self._response([self._choice(choice, delta, has_echo=self.plan.echo and delta.is_first)], usage)

    def usage_chunk(self, usage: Usage) -> CompletionResponse:
        """See AnswerFormat."""
        return self._response([], usage)

    def _response(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> CompletionResponse:
        return CompletionResponse(id=self.response_id, created=self.created, model=self.model, choices=choices, usage=usage)

    def _choice(self, choice: RunningChoice, delta: ChoiceDelta, *, has_echo: bool) -> CompletionChoice:
        is_first = delta.is_first or delta is choice.total
        return CompletionChoice(
            index=choice.index,
            text=(choice.echo_text() if has_echo else "") + delta.text,
            logprobs=self._logprobs(choice, delta, has_echo) if self.plan.sampling.logprobs is not None else None,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            prompt_logprobs=(
                prompt_logprobs_body(choice, self.tokenizer)
                if self.plan.return_prompt_logprobs and delta is choice.total
                else UNSET
            ),
            prompt_token_ids=choice.prompt_token_ids if self.plan.return_token_ids and is_first else UNSET,
            token_ids=delta.token_ids if self.plan.return_token_ids else UNSET,
        )

    def _logprobs(self, choice: RunningChoice, delta: ChoiceDelta, has_echo: bool) -> CompletionLogprobs:
        body = CompletionLogprobs()
        if has_echo:
            known: list[TokenLogprob | None] = [None, *(choice.prompt_logprobs or ())]
            known += [None] * (len(choice.prompt_token_ids) - len(known))
            for token_id, logprob in zip(choice.prompt_token_ids, known, strict=True):
                self._append(body, choice, token_id, logprob)
        for token_logprob in delta.logprobs:
            self._append(body, choice, token_logprob.token_id, token_logprob)
        return body

    def _append(self, body: CompletionLogprobs, choice: RunningChoice, token_id: int, logprob: TokenLogprob | None) -> None:
        text = token_text(token_id, self.tokenizer)
        body.tokens.append(text)
        body.text_offset.append(choice.next_text_offset(text))
        body.token_logprobs.append(None if logprob is None else finite_logprob(logprob.logprob))
        if logprob is None:
            body.top_logprobs.append(None)
            return
        top: dict[str, float] = {}
        for top_id, top_value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
            top.setdefault(token_text(top_id, self.tokenizer), finite_logprob(top_value))
        body.top_logprobs.append(top)


@dataclass(slots=True)
class ChatAnswers:
    """/v1/chat/completions."""

    response_id: str
    created: int
    model: str
    plan: GenerationPlan
    tokenizer: Tokenizer

    def whole(self, choices: Sequence[RunningChoice], usage: Usage) -> ChatResponse:
        """See AnswerFormat."""
        return ChatResponse(
            id=self.response_id,
            created=self.created,
            model=self.model,
            usage=usage,
            prompt_logprobs=prompt_logprobs_body(choices[0], self.tokenizer) if self.plan.return_prompt_logprobs else UNSET,
            prompt_token_ids=choices[0].prompt_token_ids if self.plan.return_token_ids else UNSET,
            choices=[
                ChatChoice(
                    index=choice.index,
                    message=AssistantMessage(
                        content=choice.total.text or (None if choice.total.calls else ""),
                        tool_calls=[whole_call(call) for call in choice.total.calls] or UNSET,
                    ),
                    logprobs=self._logprobs(choice.total),
                    finish_reason=choice.total.finish_reason,
                    stop_reason=choice.total.stop_reason,
                    token_ids=choice.total.token_ids if self.plan.return_token_ids else UNSET,
                )
                for choice in choices
            ],
        )

    def chunk(self, choice: RunningChoice, delta: ChoiceDelta, usage: Usage | UnsetType | None) -> ChatChunk:
        """See AnswerFormat."""
        body = ChatChunkChoice(
            index=choice.index,
            delta=AssistantDelta(
                role="assistant" if delta.is_first else UNSET,
                content=delta.text if delta.text or (delta.is_first and not delta.calls) else UNSET,
                tool_calls=[call_delta(call) for call in delta.calls] or UNSET,
            ),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self.plan.return_token_ids else UNSET,
        )
        return self._chunk([body], usage, choice.prompt_token_ids if self.plan.return_token_ids and delta.is_first else UNSET)

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """See AnswerFormat."""
        return self._chunk([], usage, UNSET)

    def _chunk(
        self, choices: list[ChatChunkChoice], usage: Usage | UnsetType | None, prompt_token_ids: list[int] | UnsetType
    ) -> ChatChunk:
        return ChatChunk(
            id=self.response_id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _logprobs(self, delta: ChoiceDelta) -> ChatLogprobs | None:
        if self.plan.sampling.logprobs is None:
            return None
        content = []
        for entry in delta.logprobs:
            text, raw = self._spell(entry.token_id)
            top = [TopLogprob(*self._with_logprob(top_id, value)) for top_id, value in entry.top]
            content.append(ChatTokenLogprob(text, finite_logprob(entry.logprob), raw, top))
        return ChatLogprobs(content)

    def _with_logprob(self, token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        text, raw = self._spell(token_id)
        return text, finite_logprob(logprob), raw

    def _spell(self, token_id: int) -> tuple[str, list[int]]:
        text = token_text(token_id, self.tokenizer)
        raw = self.tokenizer.token_bytes(token_id)
        return text, list(text.encode() if raw is None else raw)


def prompt_logprobs_body(choice: RunningChoice, tokenizer: Tokenizer) -> PromptLogprobs | None:
    """One entry per prompt token, the first None; each by token id: the token itself and the best alternatives."""
    if choice.prompt_logprobs is None:
        return None
    body: PromptLogprobs = [None]
    for entry in choice.prompt_logprobs:
        alternatives = {
            str(entry.token_id): PromptLogprob(finite_logprob(entry.logprob), entry.rank, token_text(entry.token_id, tokenizer))
        }
        for rank, (token_id, logprob) in enumerate(entry.top, 1):
            alternatives.setdefault(str(token_id), PromptLogprob(finite_logprob(logprob), rank, token_text(token_id, tokenizer)))
        body.append(alternatives)
    return body


def whole_call(call: CallPiece) -> ToolCall:
    """A call of a whole answer."""
    return ToolCall(call.call_id or "", FunctionCall(call.name or "", call.arguments))


def call_delta(call: CallPiece) -> ToolCallDelta:
    """A piece of a call as a chunk has it."""
    if call.name is None or call.call_id is None:
        return ToolCallDelta(call.index, FunctionCall(arguments=call.arguments))
    return ToolCallDelta(call.index, FunctionCall(call.name, call.arguments), call.call_id, "function")


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text on its own; U+FFFD for a part of a character."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def finite_logprob(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
