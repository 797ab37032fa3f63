"""kill -9 at each stage of a request, by what the client has seen so far: no client sees anything but the right tokens."""

from __future__ import annotations

import time

import pytest

from tests.fault.rig import NUM_OUTPUT_TOKENS, Rig
from tests.fault.verified_load import RequestRecord

NUM_STAGGERED = 8


def _wait_for_tokens(record: RequestRecord, num_tokens: int) -> None:
    give_up_s = time.monotonic() + 60.0
    while len(record.token_times_s) < num_tokens and record.outcome is None and time.monotonic() < give_up_s:
        time.sleep(0.001)


@pytest.mark.timeout(300)
def test_prefill_node_killed_with_a_full_queue_all_requests_are_right(rig: Rig) -> None:
    records = rig.start("queue", [*rig.questions[2:], *rig.questions[2:]])
    full: list[str] = []  # prompts are spread by their length: either node may get the more of them

    def is_one_full() -> bool:
        full[:] = [name for name in ("prefill-0", "prefill-1") if int(str(rig.node(name)["num_in_flight"])) >= 3]
        return bool(full)

    rig.cluster.wait_until(is_one_full, "prompts wait behind others")
    rig.cluster.kill(full[0])
    rig.check_right(records)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("stage", "role", "num_tokens"),
    [
        ("first token, blocks still being saved", "prefill", 1),
        ("decode node loads the blocks", "decode", 1),
        ("second token", "decode", 2),
        ("last token", "decode", NUM_OUTPUT_TOKENS - 1),
    ],
)
def test_node_killed_at_this_stage_request_goes_on_right(rig: Rig, stage: str, role: str, num_tokens: int) -> None:
    # Two of the same: each node of the role gets one, and both are at the same stage.
    records = rig.start(stage, [rig.questions[3], rig.questions[3]])
    _wait_for_tokens(records[0], num_tokens)
    rig.cluster.kill(f"{role}-0")
    rig.check_right(records)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_node_killed_while_requests_are_at_all_stages_all_are_right(rig: Rig, role: str) -> None:
    """Requests that started one after the other, spread over the life of one, so that a kill meets each stage."""
    question = rig.questions[3]
    (alone,) = rig.start(f"alone before {role}", [question])
    rig.check_right([alone])
    life_s = alone.ended_at_s - alone.sent_at_s
    records: list[RequestRecord] = []
    for place in range(NUM_STAGGERED):
        records += rig.start(f"staggered {role} {place}", [question])
        time.sleep(life_s / NUM_STAGGERED)
    rig.cluster.kill(f"{role}-0")
    rig.check_right(records)
