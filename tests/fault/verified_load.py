"""Closed-loop streaming clients that know the right answers: every request ends as right, wrong, lost or refused.

Questions follow from a seed; their answers are asked of the undisturbed cluster first. chaos.py and soak.py run this.
"""

from __future__ import annotations

import json
import random
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


class Outcome(Enum):
    """How a request ended, as its client saw it."""

    RIGHT = "right"
    WRONG = "wrong"  # a token, its position, the text or the count differs from the undisturbed answer
    LOST = "lost"  # admitted, and then an error, a broken stream or nothing until the deadline
    REFUSED = "refused"  # turned away before it was admitted


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and what the undisturbed cluster answers; temperature above 0 keeps outputs from repeating themselves."""

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


class VerifiedLoad:
    """num_clients threads, each with one request at a time, from start() to stop(). `records` holds them in order of sending."""

    def __init__(
        self, url: str, model_name: str, *, num_clients: int, seed: int, num_questions: int, deadline_s: float = 120.0
    ) -> None:
        """deadline_s: without any news for so long, or after three times as long in all, a request counts as lost."""
        self.records: list[RequestRecord] = []
        self._questions: list[Question] = []
        self._model_name = model_name
        self._num_clients = num_clients
        self._num_questions = num_questions
        self._seed = seed
        self._deadline_s = deadline_s
        self._mutex = threading.Lock()  # of records' order and ids
        self._is_stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(deadline_s, connect=10.0),
            trust_env=False,
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=0
            ),  # an idle one may be closed just when it is used
        )

    def ask_answers(self) -> None:
        """Learn the right answers from the cluster, which nobody disturbs now, under a salt of their own. Raises on any error."""
        answer = self._http.post("/tokenize", json={"model": self._model_name, "prompt": VOCABULARY_TEXT})
        answer.raise_for_status()
        vocabulary = sorted(set(answer.json()["tokens"]))
        with ThreadPoolExecutor(MAX_ANSWERS_AT_ONCE) as threads:
            questions = make_questions(vocabulary, self._seed, self._num_questions)
            self._questions = list(threads.map(self._with_answer, questions))

    def start(self) -> None:
        """Begin. Each client's sequence of questions follows from the seed."""
        assert self._questions, "ask_answers comes first"
        self._threads = [
            threading.Thread(target=self._ask_until_stopped, args=(random.Random(f"{self._seed}/{place}"),), daemon=True)
            for place in range(self._num_clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No new requests; wait for those that run. What has not ended by its deadline is lost."""
        self._is_stopping.set()
        give_up_s = time.monotonic() + 3 * self._deadline_s
        for thread in self._threads:
            thread.join(max(0.0, give_up_s - time.monotonic()))
        for record in self.records:
            if record.outcome is None:
                record.outcome, record.detail = Outcome.LOST, "never ended"
        self._http.close()

    def in_flight(self) -> list[RequestRecord]:
        """Requests that have not ended."""
        return [record for record in list(self.records) if record.outcome is None]

    def counts(self) -> Counter[Outcome]:
        """Ended requests by outcome."""
        return Counter(record.outcome for record in list(self.records) if record.outcome is not None)

    # -- inside --------------------------------------------------------------------------------------------------------
    def _with_answer(self, question: Question) -> Question:
        response = self._http.post("/v1/completions", json=question.body(self._model_name, "undisturbed"), timeout=600.0)
        response.raise_for_status()
        choice = response.json()["choices"][0]
        assert len(choice["token_ids"]) == question.num_output_tokens, "the undisturbed answer is complete"
        return replace(question, answer_token_ids=choice["token_ids"], answer_text=choice["text"])

    def _ask_until_stopped(self, rng: random.Random) -> None:
        while not self._is_stopping.is_set():
            question = rng.choice(self._questions)
            with self._mutex:
                number = len(self.records)
                record = RequestRecord(f"load-{self._seed}-{number}", question, time.monotonic())
                self.records.append(record)
            # One salt for as many requests as there are questions: most prompts are new under it, some are hits.
            salt = f"round-{number // self._num_questions}"
            try:
                record.outcome, record.detail = self._ask(record, salt)
            except httpx.HTTPError as error:
                record.outcome, record.detail = Outcome.LOST, f"{type(error).__name__}: {error}"
            except (ValueError, KeyError, IndexError, TypeError) as error:
                record.outcome, record.detail = Outcome.WRONG, f"malformed: {type(error).__name__}: {error}"
            record.ended_at_s = time.monotonic()
            if record.outcome is Outcome.REFUSED:
                self._is_stopping.wait(REFUSAL_PAUSE_S)

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
        give_up_s = record.sent_at_s + 3 * self._deadline_s
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
