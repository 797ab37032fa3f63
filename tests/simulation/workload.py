"""The clients of a simulated cluster: what they ask, when, and what they must be told. Everything drawn from the run's seed."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from core.sampling_params import SamplingParams
from router.flow_actions import Deliver, Fail, RequestSpec
from router.policy import Siblings
from router.router_core import RouterCore
from tests.simulation.sim_node import MAX_MODEL_LEN
from tests.simulation.world import World
from tests.support.fake_runner import oracle_tokens

MAX_REQUESTS = 24
RESUBMIT_S = 0.3
# Not among them: deadline. Whatever happened, what is left of the run without faults is enough.
ALLOWED_FAILURES = ("no_decode_node", "too_many_attempts", "too_many_node_deaths")


@dataclass
class SimRequest:
    """A client's request, what it has received so far, and how it ended. is_poison: a node that computes it dies."""

    spec: RequestSpec
    expected: list[int]
    arrival_s: float
    cancelled_s: float | None = None  # when its client goes away
    is_poison: bool = False
    adapter_name: str = ""  # what it means is found out when the request is submitted
    is_cancelled: bool = False
    num_submissions: int = 0
    is_in_flight: bool = False
    received: list[int] = field(default_factory=list)
    end: Deliver | Fail | None = None
    longest_wait_s: float = 0.0
    last_news_s: float = 0.0

    @property
    def name(self) -> str:
        """Of the present submission: a new one has another id, as for any router."""
        return self.spec.request_id


def draw_requests(rng: random.Random, arrivals_end_s: float) -> list[SimRequest]:
    """A workload: some share prefixes, one of which makes siblings of them; some have a salt, one in a few runs is poison."""
    prefixes = [[rng.randrange(1, 1000) for _ in range(rng.randrange(4, 25))] for _ in range(3)]
    siblings = Siblings()
    requests = []
    poison_index = rng.randrange(4) if rng.random() < 0.15 else -1
    for index in range(rng.randrange(4, MAX_REQUESTS)):
        prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + [
            rng.randrange(1, 1000) for _ in range(rng.randrange(1, 20))
        ]
        max_tokens = rng.randrange(1, min(rng.choice((8, 60)), MAX_MODEL_LEN - len(prompt)))
        spec = RequestSpec(
            request_id=f"r{index}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1),
            priority=rng.randrange(3),
            cache_salt=rng.choice(("", "", "salt")),
            siblings=siblings if prompt[: len(prefixes[0])] == prefixes[0] else None,
        )
        expected = oracle_tokens(prompt, max_tokens)
        arrival_s = rng.random() * arrivals_end_s
        cancelled_s = arrival_s + rng.random() if rng.random() < 0.1 else None
        requests.append(SimRequest(spec, expected, arrival_s, cancelled_s, is_poison=index == poison_index))
    return requests


