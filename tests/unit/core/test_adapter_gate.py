"""LoRA adapters in the engine: how many run at a time, who waits and who passes, what is in memory, and whose KV is whose."""

from __future__ import annotations

import random

import pytest

from core.config import EngineOptions
from core.errors import ConfigError, InvalidInputError
from core.request import FinishReason
from tests.support.engine_bench import EngineBench
from tests.support.fake_runner import oracle_tokens
from tests.support.memory_connector import MemoryConnector, MemoryStore

A, B, C, D = (letter * 32 for letter in "abcd")  # fingerprints


def adapter_bench(*adapters: str, **options: object) -> EngineBench:
    """An engine whose adapters are in memory already."""
    bench = EngineBench(**options)  # type: ignore[arg-type]
    for adapter in adapters:
        assert not bench.engine.adapters.add(adapter, f"/{adapter}")
    bench.run()
    return bench


def order_of_first_tokens(bench: EngineBench, max_steps: int = 3000) -> list[str]:
    """Step to the end; requests by their first token."""
    order: list[str] = []
    for _ in range(max_steps):
        if not bench.engine.has_work():
            return order
        order += [name for name in bench.step().new_token_ids if name not in order]
        assert bench.runner.most_adapters <= bench.options.max_loras
    raise AssertionError("it does not end")


def test_requests_beyond_max_loras_step_aside_and_keep_their_place() -> None:
    bench = adapter_bench(A, B, C, max_loras=2)
    for index, adapter in enumerate((A, B, C, C, "", B, C)):
        bench.add(f"r{index}", [index + 1, 2, 3], max_tokens=3 + index, adapter=adapter)
    bench.step()
    assert list(bench.last_plan.num_scheduled_tokens) == ["r0", "r1", "r4", "r5"]  # base requests and running adapters go on
    assert bench.engine.stats.waiting_by_reason["lora"] == 3
    assert bench.engine.stats.num_waiting == 3
    assert order_of_first_tokens(bench)[-3:] == ["r2", "r3", "r6"]
    for index, adapter in enumerate((A, B, C, C, "", B, C)):
        assert bench.tokens[f"r{index}"] == oracle_tokens([index + 1, 2, 3], 3 + index, adapter)
    bench.assert_nothing_leaked()


def test_oldest_of_several_parked_adapters_gets_the_place_that_is_free() -> None:
    bench = adapter_bench(A, B, C, D, max_loras=1)
    for name, adapter in (("a", A), ("d", D), ("b", B), ("c", C), ("d2", D), ("c2", C)):
        bench.add(name, [ord(name[0]), 2], max_tokens=2, adapter=adapter)
    assert order_of_first_tokens(bench) == ["a", "d", "d2", "b", "c", "c2"]


def test_stream_of_younger_requests_of_a_running_adapter_starves_nobody() -> None:
    """Without a bound on passing, the running adapter would never drain: a new request of it comes at every step."""
    bench = adapter_bench(A, B, max_loras=1, max_num_seqs=4)
    bench.add("a0", [1, 2, 3], max_tokens=4, adapter=A)
    bench.step()
    bench.add("b", [9, 9, 9], max_tokens=2, adapter=B)
    num_steps = 0
    while "b" not in bench.finished:
        num_steps += 1
        bench.add(f"a{num_steps}", [num_steps, 2, 3], max_tokens=4, adapter=A)
        bench.engine.adapters.add(f"{num_steps:032x}", "/others are loaded meanwhile")
        bench.step()
        assert num_steps < 40, "b starves"
    assert num_steps > 4  # some may pass: the place is in use anyway
    bench.run()
    assert all(finished.reason is FinishReason.LENGTH for finished in bench.finished.values())
    bench.assert_nothing_leaked()


def test_first_of_the_parked_that_is_aborted_no_longer_holds_up_the_others() -> None:
    bench = adapter_bench(A, B, max_loras=1, max_num_seqs=4)
    bench.add("a0", [1, 2, 3], max_tokens=30, adapter=A)
    bench.step()
    bench.add("b", [9, 9, 9], adapter=B)
    for index in range(1, 8):  # more than may pass
        bench.add(f"a{index}", [index, 2, 3], max_tokens=1, adapter=A)
    for _ in range(6):
        bench.step()
    assert bench.engine.stats.waiting_by_reason["lora"] > 1
    assert bench.engine.abort_request("b")
    for _ in range(4):
        bench.step()
    assert {f"a{index}" for index in range(1, 8)} <= set(bench.finished)
    assert "a0" not in bench.finished
    assert bench.engine.stats.waiting_by_reason["lora"] == 0


def test_request_that_waits_for_a_load_lets_others_pass_and_then_runs() -> None:
    bench = EngineBench(max_loras=1)
    bench.runner.adapters.is_slow = True
    bench.engine.adapters.add(A, "/a")
    bench.add("a", [1, 2, 3], adapter=A)
    bench.add("base", [4, 5, 6])
    for _ in range(5):
        bench.step()
    assert "base" in bench.finished and not bench.tokens["a"]
    bench.runner.adapters.is_slow = False
    bench.run()
    assert bench.tokens["a"] == oracle_tokens([1, 2, 3], 4, A)
    bench.assert_nothing_leaked()


