"""The two generation endpoints: prompts become a Generation, and what it yields becomes one answer or one stream.

Checks are in request_validation.py, bodies in answer_formats.py. Everything runs on the event loop, except that long texts
are tokenized in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from core.errors import InvalidInputError
from router.answer_formats import AnswerFormat, ChatAnswers, CompletionAnswers
from router.answers import ChoiceDelta, Prompt, RunningChoice
from router.api_keys import tenant_cache_salt
from router.beam_generation import BeamGeneration, BeamRoom
from router.chat_template import ChatTemplate
from router.chat_validation import (
    check_messages,
    check_template_kwargs,
    num_content_chars,
    template_messages,
)
from router.generation import ClientGoneError, Generation, GenerationFailedError, SampledGeneration
from router.grammar_check import GrammarCheck
from router.openai_protocol import ChatMessage, ChatRequest, CompletionRequest, ErrorBody, ErrorResponse, decode_body
from router.openai_responses import UNSET, UnsetType, Usage
from router.request_validation import (
    GenerationPlan,
    ModelLimits,
    check_model_name,
    plan_chat,
    plan_completion,
    split_prompts,
)
from router.router_core import RouterCore
from router.tokenizer import Tokenizer
from router.tool_call_parser import guess_format
from router.tool_calls import ToolSupport, check_tool_definitions

MAX_LONG_TEXTS = 2  # tokenized at a time: each takes a thread, and memory of many times its size
LONG_CHAT_MESSAGES = 64  # the same for rendering a chat template
LONG_TEXT_CHARS = 4096  # from here on tokenizing takes longer than a thread's hand-over
MAX_EVENTS_TOGETHER = 64  # in one piece of a stream
MAX_SESSION_KEY_CHARS = 1024  # of the header X-Session-Id; what follows makes no difference
HTTP_CLIENT_CLOSED = 499  # seen by nobody: the client is gone


class GenerationEndpoints:
    """Handlers of /v1/completions and /v1/chat/completions."""

    def __init__(
        self,
        core: RouterCore,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        limits: Callable[[], ModelLimits],
        tools: ToolSupport,
    ) -> None:
        """limits: asked anew for every request, since the nodes decide them."""
        self._core = core
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._limits = limits
        self._tools = tools
        self._beam_room = BeamRoom()
        self._long_texts = asyncio.Semaphore(MAX_LONG_TEXTS)
        self._grammar_check = GrammarCheck(tokenizer)

    async def completions(self, request: Request, body: bytes) -> Response:
        """POST /v1/completions."""
        self._core.check_room(1)
        parsed = decode_body(body, CompletionRequest)
        limits = self._limits()
        check_model_name(parsed.model, limits)
        plan = _of_client(plan_completion(parsed, limits), request)
        await self._grammar_check.check(plan.grammar)
        parts = split_prompts(parsed.prompt, limits)
        if len(parts) * plan.num_candidates > limits.max_choices:
            given = f"{len(parts)} prompts x {plan.num_candidates} choices"
            raise InvalidInputError("prompt", given, f"at most {limits.max_choices} choices")
        prompts = [await self._prompt(part, parsed.add_special_tokens is not False) for part in parts]
        plan = self._with_adapter(plan, parsed.model, limits)
        answers = CompletionAnswers(
            f"cmpl-{request.state.request_id}", int(time.time()), _model_name(plan, limits), plan, self._tokenizer
        )
        generation = self._generation(limits, plan, prompts, request.state.request_id)
        return await self._answer(request, generation, answers)

    async def chat_completions(self, request: Request, body: bytes) -> Response:
        """POST /v1/chat/completions."""
        self._core.check_room(1)
        parsed = decode_body(body, ChatRequest)
        limits = self._limits()
        check_model_name(parsed.model, limits)
        plan = _of_client(plan_chat(parsed, limits, self._tools), request)
        await self._grammar_check.check(plan.grammar)
        token_ids = await self.chat_token_ids(
            parsed.messages,
            add_generation_prompt=parsed.add_generation_prompt is not False,
            add_special_tokens=bool(parsed.add_special_tokens),
            extra=parsed.chat_template_kwargs,
            tools=plan.tool_use.definitions if plan.tool_use is not None else None,
        )
        plan = self._with_adapter(plan, parsed.model, limits)
        answers = ChatAnswers(
            f"chatcmpl-{request.state.request_id}", int(time.time()), _model_name(plan, limits), plan, self._tokenizer
        )
        generation = self._generation(limits, plan, [Prompt(token_ids, None)], request.state.request_id)
        return await self._answer(request, generation, answers)

    async def chat_token_ids(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        add_special_tokens: bool,
        extra: dict[str, object] | None,
        tools: list[dict[str, object]] | None = None,
    ) -> list[int]:
        """Messages through the template to token ids. The template writes special tokens itself. Raises InvalidInputError."""
        limits = self._limits()
        check_messages(messages, limits.max_model_len)
        check_template_kwargs(extra)
        if self._chat_template is None:
            raise InvalidInputError("messages", "a chat", "prompts at /v1/completions: this model has no chat template")
        num_chars = sum(num_content_chars(message) for message in messages)
        self._check_length(num_chars, "messages")
        if tools:
            num_chars += check_tool_definitions(tools)
            self._check_length(num_chars, "tools")
        render = functools.partial(
            self._chat_template.render,
            template_messages(messages),
            add_generation_prompt=add_generation_prompt,
            extra=extra,
            tools=tools,
        )
        if num_chars < LONG_TEXT_CHARS and len(messages) < LONG_CHAT_MESSAGES:
            text = render()
        else:
            async with self._long_texts:
                text = await asyncio.to_thread(render)
        return await self.encode(text, add_special_tokens, "messages")

    async def encode(self, text: str, add_special_tokens: bool, field: str = "prompt") -> list[int]:
        """Token ids; other requests go on while a long text is tokenized. Raises InvalidInputError for what cannot fit anyway."""
        self._check_length(len(text), field)
        if len(text) < LONG_TEXT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        async with self._long_texts:
            return await asyncio.to_thread(self._tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def _check_length(self, num_chars: int, field: str) -> None:
        """Before any work: tokenizing megabytes takes gigabytes of memory, and the answer is known."""
        max_model_len = self._limits().max_model_len
        max_chars = max_model_len * self._tokenizer.max_token_chars
        if num_chars > max_chars:
            allowed = f"at most {max_chars} characters, the most that the model's {max_model_len} tokens of context can hold"
            raise InvalidInputError(field, f"{num_chars} characters", allowed)

    async def _prompt(self, part: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(part, list):
            return Prompt(part, None)
        return Prompt(await self.encode(part, add_special_tokens), part)

    def _generation(self, limits: ModelLimits, plan: GenerationPlan, prompts: list[Prompt], client_request_id: str) -> Generation:
        if plan.beams is None:
            return SampledGeneration(self._core, self._tokenizer, limits, plan, prompts, client_request_id)
        return BeamGeneration(self._core, self._tokenizer, limits, plan, plan.beams, prompts, self._beam_room, client_request_id)

    def _with_adapter(self, plan: GenerationPlan, model: str | None, limits: ModelLimits) -> GenerationPlan:
        """The plan with what the model's name means now. Last before submitting: from then on the adapter is kept for it.

        Raises UnknownModelError when the name was an adapter's that has been unloaded since it was checked.
        """
        if model is None or model in limits.served_names:
            return plan
        check_model_name(model, self._limits())
        return replace(plan, adapter=self._core.adapters.find(model))

    async def _answer(self, request: Request, generation: Generation, answers: AnswerFormat) -> Response:
        watcher = asyncio.create_task(_watch_client(request, generation))
        is_handed_over = False
        try:
            generation.submit()
            deltas = generation.deltas()
            if not generation.plan.is_stream:
                async for _ in deltas:
                    pass
                return json_response(answers.whole(generation.answered_choices(), generation.usage()))
            # The status line waits for the first delivery, so that a request which fails before it gets a real error status.
            first = await anext(deltas)
            is_handed_over = True
            return EventStreamResponse(stream_events(generation, deltas, first, answers), generation, watcher)
        except ClientGoneError:
            return Response(status_code=HTTP_CLIENT_CLOSED)
        finally:
            if not is_handed_over:
                generation.cancel()
                watcher.cancel()


class EventStreamResponse(Response):
    """Server-sent events. However it ends, the flows are cancelled: nothing is generated for a client that left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation, watcher: asyncio.Task[None]) -> None:
        super().__init__(background=None)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy that buffers would turn a stream into one late answer
        self.background: BackgroundTask | None = None
        self._events = events
        self._generation = generation
        self._watcher = watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until they end or the client is gone."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._generation.cancel()
            self._watcher.cancel()


