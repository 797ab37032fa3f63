"""Pieces of a stream: events that are there together go together, and none waits for what has not come."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from router.answer_formats import CompletionAnswers
from router.answers import Prompt
from router.flow_actions import Deliver, Fail, RequestSpec
from router.generation import SampledGeneration
from router.http_generation import MAX_EVENTS_TOGETHER, stream_events
from router.openai_protocol import CompletionRequest, decode_body
from router.request_validation import ModelLimits, plan_completion
from router.tokenizer import Tokenizer

LIMITS = ModelLimits(served_names=("tiny",), max_model_len=256, vocab_size=420, max_choices=8)
LETTERS = range(70, 90)  # tokens of the tiny tokenizer that are one character each


class SinkCore:
    """Stands for RouterCore: keeps sinks, so that a test delivers when it likes."""

    def __init__(self) -> None:
        self.sinks: list[Callable[[Deliver | Fail], None]] = []
        self._ids = itertools.count()

    def new_request_id(self) -> str:
        return f"r{next(self._ids)}"

    def check_room(self, num_requests: int) -> None:
        pass

    def submit(self, spec: RequestSpec, sink: Callable[[Deliver | Fail], None]) -> None:
        self.sinks.append(sink)

    def cancel(self, request_id: str, outcome: str) -> None:
        pass


class Stream:
    """One streamed completion whose deliveries the test makes."""

    def __init__(self, tokenizer: Tokenizer, **fields: Any) -> None:
        body = {"prompt": [5, 6], "max_tokens": 200, "stream": True, **fields}
        plan = plan_completion(decode_body(json.dumps(body).encode(), CompletionRequest), LIMITS)
        self.core = SinkCore()
        self.generation = SampledGeneration(self.core, tokenizer, LIMITS, plan, [Prompt([5, 6], None)], "")  # type: ignore[arg-type]
        self.generation.submit()
        self._answers = CompletionAnswers("cmpl-1", 0, "tiny", plan, tokenizer)
        self.positions = [0] * len(self.core.sinks)

    def deliver(self, token_id: int, choice: int = 0, finish_reason: str = "") -> None:
        self.core.sinks[choice](Deliver(self.positions[choice], (token_id,), finish_reason=finish_reason))
        self.positions[choice] += 1

    async def pieces(self) -> AsyncIterator[bytes]:
        deltas = self.generation.deltas()
        return stream_events(self.generation, deltas, await anext(deltas), self._answers)


def test_stream_events_that_are_there_together_are_one_piece(tokenizer: Tokenizer) -> None:
    async def scenario() -> list[bytes]:
        stream = Stream(tokenizer)
        for token_id in LETTERS:
            stream.deliver(token_id)
        stream.deliver(LETTERS[0], finish_reason="length")
        return [piece async for piece in await stream.pieces()]

    pieces = asyncio.run(scenario())
    events = [json.loads(line[6:]) for line in b"".join(pieces).split(b"\n\n")[:-2]]
    assert len(events) == len(LETTERS) + 1
    assert "".join(event["choices"][0]["text"] for event in events) == tokenizer.decode(
        [*LETTERS, LETTERS[0]], skip_special_tokens=True
    )
    assert [piece.count(b"data: ") for piece in pieces] == [len(LETTERS) + 1, 1]
    assert pieces[-1] == b"data: [DONE]\n\n"


def test_stream_events_of_a_long_backlog_come_in_bounded_pieces(tokenizer: Tokenizer) -> None:
    async def scenario() -> list[bytes]:
        stream = Stream(tokenizer)
        for place in range(150):
            stream.deliver(LETTERS[place % len(LETTERS)], finish_reason="length" if place == 149 else "")
        return [piece async for piece in await stream.pieces()]

    assert [piece.count(b"data: ") for piece in asyncio.run(scenario())] == [MAX_EVENTS_TOGETHER, MAX_EVENTS_TOGETHER, 22, 1]


def test_stream_events_one_that_is_alone_does_not_wait(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        stream = Stream(tokenizer)
        stream.deliver(LETTERS[0])
        pieces = await stream.pieces()
        assert (await anext(pieces)).count(b"data: ") == 1
        stream.deliver(LETTERS[1])
        assert (await anext(pieces)).count(b"data: ") == 1

    asyncio.run(scenario())


def test_stream_events_tokens_behind_a_stop_string_hold_up_no_other_choice(tokenizer: Tokenizer) -> None:
    async def scenario() -> None:
        stop = tokenizer.decode([LETTERS[1]], skip_special_tokens=True)
        stream = Stream(tokenizer, n=2, stop=[stop])
        stream.deliver(LETTERS[0], choice=1)
        stream.deliver(LETTERS[1], choice=0)  # ends choice 0
        stream.deliver(LETTERS[2], choice=0)  # was under way
        pieces = await stream.pieces()
        async with asyncio.timeout(60):
            piece = await anext(pieces)
        assert piece.count(b"data: ") == 2
        assert stream.generation.has_ready_delta is False

    asyncio.run(scenario())


def test_stream_events_failure_follows_what_came_before_it(tokenizer: Tokenizer) -> None:
    async def scenario() -> list[bytes]:
        stream = Stream(tokenizer)
        stream.deliver(LETTERS[0])
        stream.core.sinks[0](Fail("deadline", "too late", 504))
        return [piece async for piece in await stream.pieces()]

    (piece,) = asyncio.run(scenario())
    first, error = piece.split(b"\n\n")[:2]
    assert json.loads(first[6:])["choices"][0]["text"] == tokenizer.decode([LETTERS[0]], skip_special_tokens=True)
    assert json.loads(error[6:])["error"]["code"] == 504
