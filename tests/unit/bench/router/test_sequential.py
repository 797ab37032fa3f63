"""Reuse of one pool, against numbers counted by hand and a plain LRU."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest

from bench.router.sequential import replay_sequential
from bench.router.trace import parse_trace
from tests.unit.bench.router.traces import line


def test_replay_sequential_unlimited_pool_gives_the_traces_own_numbers() -> None:
    requests = parse_trace([line(0, [0, 1, 2], 12), line(0, [0, 1, 3]), line(0, [0, 4, 2]), line(0, [0, 1, 2], 12)])
    reuse = replay_sequential(requests, None)
    assert reuse.by_blocks == (2 + 1 + 3) / 12  # a block behind a missing one is no hit; the equal partial one is
    assert reuse.by_tokens == (1024 + 512 + 1036) / (1036 + 1536 + 1536 + 1036)


def test_replay_sequential_orders_differ_in_what_a_full_pool_keeps() -> None:
    requests = parse_trace([line(0, [0, 1, 2]), line(0, [3]), line(0, [0, 1, 2])])
    assert replay_sequential(requests, 3, "head_first").by_blocks == 0  # the head was used first, so it went
    assert replay_sequential(requests, 3, "tail_first").by_blocks == 2 / 7


@pytest.mark.parametrize("num_blocks", [12, 30, 100])
def test_replay_sequential_head_first_is_a_plain_lru(num_blocks: int) -> None:
    rng = random.Random(num_blocks)
    prompts = [list(range(start, start + rng.randint(1, 10))) for start in rng.choices(range(60), k=300)]
    prompts = [[1000 + prompt[0], *prompt] for prompt in prompts]
    lru: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for prompt in prompts:
        is_leading = True
        for block in prompt:
            is_leading = is_leading and block in lru
            num_hits += is_leading
        for block in prompt:
            lru[block] = None
            lru.move_to_end(block)
            if len(lru) > num_blocks:
                lru.popitem(last=False)
    assert num_hits > 0
    found = replay_sequential(parse_trace(line(0, prompt) for prompt in prompts), num_blocks)
    assert found.by_blocks == num_hits / sum(map(len, prompts))


def test_replay_sequential_pool_smaller_than_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="got 2; allowed: 3"):
        replay_sequential(parse_trace([line(0, [0, 1, 2])]), 2)
    with pytest.raises(ValueError, match="order"):
        replay_sequential([], None, "sideways")
