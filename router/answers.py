"""From deliveries to choices: text, tokens, logprobs and usage of each, summed up as they arrive.

No I/O: generation.py feeds choices, answer_formats.py writes what they hold as OpenAI's bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.sampling_params import SamplingParams
from core.step import TokenLogprob
from router.detokenizer import Detokenizer
from router.flow_actions import Deliver
from router.openai_responses import PromptTokensDetails, Usage
from router.request_validation import GenerationPlan
from router.tokenizer import Tokenizer
from router.tool_calls import CallPiece, ToolCallReader


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. text None: the client sent token ids."""

    token_ids: list[int]
    text: str | None


@dataclass(slots=True)
class ChoiceDelta:
    """What one delivery adds to a choice. stop_reason: the stop string or stop token id that ended it."""

    text: str = ""
    calls: list[CallPiece] = field(default_factory=list)  # to tools: what is in them is not in text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_first: bool = False

    @property
    def is_empty(self) -> bool:
        """True when a stream has nothing to send for it: all its text is held back."""
        return not (self.text or self.calls or self.logprobs or self.finish_reason)


class RunningChoice:
    """One choice while it is generated: takes deliveries in order and sums them up."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        plan: GenerationPlan,
        tokenizer: Tokenizer,
    ) -> None:
        """request_id: of its flow."""
        self.index = index
        self.request_id = request_id
        self.prompt_token_ids = prompt.token_ids
        self.total = ChoiceDelta()
        self.prompt_logprobs: tuple[TokenLogprob, ...] | None = None
        self.num_cached_tokens = 0
        self._plan = plan
        self._sampling = sampling
        self._has_begun = False
        self._text_offset = 0
        self._tokenizer = tokenizer
        self._prompt_text = prompt.text
        self._reader = ToolCallReader(plan.tool_use) if plan.tool_use is not None else None
        has_special_marker = plan.tool_use is not None and tokenizer.is_special(plan.tool_use.layout.marker)
        self._detokenizer = Detokenizer(
            tokenizer,
            prompt.token_ids,
            stop=sampling.stop,
            include_stop=plan.include_stop,
            min_tokens=sampling.min_tokens,
            skip_special_tokens=plan.skip_special_tokens and not has_special_marker,
        )

    @property
    def is_finished(self) -> bool:
        """True once a delta had a finish_reason."""
        return self.total.finish_reason is not None

    @property
    def mean_logprob(self) -> float:
        """Per output token, by which the OpenAI API says what is best; needs logprobs."""
        logprobs = self.total.logprobs
        return sum(entry.logprob for entry in logprobs) / max(1, len(logprobs))

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
        self.total.token_ids += delta.token_ids
        self.total.logprobs += delta.logprobs
        self.total.finish_reason, self.total.stop_reason = delta.finish_reason, delta.stop_reason
        if self._reader is None:
            self.total.text += delta.text
        else:
            self._read_calls(self._reader, delta)
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

    def _read_calls(self, reader: ToolCallReader, delta: ChoiceDelta) -> None:
        """Take calls out of a delta's text. What a stream has begun to tell stands; the total knows how it ended."""
        delta.text, delta.calls = reader.push(delta.text, is_last=delta.finish_reason is not None)
        if delta.finish_reason is None:
            return
        self.total.text, self.total.calls = reader.whole()
        assert self._plan.tool_use is not None
        if delta.finish_reason == "stop" and not self._plan.tool_use.is_named:  # whoever forces a function expects "stop"
            delta.finish_reason = "tool_calls" if reader.has_calls else "stop"
            self.total.finish_reason = "tool_calls" if self.total.calls else "stop"

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
    return make_usage(
        sum(len(choice.prompt_token_ids) for choice in firsts),
        sum(len(choice.total.token_ids) for choice in choices),
        sum(choice.num_cached_tokens for choice in firsts),
    )


def make_usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int) -> Usage:
    """Usage of a request: each prompt counts once."""
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_output_tokens,
        total_tokens=num_prompt_tokens + num_output_tokens,
        prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
    )
