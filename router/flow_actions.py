"""What a request's flow asks of the router: plain values, so that a simulation can look at them as the router does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.adapter_files import Adapter
from core.sampling_params import SamplingParams
from core.step import TokenLogprob
from core.wire.messages import Generate
from router.policy import Siblings


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One sequence to generate. sampling.seed is set; the prompt has at least one token and fits the context."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    siblings: Siblings | None = None  # that share its prompt
    time_left_s: float = math.inf  # on arrival, of the request that it is part of; options.request_timeout_s holds as well
    adapter: Adapter | None = None
    session_key: str = ""  # requests with the same one may be kept on one node (router.policy session_sticky)
    client_request_id: str = ""  # what the client calls it: shown to people, never an identity


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send `message` to the node and count it against the node. reason: prefill, handoff, local_prefill, drain or retry.
    prefill_ms: predicted, as in Placement.

    source_node_ids: other nodes that have had the request, the latest first: they may have saved KV of it.
    """

    node_id: str
    message: Generate
    reason: str
    is_suspect: bool = False
    source_node_ids: tuple[str, ...] = ()
    prefill_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    """A dispatch no longer counts against its node; one follows each Dispatch. must_abort: the node may still work on it."""

    node_id: str
    wire_id: str
    must_abort: bool


@dataclass(frozen=True, slots=True)
class Deliver:
    """New output tokens for the client, at position first_index on. finish_reason "" means that more will come.

    logprobs are parallel to token_ids. prompt_logprobs come once, complete; num_cached_tokens is of the stage that
    computed the prompt first.
    """

    first_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0
    finish_reason: str = ""
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Fail:
    """The request ends without its answer. http_status: what fits if nothing was sent yet. retry_after_s 0: do not advise."""

    kind: str
    message: str
    http_status: int
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Count:
    """Something worth a metric: local_prefill(reason), retry(reason), migration(reason, outcome), moved_tokens(source),
    decision(reason, role)."""

    what: str
    reason: str
    outcome: str = ""
    amount: int = 1


Action = Dispatch | Release | Deliver | Fail | Count
