"""Plans on their way to the other ranks, and the channel that they take."""

from __future__ import annotations

import socket

import pytest

from core.errors import RankLostError
from core.ranks.channel import Channel
from core.ranks.messages import FromRank, RunStep, StepDone, ToRank, message_of_plan, plan_of_message
from core.sampling_params import GrammarSource, SamplingParams
from core.step import NewRequest, StepPlan

SAMPLING = SamplingParams(
    temperature=0.0, logit_bias={5: float("-inf")}, prompt_logprobs=3, grammar=GrammarSource("regex", "a+"), stop_token_ids=(7,)
)
PLAN = StepPlan(
    step_id=7,
    num_scheduled_tokens={"new": 5, "old": 3},
    num_total_tokens=8,
    new_requests=[NewRequest("new", [1, 2, 3, 4, 5], 5, 0, [9], SAMPLING)],
    new_block_ids={"old": [3]},
    finished_request_ids=["gone"],
    preempted_request_ids=["preempted"],
    num_common_prefix_blocks=2,
    draft_token_ids={"old": [4, 4]},
    forced_token_ids={"old": [6]},
    token_masks={"old": [b"\xff" * 8] * 3},
)


def open_pair() -> tuple[Channel[FromRank], Channel[ToRank]]:
    ours, theirs = socket.socketpair()
    return Channel(ours, FromRank, "rank 1"), Channel(theirs, ToRank, "rank 0")


def test_plan_through_a_channel_is_the_same_but_for_what_only_rank_0_needs() -> None:
    leader, follower = open_pair()
    leader.send(message_of_plan(PLAN))
    message = follower.receive()
    assert isinstance(message, RunStep)
    plan = plan_of_message(message)
    assert plan.removed_request_ids == ["gone", "preempted"] and not plan.token_masks
    for name in (
        *("step_id", "num_scheduled_tokens", "num_total_tokens", "new_requests", "new_block_ids"),
        *("num_common_prefix_blocks", "draft_token_ids", "forced_token_ids"),
    ):
        assert getattr(plan, name) == getattr(PLAN, name), name
    assert list(plan.num_scheduled_tokens) == ["new", "old"]  # the batch's order
    follower.send(StepDone(7))
    assert leader.receive() == StepDone(7)


def test_plan_with_an_adapter_is_a_bug() -> None:
    request = NewRequest("new", [1], 1, 0, [0], SAMPLING, adapter=object())
    with pytest.raises(AssertionError, match="adapters"):
        message_of_plan(StepPlan(1, {"new": 1}, 1, [request], {}, [], []))


@pytest.mark.parametrize("is_leader_first", [True, False])
def test_channel_other_end_gone_ends_waiting_and_sending(is_leader_first: bool) -> None:
    leader, follower = open_pair()
    first, second = (leader, follower) if is_leader_first else (follower, leader)
    first.shut_down()
    first.shut_down()
    with pytest.raises(RankLostError, match="is gone"):
        second.receive()
    with pytest.raises(RankLostError, match="is gone"):
        second.send(StepDone(1))
