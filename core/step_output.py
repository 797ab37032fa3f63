"""News of an engine's step, for whoever answers the clients, and how a request's own limits end it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.request import FinishReason, Request
from core.step import AdapterLoad, TokenLogprob


@dataclass(slots=True)
class FinishedRequest:
    """How a request ended. stop_token_id: the stop token that ended it, if one did. error: what went wrong, in words."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: str = ""


@dataclass(slots=True)
class StepOutput:
    """News of one step, by request_id.

    first_index: position of the first of new_token_ids among the request's output tokens. num_cached_tokens: known tokens that
    were hits, told once, at first admission. prompt_logprobs: told once, complete. prefill_done: prefill-stage requests whose
    blocks are visible in the store. num_tokens: how many tokens the step computed; 0 means that only transfers can bring news.
    adapter_loads: of LoRA adapters, that have ended.
    """

    num_tokens: int = 0
    new_token_ids: dict[str, list[int]] = field(default_factory=dict)
    first_index: dict[str, int] = field(default_factory=dict)
    finished: dict[str, FinishedRequest] = field(default_factory=dict)
    num_cached_tokens: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprob]] = field(default_factory=dict)
    prefill_done: list[str] = field(default_factory=list)
    adapter_loads: list[AdapterLoad] = field(default_factory=list)


def find_end(request: Request, num_new: int) -> tuple[FinishedRequest | None, int]:
    """Whether one of the last num_new tokens ends the request, and how many of them it keeps; the others are removed.

    Stop tokens count from min_tokens on.
    """
    token_ids, sampling = request.token_ids, request.sampling
    first = len(token_ids) - num_new
    for length in range(first + 1, len(token_ids) + 1):
        token_id = token_ids[length - 1]
        if token_id in request.stop_token_ids and length - request.num_prompt_tokens >= sampling.min_tokens:
            finished = FinishedRequest(FinishReason.STOP)
            if token_id in sampling.stop_token_ids:
                finished.stop_token_id = token_id
        elif length >= request.max_total_tokens:
            finished = FinishedRequest(FinishReason.LENGTH)
        else:
            continue
        del token_ids[length:]
        return finished, length - first
    return None, num_new
