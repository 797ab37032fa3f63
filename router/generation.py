"""One HTTP request's sequences: its flows are submitted together, and what they deliver is summed up choice by choice.

http_generation.py makes an answer or a stream of it. Everything runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from core.errors import RequestFailedError
from router.answers import ChoiceDelta, Prompt, RunningChoice, sum_usage
from router.flow_actions import Deliver, Fail, RequestSpec
from router.openai_responses import Usage
from router.policy import Siblings
from router.request_validation import GenerationPlan, ModelLimits, check_prompt_token_ids
from router.router_core import RouterCore
from router.tokenizer import Tokenizer


class GenerationFailedError(RequestFailedError):
    """A flow ended in Fail; carries what the HTTP answer needs."""

    def __init__(self, request_id: str, fail: Fail) -> None:
        super().__init__(request_id, fail.kind, fail.message)
        self.http_status = fail.http_status
        self.retry_after_s = fail.retry_after_s


class ClientGoneError(RequestFailedError):
    """The client closed its connection."""


class Generation(Protocol):
    """The sequences of one HTTP request. The constructor raises what is wrong with it; nothing runs before submit()."""

    plan: GenerationPlan

    def submit(self) -> None:
        """Start all flows."""
        ...

    def client_is_gone(self) -> None:
        """Make `deltas` raise ClientGoneError once it has handed out what is there."""
        ...

    def cancel(self) -> None:
        """End what has not ended. Safe to repeat."""
        ...

    def deltas(self) -> AsyncIterator[tuple[RunningChoice, ChoiceDelta]]:
        """What the choices grow by, until all are finished. Raises GenerationFailedError or ClientGoneError."""
        ...

    @property
    def has_ready_delta(self) -> bool:
        """True when `deltas` has something more to hand out at once."""
        ...

    def answered_choices(self) -> list[RunningChoice]:
        """The choices of the answer, in order, once all are finished."""
        ...

    def usage(self) -> Usage:
        """Tokens so far."""
        ...


class SampledGeneration:
    """Choices that are sampled independently. Deliveries wait in one queue, bounded by choices x max_tokens."""

    def __init__(
        self,
        core: RouterCore,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        plan: GenerationPlan,
        prompts: Sequence[Prompt],
        client_request_id: str,
    ) -> None:
        """Raises InvalidInputError when the prompts do not fit, OverloadedError when there is no room."""
        self.plan = plan
        self._choices: list[RunningChoice] = []
        self._core = core
        self._queue: asyncio.Queue[tuple[RunningChoice, Deliver | Fail] | None] = asyncio.Queue()
        self._specs: list[RequestSpec] = []
        for prompt in prompts:
            check_prompt_token_ids(prompt.token_ids, limits.vocab_size)
            siblings = Siblings() if plan.num_candidates > 1 else None
            for place in range(plan.num_candidates):
                sampling = plan.sampling_for(len(prompt.token_ids), place, limits)
                request_id = core.new_request_id()
                self._specs.append(
                    RequestSpec(
                        request_id=request_id,
                        prompt_token_ids=prompt.token_ids,
                        sampling=sampling,
                        priority=plan.priority,
                        cache_salt=plan.cache_salt,
                        adapter=plan.adapter,
                        siblings=siblings,
                        session_key=plan.session_key,
                        client_request_id=client_request_id,
                    )
                )
                self._choices.append(RunningChoice(len(self._choices), request_id, prompt, sampling, plan, tokenizer))
        core.check_room(len(self._choices))

    def submit(self) -> None:
        """See Generation."""
        for spec, choice in zip(self._specs, self._choices, strict=True):
            self._core.submit(spec, self._sink(choice))

    def client_is_gone(self) -> None:
        """See Generation."""
        self._queue.put_nowait(None)

    def cancel(self) -> None:
        """See Generation."""
        for choice in self._choices:
            self._core.cancel(choice.request_id, "abort")

    async def deltas(self) -> AsyncIterator[tuple[RunningChoice, ChoiceDelta]]:
        """See Generation."""
        num_unfinished = len(self._choices)
        while num_unfinished:
            item = await self._queue.get()
            if item is None:
                raise ClientGoneError(self._specs[0].request_id, "client_gone", "the client closed its connection")
            choice, event = item
            if choice.is_finished:  # tokens that were under way when a stop string was found
                yield choice, ChoiceDelta()  # so that who waits for what has_ready_delta promised does not wait on
                continue
            if isinstance(event, Fail):
                raise GenerationFailedError(choice.request_id, event)
            delta = choice.take(event)
            if delta.finish_reason is not None:
                num_unfinished -= 1
                self._core.cancel(choice.request_id, delta.finish_reason)  # it still runs when a stop string ended it
            yield choice, delta

    @property
    def has_ready_delta(self) -> bool:
        """See Generation."""
        return not self._queue.empty()

    def answered_choices(self) -> list[RunningChoice]:
        """See Generation: all, or the best num_choices of each prompt's candidates, the likeliest per token first."""
        num_choices, num_candidates = self.plan.num_choices, self.plan.num_candidates
        if num_choices == num_candidates:
            return self._choices
        answered: list[RunningChoice] = []
        for start in range(0, len(self._choices), num_candidates):
            candidates = self._choices[start : start + num_candidates]
            answered += sorted(candidates, key=lambda choice: choice.mean_logprob, reverse=True)[:num_choices]
        for index, choice in enumerate(answered):
            choice.index = index
        return answered

    def usage(self) -> Usage:
        """See Generation: candidates that are not answered were generated all the same."""
        return sum_usage(self._choices, self.plan.num_candidates)

    def _sink(self, choice: RunningChoice) -> Callable[[Deliver | Fail], None]:
        return lambda event: self._queue.put_nowait((choice, event))