def test_adapter_that_cannot_be_loaded_ends_its_requests_with_the_reason_and_no_others() -> None:
    bench = adapter_bench(A, max_loras=1)
    bench.runner.adapters.broken.add(B)
    bench.engine.adapters.add(B, "/b")
    for name, adapter in (("b", B), ("a", A), ("b2", B)):
        bench.add(name, [1, 2, 3], adapter=adapter)
    bench.run()
    assert [bench.finished[name].error for name in ("b", "b2")] == ["its files are gone"] * 2
    assert bench.tokens["a"] == oracle_tokens([1, 2, 3], 4, A)
    bench.assert_nothing_leaked()
    bench.runner.adapters.broken.clear()
    bench.add("b3", [1, 2, 3], adapter=B)  # its files are back
    bench.run()
    assert bench.tokens["b3"] == oracle_tokens([1, 2, 3], 4, B)


def test_memory_holds_max_cpu_loras_and_what_was_dropped_is_read_again() -> None:
    bench = adapter_bench(A, B, C, max_loras=1, max_cpu_loras=2)
    assert bench.runner.adapters.here == {B, C}
    bench.add("a", [1, 2], max_tokens=30, adapter=A)
    bench.add("b", [1, 2], adapter=B)
    bench.add("c", [1, 2], adapter=C)
    while bench.engine.has_work():
        bench.step()
        assert len(bench.runner.adapters.here) <= 2
    assert all(bench.tokens[name] == oracle_tokens([1, 2], len(bench.tokens[name]), name * 32) for name in "abc")
    assert bench.engine.stats.num_adapters == 2
    assert bench.engine.stats.num_adapter_loads == len(bench.runner.adapters.started) > 3


def test_adapter_used_longest_ago_is_dropped_first() -> None:
    bench = adapter_bench(A, B, max_cpu_loras=2, max_loras=2)
    bench.add("a", [1, 2], adapter=A)
    bench.run()
    bench.engine.adapters.add(C, "/c")
    bench.run()
    assert bench.runner.adapters.here == {A, C}


def test_adapter_that_is_unloaded_stays_until_its_running_requests_have_ended() -> None:
    bench = adapter_bench(A)
    bench.add("a", [1, 2, 3], max_tokens=8, adapter=A)
    bench.step()
    bench.engine.adapters.forget(A)
    with pytest.raises(InvalidInputError, match="adapter"):
        bench.add("late", [1, 2, 3], adapter=A)
    bench.run()
    assert bench.tokens["a"] == oracle_tokens([1, 2, 3], 8, A)
    assert not bench.runner.adapters.here


def test_kv_of_an_adapter_is_a_hit_for_its_content_alone_in_cache_and_store() -> None:
    store = MemoryStore()
    prompt = list(range(1, 14))
    bench = EngineBench(connector=MemoryConnector(store), kv_load_policy="always")
    other = EngineBench(connector=MemoryConnector(store), kv_load_policy="always")
    for engine in (bench, other):
        for adapter in (A, B):
            engine.engine.adapters.add(adapter, "/the/same/path")
    for name, adapter in (("base", ""), ("a", A), ("b", B)):
        bench.add(name, prompt, adapter=adapter)
        bench.run()
        bench.add(f"{name}-again", prompt, adapter=adapter)
        bench.run()
        assert (bench.num_cached_tokens[name], bench.num_cached_tokens[f"{name}-again"]) == (0, 12)
    other.add("b", prompt, adapter=B)
    other.run()
    assert other.num_cached_tokens["b"] == 12
    assert other.tokens["b"] == bench.tokens["b"] == oracle_tokens(prompt, 4, B) != bench.tokens["a"]


@pytest.mark.parametrize("seed", range(6))
def test_random_adapters_priorities_aborts_and_preemptions_keep_the_limits_and_end(seed: int) -> None:
    rng = random.Random(seed)
    bench = adapter_bench(
        A,
        B,
        C,
        D,
        num_blocks=12,
        max_loras=rng.choice((1, 2)),
        max_cpu_loras=2,
        max_num_seqs=6,
        policy="priority",
        overlap_steps=rng.choice(("on", "off")),
    )
    asked: dict[str, tuple[list[int], int, str]] = {}
    for step in range(200):
        if rng.random() < 0.7 and len(asked) < 60:
            prompt, adapter = rng.choices(range(1, 9), k=rng.randint(1, 20)), rng.choice(("", A, B, C, D))
            asked[f"r{step}"] = (prompt, rng.randint(1, 20), adapter)
            bench.add(f"r{step}", prompt, max_tokens=asked[f"r{step}"][1], adapter=adapter, priority=rng.randint(0, 2))
        if asked and rng.random() < 0.05:
            name = rng.choice(list(asked))
            if bench.engine.abort_request(name):
                del asked[name]
        bench.step()
        assert len(bench.runner.adapters.here) <= 2
    bench.run()
    assert bench.runner.most_adapters == bench.options.max_loras
    assert bench.engine.stats.num_preemptions > 0
    for name, (prompt, max_tokens, adapter) in asked.items():
        assert bench.tokens[name] == oracle_tokens(prompt, max_tokens, adapter), name
    bench.assert_nothing_leaked()


def test_node_without_places_for_adapters_says_so() -> None:
    bench = EngineBench(max_loras=0)
    with pytest.raises(InvalidInputError, match=r"engine\.max_loras: got 0"):
        bench.engine.adapters.add(A, "/a")


def test_options_with_less_memory_than_places_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_cpu_loras: got 3; allowed: at least engine\.max_loras \(4\)"):
        EngineOptions(max_loras=4, max_cpu_loras=3)
