"""Beam search over nodes that know nothing of it: at every step each beam is a request for one token, with itself as prompt.

KV is shared by content: a child's prompt is its parent's and one token more, so that a node that had the parent computes less
than a block. beam_search.py decides; everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

from core.sampling_params import SamplingParams
from core.step import TokenLogprob
from router.answers import ChoiceDelta, Prompt, RunningChoice, make_usage
from router.beam_search import Beam, BeamOptions, BeamSearch
from router.flow_actions import Deliver, Fail, RequestSpec
from router.generation import ClientGoneError, GenerationFailedError
from router.openai_responses import Usage
from router.policy import Siblings
from router.request_validation import GenerationPlan, ModelLimits, check_prompt_token_ids
from router.router_core import RouterCore
from router.tokenizer import Tokenizer


@dataclass(slots=True)
class BeamRoom:
    """Beams of all searches that run: between two steps they are no requests in flight, and still need room for the next."""

    num_beams: int = 0


@dataclass(slots=True)
class _Search:
    """One prompt's search and the step that is under way. children: request ids of the beams that are asked about, by place."""

    prompt: Prompt
    sampling: SamplingParams  # max_tokens: of the whole search
    beams: BeamSearch
    siblings: Siblings = field(default_factory=Siblings)
    children: dict[str, int] = field(default_factory=dict)
    entries: list[list[TokenLogprob]] = field(default_factory=list)  # by place: of the tokens that arrived
    num_unfinished: int = 0
    num_steps: int = 0
    num_cached_tokens: int = 0