class Clients:
    """Submit the requests, check every piece of news at once, and submit again what a dead router took with it.

    router: the present one, or None while there is none.
    """

    def __init__(self, world: World, requests: list[SimRequest], router: Callable[[], RouterCore | None]) -> None:
        self.world = world
        self.requests = requests
        self.broken_promises: list[str] = []
        self.num_disturbances = 0  # faults so far: any of them may have made a request start over
        self._router = router
        for request in requests:
            world.after(request.arrival_s, lambda request=request: self._submit(request))  # type: ignore[misc]
            if request.cancelled_s is not None:
                world.after(request.cancelled_s, lambda request=request: self._cancel(request))  # type: ignore[misc]

    def router_died(self) -> None:
        """All connections broke. Each client asks anew, as if for the first time, once there is a router again."""
        for request in self.requests:
            if request.is_in_flight:
                request.is_in_flight = False
                request.received.clear()
                self.world.after(RESUBMIT_S, lambda request=request: self._submit(request))  # type: ignore[misc]

    @property
    def are_answered(self) -> bool:
        """Whether nobody waits any more."""
        return all(request.end is not None or request.is_cancelled for request in self.requests)

    def check_ends(self) -> None:
        """Every request was answered, rightly or with an honest error. Raises AssertionError."""
        assert not self.broken_promises, "; ".join(self.broken_promises)
        for request in self.requests:
            if request.is_cancelled:
                continue
            assert request.end is not None, f"{request.name} was never answered"
            if isinstance(request.end, Fail):
                kind, message = request.end.kind, request.end.message
                assert kind in ALLOWED_FAILURES, f"{request.name} failed with {kind}: {message}"
            else:
                assert not request.is_poison, f"{request.name} is poison and was answered"
                assert request.received == request.expected, f"{request.name} got {request.received}, right is {request.expected}"

    def _submit(self, request: SimRequest) -> None:
        router = self._router()
        if request.is_cancelled:
            return
        if router is None:
            self.world.after(RESUBMIT_S, lambda: self._submit(request))
            return
        if request.num_submissions:
            name = f"{request.name.partition('~')[0]}~{request.num_submissions}"
            request.spec = dataclasses.replace(request.spec, request_id=name)
        if request.adapter_name:
            adapter = router.adapters.find(request.adapter_name)
            assert adapter is not None
            spec = request.spec = dataclasses.replace(request.spec, adapter=adapter)
            request.expected = oracle_tokens(spec.prompt_token_ids, spec.sampling.max_tokens, adapter.fingerprint.hex())
        request.num_submissions += 1
        request.is_in_flight = True
        request.last_news_s = self.world.now_s()
        self.world.log(f"{request.name} arrives: {len(request.spec.prompt_token_ids)} tokens")
        router.submit(request.spec, lambda news: self._check_news(request, news))

    def _cancel(self, request: SimRequest) -> None:
        if request.end is None:
            request.is_cancelled, request.is_in_flight = True, False
            if (router := self._router()) is not None:
                router.cancel(request.name, "abort")

    def _check_news(self, request: SimRequest, news: Deliver | Fail) -> None:
        """The router would turn a broken promise into an error for the client; it is kept for us."""
        try:
            self._receive(request, news)
        except AssertionError as error:
            self.broken_promises.append(str(error))
            self.world.log(f"BROKEN: {error}")
            self.world.is_stopped = True

    def _receive(self, request: SimRequest, news: Deliver | Fail) -> None:
        name = request.name
        assert request.end is None, f"{name} got news after its end"
        assert not request.is_cancelled, f"{name} got news after it was cancelled"
        now_s = self.world.now_s()
        request.longest_wait_s = max(request.longest_wait_s, now_s - request.last_news_s)
        request.last_news_s = now_s
        if isinstance(news, Fail):
            request.end, request.is_in_flight = news, False
            self.world.log(f"{name} fails: {news.message}")
            return
        assert news.first_index == len(request.received), f"{name}: token {news.first_index} after {len(request.received)}"
        request.received += news.token_ids
        right = request.expected[: len(request.received)]
        assert request.received == right, f"{name} got wrong tokens: {request.received}, right is {right}"
        assert news.num_cached_tokens <= self._max_cached_tokens(request), f"{name} hit {news.num_cached_tokens} foreign tokens"
        if news.finish_reason:
            request.end, request.is_in_flight = news, False
            self.world.log(f"{name} ends: {news.finish_reason}")

    def _max_cached_tokens(self, request: SimRequest) -> int:
        """The most that an honest prefix cache can have: what others with the same salt and adapter share with it."""
        known = request.spec.prompt_token_ids + request.expected
        most = 0
        for other in self.requests:
            has_same_keys = (other.spec.cache_salt, other.spec.adapter) == (request.spec.cache_salt, request.spec.adapter)
            if has_same_keys and other.arrival_s <= self.world.now_s():
                theirs = other.spec.prompt_token_ids + other.expected
                if other is request:  # its own blocks, saved by an attempt that was lost
                    most = max(most, len(theirs) if self.num_disturbances else 0)
                else:
                    pairs = zip(known, theirs, strict=False)
                    most = max(most, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(theirs))))
        return most
