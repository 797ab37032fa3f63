"""Rank 0's runner beside ranks that do not answer as they should, and what it refuses. No processes: those are e2e's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from core.config import EngineOptions, ModelOptions
from core.errors import ConfigError, RankLostError
from core.model.description import describe_model
from core.model.parallel import NoAdapters, ParallelRunner
from core.model.parallel_loading import load_parallel
from core.ranks.messages import RunStep
from core.step import AdapterLoad, StepPlan, StepResult
from tests.unit.core.model.support import save_llama

PLAN = StepPlan(3, {}, 0, [], {}, ["gone"], [])


class FakeRanks:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.done: list[int] = []
        self.lost: list[str] = []
        self.error: Exception | None = None

    def send(self, message: msgspec.Struct) -> None:
        self.sent.append(message)

    def wait_step_done(self, step_id: int) -> None:
        if self.error is not None:
            raise self.error
        self.done.append(step_id)

    def report_lost(self, why: str) -> None:
        self.lost.append(why)


class FakeRunner:
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def execute(self, plan: StepPlan) -> StepResult:
        if self.error is not None:
            raise self.error
        return StepResult([[plan.step_id]])


def runner_of(runner: FakeRunner) -> tuple[ParallelRunner, FakeRanks]:
    ranks: Any = FakeRanks()
    inner: Any = runner
    return ParallelRunner(inner, ranks), ranks


def test_parallel_runner_returns_only_when_all_ranks_have_computed_the_step() -> None:
    runner, ranks = runner_of(FakeRunner())
    assert runner.execute(PLAN) == StepResult([[3]])
    (message,) = ranks.sent
    assert isinstance(message, RunStep) and message.removed_request_ids == ["gone"]
    assert ranks.done == [3] and not ranks.lost


def test_parallel_runner_step_that_fails_here_ends_the_node() -> None:
    """The others have gone on: their requests and ours are no longer the same."""
    runner, ranks = runner_of(FakeRunner(ValueError("no such thing")))
    with pytest.raises(RankLostError, match="step 3 failed on rank 0"):
        runner.execute(PLAN)
    assert len(ranks.lost) == 1 and "no such thing" in ranks.lost[0]


def test_parallel_runner_rank_that_does_not_end_its_step_is_lost() -> None:
    runner, ranks = runner_of(FakeRunner())
    ranks.error = RankLostError("rank 1 has not answered for 60 s")
    with pytest.raises(RankLostError):
        runner.execute(PLAN)
    assert ranks.lost == ["rank 1 has not answered for 60 s"]


def test_parallel_runner_bug_is_raised_as_one() -> None:
    runner, ranks = runner_of(FakeRunner(AssertionError("a bug")))  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="a bug"):
        runner.execute(PLAN)
    assert not ranks.lost


def test_adapters_on_several_ranks_are_refused_with_the_reason() -> None:
    adapters = NoAdapters("several ranks serve no adapters")
    adapters.start_load("ab12", "/adapters/ab12")
    assert adapters.poll_loads() == [AdapterLoad("ab12", "several ranks serve no adapters")]
    assert adapters.poll_loads() == []
    adapters.drop("ab12")


@pytest.mark.parametrize("num_ranks", [3, 64])
def test_load_parallel_more_ranks_than_kv_heads_is_refused_before_anything_is_started(tmp_path: Path, num_ranks: int) -> None:
    save_llama(tmp_path)
    description = describe_model(tmp_path, ModelOptions(dtype="float32"), 16)
    engine = dataclasses.replace(EngineOptions(), tensor_parallel_size=num_ranks)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: got .* 1 to 2"):
        load_parallel(tmp_path, description, engine, 8)


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"kv_cache_dtype": "int8"}])
def test_load_parallel_of_fewer_bits_is_refused_before_anything_is_started(tmp_path: Path, changes: dict[str, str]) -> None:
    save_llama(tmp_path)
    description = describe_model(tmp_path, ModelOptions(dtype="float32", **changes), 16)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size: got 2; allowed: 1 with model.quantization"):
        load_parallel(tmp_path, description, EngineOptions(tensor_parallel_size=2), 8)


@pytest.mark.parametrize("value", [0, 65])
def test_tensor_parallel_size_out_of_range_is_refused(value: int) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size"):
        EngineOptions(tensor_parallel_size=value)
