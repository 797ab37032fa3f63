"""What a step costs must not grow with how many requests and blocks there are. Counted in bytecode instructions."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from bench.scheduler_scenarios import make_request, make_scheduler, step
from core.kv.block_pool import BlockPool
from core.scheduler import Scheduler


def num_instructions(act: Callable[[], object]) -> int:
    """Instructions of Python that `act` executes. Work inside of C functions is not counted."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(previous)
    return count


def decoding(num_running: int, num_waiting: int = 0, num_blocks: int = 0) -> Scheduler:
    """Requests that decode, none of which fills a block in the next steps, and others that wait for a slot."""
    scheduler = make_scheduler(num_blocks or 4 * num_running, num_running, 32 * num_running)
    for index in range(num_running + num_waiting):
        scheduler.add_request(make_request(f"r{index}", [index + 3] * 18))
    step(scheduler)
    step(scheduler)
    assert len(scheduler.running) == num_running
    return scheduler


def step_instructions(scheduler: Scheduler) -> int:
    return num_instructions(lambda: step(scheduler))


def test_step_cost_per_running_request_does_not_grow_with_their_number() -> None:
    few, many = (step_instructions(decoding(number)) / number for number in (16, 256))
    assert many < few * 1.05


def test_step_time_per_running_request_hardly_grows_with_their_number() -> None:
    """For what is done inside of C functions: the quickest of many steps, and a margin that only a wrong order exceeds."""
    quickest_s = []
    for number in (32, 1024):
        scheduler, times = decoding(number), []
        for _ in range(12):
            started_s = time.perf_counter()
            step(scheduler)
            times.append(time.perf_counter() - started_s)
        quickest_s.append(min(times) / number)
    assert quickest_s[1] < quickest_s[0] * 4


@pytest.mark.parametrize("other", [{"num_waiting": 1000}, {"num_blocks": 20_000}])
def test_step_cost_does_not_grow_with_waiting_requests_or_blocks(other: dict[str, int]) -> None:
    plain, grown = decoding(16), decoding(16, **other)
    assert step_instructions(grown) < step_instructions(plain) * 1.05


def test_admission_cost_does_not_grow_with_the_queue() -> None:
    costs = []
    for num_waiting in (10, 1000):
        scheduler = decoding(1, num_waiting)
        scheduler.finish_request("r0")
        costs.append(step_instructions(scheduler))
        assert [request.request_id for request in scheduler.running] == ["r1"]
    assert costs[1] < costs[0] * 1.05


def test_abort_cost_does_not_grow_with_the_queue() -> None:
    costs = []
    for num_waiting in (200, 2000):
        scheduler = decoding(1, num_waiting)
        names = [f"r{index}" for index in range(num_waiting, num_waiting // 2, -1)]

        def abort_all(scheduler: Scheduler = scheduler, names: list[str] = names) -> None:
            for name in names:
                scheduler.finish_request(name)

        costs.append(num_instructions(abort_all) / len(names))
    assert costs[1] < costs[0] * 1.3


def test_block_cost_in_a_pool_full_of_cached_blocks_does_not_grow_with_its_size() -> None:
    costs = []
    for num_blocks in (500, 20_000):
        pool = BlockPool(num_blocks)
        names = (number.to_bytes(16, "little") for number in range(10**9))

        def churn(pool: BlockPool = pool, names: Any = names) -> None:
            block_ids = pool.try_allocate(50) or []
            for block_id in block_ids:
                pool.set_hash(block_id, next(names))
            pool.release_references(reversed(block_ids))

        while pool.num_cached_free < num_blocks:
            churn()
        costs.append(num_instructions(churn))
    assert costs[1] <= costs[0]
