"""Closed-loop streaming clients that know the right answers: every request ends as right, wrong, lost or refused.

Questions follow from a seed; their answers are asked of the undisturbed cluster first. chaos.py and soak.py run this.
"""

from __future__ import annotations

import itertools
import json
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import httpx

from bench.load_generator import VOCABULARY_TEXT

MIN_PROMPT_TOKENS, MAX_PROMPT_TOKENS = 16, 600
MIN_OUTPUT_TOKENS, MAX_OUTPUT_TOKENS = 16, 128
NUM_SHARED_PREFIXES = 4
MAX_ANSWERS_AT_ONCE = 16
REFUSAL_TYPES = ("overloaded_error", "unavailable_error")  # of errors that come before a request is admitted
REFUSAL_PAUSE_S = 0.5
POLL_INTERVAL_S = 0.02
HTTP_MARGIN_S = 10.0


class Outcome(Enum):
    """How a request ended, as its client saw it."""

    RIGHT = "right"
    WRONG = "wrong"  # a token, its position, the text or the count differs from the undisturbed answer
    LOST = "lost"  # admitted, and then an error, a broken stream or nothing until the deadline
    REFUSED = "refused"  # turned away before it was admitted


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what the undisturbed cluster answers. At temperature 0 a small model repeats itself, which hides gaps."""

    prompt_token_ids: list[int]
    num_output_tokens: int
    temperature: float
    seed: int
    answer_token_ids: list[int] = field(default_factory=list)
    answer_text: str = ""

    def body(self, model_name: str, salt: str) -> dict[str, Any]:
        """The request for POST /v1/completions, without stream."""
        return {
            "model": model_name,
            "prompt": self.prompt_token_ids,
            "max_tokens": self.num_output_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": salt,
        }


@dataclass(slots=True)
class RequestRecord:
    """What one client saw. Times are time.monotonic() seconds; token_times_s has one entry per token."""

    request_id: str
    question: Question
    sent_at_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_at_s: float = 0.0
    outcome: Outcome | None = None
    detail: str = ""

    @property
    def first_token_at_s(self) -> float | None:
        """None while there is none."""
        return self.token_times_s[0] if self.token_times_s else None

    def next_token_after_s(self, moment_s: float) -> float | None:
        """Arrival of the first token after a moment, None when none came."""
        return next((at_s for at_s in self.token_times_s if at_s > moment_s), None)


def make_questions(vocabulary: Sequence[int], seed: int, count: int) -> list[Question]:
    """Prompts of 16 to 600 tokens, short ones as often as long ones by ratio, two in five behind one of a few shared prefixes."""
    rng = random.Random(f"questions/{seed}")
    prefixes = [rng.choices(vocabulary, k=rng.randrange(32, MAX_PROMPT_TOKENS // 2)) for _ in range(NUM_SHARED_PREFIXES)]
    questions = []
    for index in range(count):
        num_tokens = round(MIN_PROMPT_TOKENS * (MAX_PROMPT_TOKENS / MIN_PROMPT_TOKENS) ** rng.random())
        prompt = rng.choices(vocabulary, k=num_tokens)
        if rng.random() < 0.4:
            prompt = (rng.choice(prefixes) + prompt)[:MAX_PROMPT_TOKENS]
        num_output = round(MIN_OUTPUT_TOKENS * (MAX_OUTPUT_TOKENS / MIN_OUTPUT_TOKENS) ** rng.random())
        questions.append(Question(prompt, num_output, rng.choice((0.0, 0.8, 1.0)), seed * 100_000 + index))
    return questions


class VerifiedClient:
    """Asks questions over HTTP and checks every token as it comes. Safe from several threads.

    deadline_s: without any news for so long, or after three times as long in all, a request counts as lost.
    """

    def __init__(self, url: str, model_name: str, deadline_s: float = 120.0) -> None:
        self.deadline_s = deadline_s
        self._model_name = model_name
        self._ids = (f"{secrets.token_hex(4)}-{count}" for count in itertools.count())
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(deadline_s, connect=10.0),
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),  # an idle one may be closed when it is used
        )

    def vocabulary(self) -> list[int]:
        """Token ids that are ordinary words of the model."""
        answer = self._http.post("/tokenize", json={"model": self._model_name, "prompt": VOCABULARY_TEXT})
        answer.raise_for_status()
        return sorted(set(answer.json()["tokens"]))

    def with_answers(self, questions: Sequence[Question]) -> list[Question]:
        """With what the cluster, which nobody disturbs now, answers under a salt of its own. Raises on any error."""
        with ThreadPoolExecutor(MAX_ANSWERS_AT_ONCE) as threads:
            return list(threads.map(self._with_answer, questions))

    def new_record(self, question: Question) -> RequestRecord:
        """A request that is about to be sent."""
        return RequestRecord(next(self._ids), question, time.monotonic())

    def ask(self, record: RequestRecord, salt: str) -> None:
        """Send it, and fill in the record until it has an outcome."""
        try:
            outcome, detail = self._ask(record, salt)
        except httpx.HTTPError as error:
            outcome, detail = Outcome.LOST, f"{type(error).__name__} after {len(record.token_times_s)} tokens: {error}"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            outcome, detail = Outcome.WRONG, f"malformed: {type(error).__name__}: {error}"
        record.ended_at_s = time.monotonic()
        record.detail = detail
        record.outcome = outcome  # last: others look at it to see whether the record is complete

    def start(self, question: Question, salt: str) -> RequestRecord:
        """ask() in a thread of its own; wait_for says how it went."""
        record = self.new_record(question)
        threading.Thread(target=self.ask, args=(record, salt), daemon=True).start()
        return record

    def wait_for(self, records: Sequence[RequestRecord]) -> list[Outcome]:
        """Until all have ended, or long after the last deadline; the outcomes in order. Those without are LOST."""
        give_up_s = time.monotonic() + 3 * self.deadline_s + HTTP_MARGIN_S
        while any(record.outcome is None for record in records) and time.monotonic() < give_up_s:
            time.sleep(POLL_INTERVAL_S)
        for record in records:
            if record.outcome is None:
                record.outcome, record.detail = Outcome.LOST, "never ended"
        return [record.outcome or Outcome.LOST for record in records]

    def close(self) -> None:
        """Close all connections."""
        self._http.close()

    # -- inside --------------------------------------------------------------------------------------------------------
    def _with_answer(self, question: Question) -> Question:
        response = self._http.post("/v1/completions", json=question.body(self._model_name, "undisturbed"), timeout=600.0)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        assert len(choice["token_ids"]) == question.num_output_tokens, "the undisturbed answer is complete"
        return replace(question, answer_token_ids=choice["token_ids"], answer_text=choice["text"])

    def _ask(self, record: RequestRecord, salt: str) -> tuple[Outcome, str]:
        body = record.question.body(self._model_name, salt) | {"stream": True, "stream_options": {"include_usage": True}}
        with self._http.stream("POST", "/v1/completions", json=body, headers={"x-request-id": record.request_id}) as response:
            if response.status_code != 200:
                error = json.loads(response.read())["error"]
                is_refusal = response.status_code in (429, 503) and error["type"] in REFUSAL_TYPES
                return Outcome.REFUSED if is_refusal else Outcome.LOST, f"{response.status_code}: {error['message']}"
            return self._read_stream(response, record)

    def _read_stream(self, response: httpx.Response, record: RequestRecord) -> tuple[Outcome, str]:
        wanted = record.question.answer_token_ids
        give_up_s = record.sent_at_s + 3 * self.deadline_s
        num_tokens, text, finish_reason, num_usage_tokens = 0, "", "", None
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            if (payload := line[5:].strip()) == "[DONE]":
                seen = (num_tokens, text, finish_reason, num_usage_tokens)
                right = (len(wanted), record.question.answer_text, "length", len(wanted))
                return (Outcome.RIGHT, "") if seen == right else (Outcome.WRONG, f"ended with {seen}, not {right}")
            event = json.loads(payload)
            if "error" in event:
                return Outcome.LOST, f"after {num_tokens} tokens: {event['error']['message']}"
            now_s = time.monotonic()
            if now_s > give_up_s:
                return Outcome.LOST, f"only {num_tokens} tokens in {now_s - record.sent_at_s:.0f} s"
            if event.get("usage"):
                num_usage_tokens = event["usage"]["completion_tokens"]
            for choice in event["choices"]:
                for token_id in choice.get("token_ids") or ():
                    if num_tokens >= len(wanted) or token_id != wanted[num_tokens]:
                        right = wanted[num_tokens : num_tokens + 1]
                        return Outcome.WRONG, f"token {num_tokens} is {token_id}, not {right}"
                    num_tokens += 1
                    record.token_times_s.append(now_s)
                text += choice.get("text") or ""
                finish_reason = choice.get("finish_reason") or finish_reason
        return Outcome.LOST, f"the stream ended after {num_tokens} tokens without [DONE]"


class VerifiedLoad:
    """num_clients threads, each with one request at a time, from start() to stop(). `records` holds them in order of sending."""

    def __init__(self, client: VerifiedClient, questions: Sequence[Question], *, num_clients: int, seed: int) -> None:
        """questions: with answers. Which client asks which of them in which order follows from the seed."""
        self.records: list[RequestRecord] = []
        self._client = client
        self._questions = questions
        self._mutex = threading.Lock()  # of records' order
        self._is_stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_until_stopped, args=(random.Random(f"{seed}/{place}"),), daemon=True)
            for place in range(num_clients)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No new requests; wait for those that run. What has not ended long after its deadline is lost."""
        self._is_stopping.set()
        self._client.wait_for(self.records)

    def counts(self) -> Counter[Outcome]:
        """Ended requests by outcome."""
        return Counter(record.outcome for record in list(self.records) if record.outcome is not None)

    def _ask_until_stopped(self, rng: random.Random) -> None:
        while True:
            question = rng.choice(self._questions)
            with self._mutex:
                if self._is_stopping.is_set():
                    return
                number = len(self.records)
                record = self._client.new_record(question)
                self.records.append(record)
            # One salt for as many requests as there are questions: most prompts are new under it, some are hits.
            self._client.ask(record, f"round-{number // len(self._questions)}")
            if record.outcome is Outcome.REFUSED:
                self._is_stopping.wait(REFUSAL_PAUSE_S)