def tool_support(chat_template: ChatTemplate | None, parser_name: str) -> ToolSupport:
    """What tools can be used with this template. parser_name: the configured one, or ""."""
    if chat_template is None or not chat_template.has_tools:
        return ToolSupport()
    return ToolSupport(True, parser_name or guess_format(chat_template.source))


def _model_name(plan: GenerationPlan, limits: ModelLimits) -> str:
    """What the answer says whose it is."""
    return plan.adapter.name if plan.adapter is not None else limits.served_names[0]


def _of_client(plan: GenerationPlan, request: Request) -> GenerationPlan:
    """The plan with the salt that keeps this client's cached KV apart from the others', where they have API keys, and with the
    session that its header X-Session-Id names, if it does."""
    session_key = request.headers.get("x-session-id", "")[:MAX_SESSION_KEY_CHARS] or plan.session_key
    return replace(plan, cache_salt=tenant_cache_salt(request.state.tenant, plan.cache_salt), session_key=session_key)


async def stream_events(
    generation: Generation,
    deltas: AsyncIterator[tuple[RunningChoice, ChoiceDelta]],
    first: tuple[RunningChoice, ChoiceDelta],
    answers: AnswerFormat,
) -> AsyncIterator[bytes]:
    """Events; those that are there together are sent together, since sending is most of what an event costs."""
    plan = generation.plan
    usage: Usage | UnsetType | None = None if plan.include_usage else UNSET
    waiting: list[bytes] = []
    try:
        async for choice, delta in _chain(first, deltas):
            if not delta.is_empty or delta.is_first or (plan.return_token_ids and delta.token_ids):
                waiting.append(_event(answers.chunk(choice, delta, generation.usage() if plan.has_continuous_usage else usage)))
            if waiting and (len(waiting) >= MAX_EVENTS_TOGETHER or not generation.has_ready_delta):
                yield b"".join(waiting)
                waiting.clear()
        if plan.include_usage:
            waiting.append(_event(answers.usage_chunk(generation.usage())))
        waiting.append(b"data: [DONE]\n\n")
    except ClientGoneError:
        return
    except GenerationFailedError as error:
        waiting.append(_event(ErrorResponse(ErrorBody(str(error), error.kind, None, error.http_status))))
    yield b"".join(waiting)


async def _chain(
    first: tuple[RunningChoice, ChoiceDelta], rest: AsyncIterator[tuple[RunningChoice, ChoiceDelta]]
) -> AsyncIterator[tuple[RunningChoice, ChoiceDelta]]:
    yield first
    async for item in rest:
        yield item


def _event(body: msgspec.Struct) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def _watch_client(request: Request, generation: Generation) -> None:
    """The body has been read, so that the next message of the server is the disconnect."""
    with contextlib.suppress(RuntimeError):
        while (await request.receive())["type"] != "http.disconnect":
            pass
    generation.client_is_gone()


def json_response(body: msgspec.Struct | dict[str, object], status_code: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(body), status_code, media_type="application/json")
