"""A request's state inside one engine, and the one function that moves it between statuses.

The scheduler is the only writer, apart from what the cache manager keeps of a request's blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from core.grammar import GrammarMatcher
from core.sampling_params import SamplingParams
from core.step import TokenLogprob


class RequestStatus(enum.Enum):
    """WAITING holds no blocks. LOADING waits for a transfer and holds none either (the transfer does). PARKED waits for its
    adapter's turn, outside of the queue. RUNNING has its blocks.
    """

    WAITING = "waiting"
    LOADING = "loading"
    PARKED = "parked"
    RUNNING = "running"
    FINISHED = "finished"


class RequestStage(enum.Enum):
    """What is wanted of this engine: PREFILL computes the prompt, samples one token and saves the blocks; DECODE runs to the
    end.
    """

    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


_TRANSITIONS = {
    RequestStatus.WAITING: {RequestStatus.LOADING, RequestStatus.PARKED, RequestStatus.RUNNING, RequestStatus.FINISHED},
    RequestStatus.LOADING: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.PARKED: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.RUNNING: {RequestStatus.WAITING, RequestStatus.FINISHED},
    RequestStatus.FINISHED: set(),
}


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One request. Tokens are counted from the start of the prompt; blocks are of block_size tokens.

    token_ids: prompt followed by output. draft_token_ids: guesses of what comes next, for a step to verify; in token_ids only
    once they came true. num_tokens_with_spec: tokens whose KV the engine wants computed: token_ids, drafts, and what steps in
    flight will sample. num_computed_tokens: leading tokens whose KV is in our blocks, or will be once the steps in flight are
    done. num_written_tokens: those whose KV surely is there. block_hashes: names of the leading full blocks of token_ids, as far
    as they were needed. kv_sources: nodes that have computed some of them; see PrefixLookup.
    num_committed_blocks: leading blocks that the prefix cache knows. num_saved_blocks: leading blocks handed to the store.
    needs_last_token: a step may only be scheduled once the last one's tokens are known, such as for a grammar.
    grammar: where the output stands in the grammar it follows; awaits_grammar: there will be one. token_masks: what may come
    after token_ids, and after each draft. num_untold_tokens: the last of token_ids, forced by the grammar, that the runner does
    not know.
    num_reported_tokens: leading tokens that need not be told any more; what is forced before the first step goes out with it.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    stage: RequestStage = RequestStage.DECODE
    priority: int = 0
    rank: float = 0.0  # what its place in the queue is by, before arrival_index: follows from its priority at arrival
    arrival_index: int = 0
    arrival_s: float = 0.0
    deadline_s: float = float("inf")
    root_hash: bytes = b""
    adapter: str = ""  # fingerprint of a LoRA adapter's content in hexadecimal digits; "" for the model as it is
    kv_sources: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    max_total_tokens: int = 0  # prompt + output at which the request ends

    status: RequestStatus = RequestStatus.WAITING
    draft_token_ids: list[int] = field(default_factory=list)
    needs_last_token: bool = False
    awaits_grammar: bool = False
    grammar: GrammarMatcher | None = None
    token_masks: list[bytes] = field(default_factory=list)
    num_untold_tokens: int = 0
    num_reported_tokens: int = 0  # kept up to date for requests with a grammar
    num_tokens_with_spec: int = 0
    num_computed_tokens: int = 0
    num_written_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_saved_blocks: int = 0
    announced_hash: bytes | None = None  # the block that others wait for this request to fill

    num_loaded_tokens: int = 0  # brought by transfers for this request, whether or not still in our blocks
    num_loads: int = 0
    may_load: bool = True
    lookup_started_s: float | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_cached_tokens: int | None = None  # hit tokens at first admission; None before it

    def __post_init__(self) -> None:
        self.num_tokens_with_spec = self.num_reported_tokens = len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far, here or on a node that had the request before."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_hit(self) -> bool:
        """False when every prompt position must be computed here: its log-probabilities are wanted."""
        return self.sampling.prompt_logprobs is None or self.num_output_tokens > 0

    @property
    def schedule_key(self) -> tuple[float, int]:
        """Order of service: lower rank first, then earlier arrival. It never changes, so preempted requests keep their place."""
        return (self.rank, self.arrival_index)


def transition(request: Request, status: RequestStatus) -> None:
    """Move a request to `status`. An illegal move is a bug and asserts."""
    assert status in _TRANSITIONS[request.status], f"{request.request_id}: {request.status.name} -> {status.name}"
    request.status = status
