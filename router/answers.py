"""From deliveries to OpenAI's response bodies: text, logprobs and usage of each choice, whole or chunk by chunk.

No I/O: http_generation.py feeds choices and sends what the two answer formats build.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from core.sampling_params import SamplingParams
from core.step import TokenLogprob
from router.detokenizer import Detokenizer
from router.flow_actions import Deliver
from router.openai_protocol import (
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
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    TopLogprob,
    UnsetType,
    Usage,
)
from router.request_validation import GenerationPlan
from router.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no -Infinity


@dataclass(slots=True)
class ChoiceDelta:
    """What one delivery adds to a choice. stop_reason: the stop string or stop token id that ended it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_first: bool = False

    @property
    def is_empty(self) -> bool:
        """True when a stream has nothing to send for it: all its text is held back."""
        return not (self.text or self.logprobs or self.finish_reason)


class RunningChoice:
    """One choice while it is generated: takes deliveries in order and sums them up."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt_token_ids: list[int],
        prompt_text: str | None,
        sampling: SamplingParams,
        plan: GenerationPlan,
        tokenizer: Tokenizer,
    ) -> None:
        """request_id: of its flow. prompt_text: as the client wrote it; None when it sent token ids."""
        self.index = index
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self.total = ChoiceDelta()
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.num_cached_tokens = 0
        self._plan = plan
        self._sampling = sampling
        self._has_begun = False
        self._text_offset = 0
        self._tokenizer = tokenizer
        self._prompt_text = prompt_text
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt_token_ids,
            stop=sampling.stop,
            include_stop=plan.include_stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=plan.skip_special_tokens,
        )

    @property
    def is_finished(self) -> bool:
        """True once a delta had a finish_reason."""
        return self.total.finish_reason is not None

    def take(self, delivery: Deliver) -> ChoiceDelta:
        """The next delivery. A stop string may finish the choice although delivery.finish_reason is empty."""
        assert not self.is_finished, "nothing follows the end of a choice"
        if delivery.prompt_logprobs is not None:
            self.prompt_logprobs = delivery.prompt_logprobs
        self.num_cached_tokens = delivery.num_cached_tokens
        delta = ChoiceDelta(is_first=not self._has_begun)
        self._has_begun = True
        if self._plan.echo_only:
            delta.finish_reason = "length" if delivery.finish_reason else None
        else:
            self._take_tokens(delivery, delta)
        self.total.text += delta.text
        self.total.token_ids += delta.token_ids
        self.total.logprobs += delta.logprobs
        self.total.finish_reason, self.total.stop_reason = delta.finish_reason, delta.stop_reason
        return delta

    def echo_text(self) -> str:
        """The prompt as text, for an echo."""
        if self._prompt_text is not None:
            return self._prompt_text
        return self._tokenizer.decode(self.prompt_token_ids, skip_special_tokens=self._plan.skip_special_tokens)

    def next_text_offset(self, token_text: str) -> int:
        """Where a token's text begins, for completion logprobs; call once per token, in order."""
        offset = self._text_offset
        self._text_offset += len(token_text)
        return offset

    def _take_tokens(self, delivery: Deliver, delta: ChoiceDelta) -> None:
        token_ids = delivery.token_ids
        # The token that ended the request belongs to the output, but its text (</s>, a stop token's) only if asked for.
        is_stop_token = delivery.finish_reason == "stop" and not self._plan.include_stop
        pushed = self._detokenizer.push(token_ids[:-1] if is_stop_token else token_ids)
        text, num_tokens, stop_string = pushed.text, len(token_ids), pushed.stop_string
        if stop_string is not None:
            num_tokens = pushed.num_tokens
        elif delivery.finish_reason:
            rest = self._detokenizer.finish()
            text, stop_string = text + rest.text, rest.stop_string
        delta.text = text
        delta.token_ids = list(token_ids[:num_tokens])
        delta.logprobs = list((delivery.logprobs or ())[:num_tokens])
        if stop_string is not None:
            delta.finish_reason, delta.stop_reason = "stop", stop_string
        elif delivery.finish_reason:
            delta.finish_reason = delivery.finish_reason
            if delivery.stop_token_id in self._sampling.stop_token_ids:
                delta.stop_reason = delivery.stop_token_id


def sum_usage(choices: Sequence[RunningChoice], num_choices_per_prompt: int) -> Usage:
    """Usage of a request so far. Choices are in order: all of the first prompt, then all of the second."""
    firsts = choices[::num_choices_per_prompt]
    num_prompt_tokens = sum(len(choice.prompt_token_ids) for choice in firsts)
    num_output_tokens = sum(len(choice.total.token_ids) for choice in choices)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(sum(choice.num_cached_tokens for choice in firsts)),
    )


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
                    message=AssistantMessage(content=choice.total.text),
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
                content=delta.text if delta.text or delta.is_first else UNSET,
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


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text on its own; U+FFFD for a part of a character."""
    return tokenizer.decode([token_id], skip_special_tokens=False)


def finite_logprob(logprob: float) -> float:
    """A logprob that JSON can hold."""
    return max(logprob, MIN_LOGPROB) if math.isfinite(logprob) else MIN_LOGPROB