class BeamGeneration:
    """A beam search for each prompt. See Generation; the only deltas are whole choices at the end.

    The first step's request is for two tokens: as any other it is handed from a prefill node to a decode node, which then has
    the prompt and gets all later steps. Its second token is the greedy beam's second step. A child that loses its node is sent
    to another one by its flow.
    """

    def __init__(
        self,
        core: RouterCore,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        plan: GenerationPlan,
        beams: BeamOptions,
        prompts: Sequence[Prompt],
        room: BeamRoom,
        client_request_id: str,
    ) -> None:
        """Raises InvalidInputError when the prompts do not fit, OverloadedError when there is no room."""
        self.plan = plan
        self._core = core
        self._tokenizer = tokenizer
        self._beams = beams
        self._room = room
        self._num_room = 0  # of ours in _room
        self._client_request_id = client_request_id
        self._queue: asyncio.Queue[tuple[_Search, str, Deliver | Fail] | None] = asyncio.Queue()
        self._searches: list[_Search] = []
        self._choices: list[RunningChoice] = []
        self._deadline_s = 0.0
        for prompt in prompts:
            check_prompt_token_ids(prompt.token_ids, limits.vocab_size)
            sampling = plan.sampling_for(len(prompt.token_ids), 0, limits)
            search = BeamSearch(beams, limits.eos_token_ids, sampling.max_tokens)
            self._searches.append(_Search(prompt, sampling, search))
        core.check_room(room.num_beams + len(prompts) * beams.width)

    def submit(self) -> None:
        """See Generation."""
        self._num_room = len(self._searches) * self._beams.width
        self._room.num_beams += self._num_room
        if self.plan.adapter is not None:
            self._core.adapters.use(self.plan.adapter)  # also between two steps, when no child has it
        self._deadline_s = asyncio.get_running_loop().time() + self._core.request_timeout_s
        for search in self._searches:
            self._start_step(search, {})

    def client_is_gone(self) -> None:
        """See Generation."""
        self._queue.put_nowait(None)

    def cancel(self) -> None:
        """See Generation."""
        if self._num_room and self.plan.adapter is not None:
            self._core.adapters.release(self.plan.adapter)
        self._room.num_beams -= self._num_room
        self._num_room = 0
        for search in self._searches:
            for request_id in search.children:
                self._core.cancel(request_id, "abort")

    async def deltas(self) -> AsyncIterator[tuple[RunningChoice, ChoiceDelta]]:
        """See Generation."""
        num_running = len(self._searches)
        while num_running:
            item = await self._queue.get()
            if item is None:
                raise ClientGoneError(self._client_request_id, "client_gone", "the client closed its connection")
            search, request_id, event = item
            if isinstance(event, Fail):
                raise GenerationFailedError(request_id, event)
            if self._take(search, search.children[request_id], event):
                self._go_on(search)
                num_running -= not search.beams.running
        for search in self._searches:
            for beam in search.beams.best()[: self.plan.num_choices]:
                yield self._finish(search, beam)

    @property
    def has_ready_delta(self) -> bool:
        """See Generation: a beam is told of as a whole."""
        return False

    def answered_choices(self) -> list[RunningChoice]:
        """See Generation."""
        return self._choices

    def usage(self) -> Usage:
        """See Generation: of the sequences that are answered, as in vLLM."""
        return make_usage(
            sum(len(search.prompt.token_ids) for search in self._searches),
            sum(len(choice.total.token_ids) for choice in self._choices),
            sum(search.num_cached_tokens for search in self._searches),
        )

    # -- steps ---------------------------------------------------------------------------------------------------------
    def _start_step(self, search: _Search, known: dict[tuple[int, ...], TokenLogprob]) -> None:
        """Ask for the next token of all beams at once. known: by beam, what needs no asking."""
        num_tokens = 2 if search.num_steps == 0 and search.sampling.max_tokens > 1 else 1
        time_left_s = self._deadline_s - asyncio.get_running_loop().time()
        if time_left_s <= 0:
            what = f"not finished within {self._core.request_timeout_s:g} s (after {search.num_steps} steps of the beam search)"
            search.children = {"": 0}
            self._queue.put_nowait((search, "", Fail("deadline", what, 504)))
            return
        search.num_steps += 1
        search.children = {}
        search.entries = []
        for place, beam in enumerate(search.beams.running):
            search.entries.append([known[beam.token_ids]] if beam.token_ids in known else [])
            if not search.entries[place]:
                search.children[self._core.new_request_id()] = place
        search.num_unfinished = len(search.children)
        for request_id, place in search.children.items():
            spec = RequestSpec(
                request_id=request_id,
                prompt_token_ids=[*search.prompt.token_ids, *search.beams.running[place].token_ids],
                sampling=self._child_sampling(search, place, num_tokens),
                priority=self.plan.priority,
                cache_salt=self.plan.cache_salt,
                adapter=self.plan.adapter,
                siblings=search.siblings,
                time_left_s=time_left_s,
                session_key=self.plan.session_key,
                client_request_id=self._client_request_id,
            )
            self._core.submit(spec, self._sink(search, request_id))

    def _child_sampling(self, search: _Search, place: int, num_tokens: int) -> SamplingParams:
        sampling, seed = self.plan.sampling, search.sampling.seed or 0
        return SamplingParams(
            temperature=sampling.temperature,
            seed=(seed + search.num_steps * self._beams.width + place) % 2**63,
            max_tokens=num_tokens,
            ignore_eos=True,  # a beam that ends is the search's business
            logprobs=max(self._beams.num_alternatives, sampling.logprobs or 0),
        )

    def _take(self, search: _Search, place: int, delivery: Deliver) -> bool:
        """A child's tokens. True when all of the step's have arrived."""
        if len(delivery.logprobs or ()) != len(delivery.token_ids):
            raise GenerationFailedError(self._client_request_id, Fail("internal", "a node sent no log-probabilities", 500))
        if search.num_steps == 1:
            search.num_cached_tokens = delivery.num_cached_tokens
        search.entries[place] += delivery.logprobs or ()
        search.num_unfinished -= bool(delivery.finish_reason)
        return search.num_unfinished == 0

    def _go_on(self, search: _Search) -> None:
        """Choose the next step's beams and ask about them, until something has to be waited for or the search is done."""
        while True:
            parents = search.beams.running
            search.beams.advance([entries[0] for entries in search.entries])
            if not search.beams.running:
                return
            known = {
                (*parent.token_ids, entries[0].token_id): entries[1]
                for parent, entries in zip(parents, search.entries, strict=True)
                if len(entries) > 1
            }
            self._start_step(search, known)
            if search.children:
                return

    def _finish(self, search: _Search, beam: Beam) -> tuple[RunningChoice, ChoiceDelta]:
        """The beam as a choice. The token that ended it has no text, and is one of the output's only with include_stop."""
        choice = RunningChoice(len(self._choices), "", search.prompt, search.sampling, self.plan, self._tokenizer)
        self._choices.append(choice)
        num_tokens = len(beam.token_ids) - (beam.is_stopped and not self._beams.include_stop)
        num_top = self.plan.sampling.logprobs
        logprobs = (
            () if num_top is None else tuple(replace(entry, top=entry.top[:num_top]) for entry in beam.logprobs[:num_tokens])
        )
        delivery = Deliver(0, beam.token_ids[:num_tokens], logprobs, finish_reason="" if beam.is_stopped else "length")
        delta = choice.take(delivery)
        if beam.is_stopped:
            delta = choice.take(Deliver(num_tokens, (), finish_reason="stop"))
        return choice, delta

    def _sink(self, search: _Search, request_id: str) -> Callable[[Deliver | Fail], None]:
        return lambda event: self._queue.put_nowait((search, request_id, event))
