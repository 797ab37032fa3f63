"""What the scheduler tells a model runner about one step, and what comes back: values only, no behaviour.

The plan carries deltas: the runner keeps each request's tokens and block table between steps, and appends what it samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that the runner does not hold yet: first scheduled, or resumed after preemption.

    token_ids: prompt and all output tokens so far; num_prompt_tokens: how many of them are prompt; block_ids: the block
    table, covering at least num_computed_tokens plus this step's tokens. token_ids belongs to the scheduler: a runner that keeps
    it copies it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams
    adapter: object = None  # what AdapterStore.find gave for its adapter; None: it has none


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work.

    num_scheduled_tokens is in batch order: {request_id: tokens to compute}, each from the request's num_computed_tokens on.
    new_block_ids holds blocks to append to the block table, for continuing requests that got some. draft_token_ids: guesses to
    verify, of those that have some; they are the last of the request's scheduled tokens. removed_request_ids
    (finished, aborted or preempted since the last plan) are dropped by the runner before anything else.
    forced_token_ids: tokens to append to what the runner knows of a request, which nobody sampled: its grammar left no choice.
    token_masks: of requests with a grammar, for each row that is sampled; see GrammarMatcher.token_masks.
    num_common_prefix_blocks: leading blocks shared by every request of the batch, at least; some may share more.
    """

    step_id: int
    num_scheduled_tokens: dict[str, int]
    num_total_tokens: int
    new_requests: list[NewRequest]
    new_block_ids: dict[str, list[int]]
    finished_request_ids: list[str]
    preempted_request_ids: list[str]
    num_common_prefix_blocks: int = 0
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    forced_token_ids: dict[str, list[int]] = field(default_factory=dict)
    token_masks: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def removed_request_ids(self) -> list[str]:
        """Requests whose state the runner forgets."""
        return self.finished_request_ids + self.preempted_request_ids


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token: of the token itself, its rank (1 is the most likely), and the best alternatives.

    top: (token_id, logprob) pairs, most likely first, as many as were asked for. Natural logarithm, over the model's
    distribution before temperature, penalties and filters, as vLLM's default "raw_logprobs". A grammar's mask comes before:
    what it forbids is never listed, and a token without an alternative has 0.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced.

    sampled_token_ids is parallel to the plan's num_scheduled_tokens (same order): an empty list where the request's known
    tokens are not all computed yet (a prompt chunk), else the sampled tokens: as many of its drafts as the model would have
    sampled, too, and the one token that comes after them. logprobs / prompt_logprobs hold
    only requests that asked: logprobs parallel to the sampled tokens; prompt_logprobs for the prompt positions whose successor
    token's probability this step computed, in position order (the first prompt token has none and is never listed).
    """

    sampled_token_ids: list[list[int]]
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Runs one step of the model over the KV pool that it was built with. Called from the step thread alone."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan's tokens, write their KV into the pool, sample where a request's tokens are all computed.

        An empty plan (no scheduled tokens) is allowed and only drops removed requests.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """A load that has ended. error: why the adapter is not in memory now; "" when it is."""

    adapter: str
    error: str = ""


class AdapterStore(Protocol):
    """The model's adapters in memory. Called from the step thread alone, also while the runner computes on another one."""

    def start_load(self, adapter: str, path: str) -> None:
        """Begin to bring an adapter (its content's fingerprint, in hexadecimal digits) from its folder. Returns at once.

        What the folder holds must be what the fingerprint says, else the load ends with an error.
        """
        ...

    def poll_loads(self) -> list[AdapterLoad]:
        """Loads that have ended since the last call: one for each start_load. From here on a loaded adapter is here."""
        ...

    def find(self, adapter: str) -> object:
        """What the runner needs of an adapter that is here. It keeps the memory for itself, however long it is kept."""
        ...

    def drop(self, adapter: str) -> None:
        """Give an adapter's memory back, once nobody has anything of it any more. Unknown ones are ignored."""
        ...
