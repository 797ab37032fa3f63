"""When a request ends, and what becomes of tokens sampled beyond that."""

from __future__ import annotations

import pytest

from core.request import FinishReason
from core.step import StepPlan, StepResult
from core.step_output import StepOutput
from tests.support.engine_bench import EngineBench, unique_prompt
from tests.support.fake_runner import EOS_TOKEN_ID


def sample(bench: EngineBench, tokens: list[int]) -> StepOutput:
    """Run one step in which the model samples exactly these tokens."""
    output = StepOutput()
    plan: StepPlan = bench.engine._scheduler.schedule(output)
    bench.engine._scheduler.update_from_output(plan, StepResult([list(tokens)]), output)
    return output


def test_update_eos_sampled_finishes_and_is_reported_once() -> None:
    bench = EngineBench()
    bench.add("r", [5, 6], max_tokens=10)
    output = sample(bench, [EOS_TOKEN_ID])
    assert output.finished["r"].reason is FinishReason.STOP
    assert output.new_token_ids["r"] == [EOS_TOKEN_ID]
    plans = [bench.engine._scheduler.schedule(StepOutput()) for _ in range(2)]
    assert [plan.finished_request_ids for plan in plans] == [["r"], []]
    assert output.finished["r"].stop_token_id is None, "the model's own end, not one that the request named"


def test_update_stop_token_cuts_what_follows() -> None:
    bench = EngineBench()
    bench.add("r", [5, 6], max_tokens=10, stop_token_ids=(42,))
    output = sample(bench, [10, 42, 12])
    assert output.new_token_ids["r"] == [10, 42]
    assert (output.finished["r"].reason, output.finished["r"].stop_token_id) == (FinishReason.STOP, 42)


def test_update_max_tokens_cuts_what_follows() -> None:
    bench = EngineBench()
    bench.add("r", [5, 6], max_tokens=2)
    output = sample(bench, [10, 11, 12])
    assert output.new_token_ids["r"] == [10, 11]
    assert output.finished["r"].reason is FinishReason.LENGTH


def test_update_ignore_eos_goes_on() -> None:
    bench = EngineBench()
    bench.add("r", [5, 6], max_tokens=10, ignore_eos=True)
    assert sample(bench, [EOS_TOKEN_ID]).finished == {}


@pytest.mark.parametrize("token_id", [EOS_TOKEN_ID, 42])
def test_update_min_tokens_holds_stops_back(token_id: int) -> None:
    bench = EngineBench()
    bench.add("r", [5, 6], max_tokens=10, min_tokens=5, stop_token_ids=(42,))
    assert sample(bench, [10, 11, token_id]).finished == {}
    assert sample(bench, [12, token_id]).finished["r"].reason is FinishReason.STOP


def test_update_model_length_ends_request() -> None:
    bench = EngineBench(num_blocks=4, block_size=4)  # 16 tokens
    bench.add("r", unique_prompt(1, 10), max_tokens=100)
    bench.run()
    assert bench.finished["r"].reason is FinishReason.LENGTH
    assert len(bench.tokens["r"]) == 6
    bench.assert_nothing_leaked()
