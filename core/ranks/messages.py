"""What the processes of one node tell each other: frozen, tagged structs, as between nodes, and how plans become them.

Rank 0 is the node's process; the others, its children, compute the same steps on their share of the model. All are of one
installation and are started together, so there are no versions here.
"""

from __future__ import annotations

import msgspec

from core.sampling_params import SamplingParams
from core.step import NewRequest, StepPlan


class RankSetup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a rank. description: of the model, as core.model encodes it for itself. device: of
    engine.device, for this rank; cpu_kernels: of engine.cpu_kernels.

    Descriptors are numbers that the process has inherited: pool_fd, the memory that connectors see; exchange_fd, what sums pass
    through; peer_fds by rank, -1 for its own.
    """

    rank: int
    num_ranks: int
    model_dir: str
    description: bytes
    num_blocks: int
    num_slots: int
    num_threads: int
    device: str
    cpu_kernels: str
    timeout_s: float
    pool_fd: int
    exchange_fd: int
    peer_fds: list[int]


class RankReady(msgspec.Struct, frozen=True, tag=True):
    """A rank's answer to its setup: it waits for plans. error: why it cannot, in words; then it ends."""

    error: str = ""


class RankRequest(msgspec.Struct, frozen=True, array_like=True):
    """core.step.NewRequest without an adapter."""

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    sampling: SamplingParams


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """core.step.StepPlan without what only matters where tokens are sampled: masks, and why a request was removed."""

    step_id: int
    num_scheduled_tokens: dict[str, int]
    num_total_tokens: int
    new_requests: list[RankRequest]
    new_block_ids: dict[str, list[int]]
    removed_request_ids: list[str]
    num_common_prefix_blocks: int
    draft_token_ids: dict[str, list[int]]
    forced_token_ids: dict[str, list[int]]


class SampledTokens(msgspec.Struct, frozen=True, tag=True):
    """What rank 0 has sampled in the step that runs, a token for each row that is sampled."""

    token_ids: list[int]


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """A rank has computed a step, and written its part of the step's KV."""

    step_id: int


class CopyBlocks(msgspec.Struct, frozen=True, tag=True):
    """Copy this rank's heads between blocks of its device and slots of the staging pool, behind all steps sent before."""

    copy_id: int
    block_ids: list[int]
    slots: list[int]
    is_save: bool


class CopyDone(msgspec.Struct, frozen=True, tag=True):
    """A copy has ended. error: why it failed, in words."""

    copy_id: int
    error: str = ""


ToRank = RankSetup | RunStep | SampledTokens | CopyBlocks
FromRank = RankReady | StepDone | CopyDone


def message_of_plan(plan: StepPlan) -> RunStep:
    """What ranks need of a plan. Its requests must have no adapters."""
    assert all(request.adapter is None for request in plan.new_requests), "adapters are refused where there are several ranks"
    return RunStep(
        step_id=plan.step_id,
        num_scheduled_tokens=plan.num_scheduled_tokens,
        num_total_tokens=plan.num_total_tokens,
        new_requests=[
            RankRequest(
                request.request_id,
                request.token_ids,
                request.num_prompt_tokens,
                request.num_computed_tokens,
                request.block_ids,
                request.sampling,
            )
            for request in plan.new_requests
        ],
        new_block_ids=plan.new_block_ids,
        removed_request_ids=plan.removed_request_ids,
        num_common_prefix_blocks=plan.num_common_prefix_blocks,
        draft_token_ids=plan.draft_token_ids,
        forced_token_ids=plan.forced_token_ids,
    )


def plan_of_message(message: RunStep) -> StepPlan:
    """The plan that a rank runs."""
    return StepPlan(
        step_id=message.step_id,
        num_scheduled_tokens=message.num_scheduled_tokens,
        num_total_tokens=message.num_total_tokens,
        new_requests=[
            NewRequest(
                request.request_id,
                request.token_ids,
                request.num_prompt_tokens,
                request.num_computed_tokens,
                request.block_ids,
                request.sampling,
            )
            for request in message.new_requests
        ],
        new_block_ids=message.new_block_ids,
        finished_request_ids=message.removed_request_ids,
        preempted_request_ids=[],
        num_common_prefix_blocks=message.num_common_prefix_blocks,
        draft_token_ids=message.draft_token_ids,
        forced_token_ids=message.forced_token_ids,
    )
