"""Local hits: what is shared, what is computed once, and what is never hit."""

from __future__ import annotations

from tests.support.engine_bench import EngineBench, scheduled, unique_prompt
from tests.support.fake_runner import oracle_tokens


def test_admit_common_prefix_shares_blocks() -> None:
    bench = EngineBench(num_blocks=10, block_size=16)
    common = list(range(100, 148))
    bench.add("r0", common + [1] * 7, max_tokens=20)
    bench.step()
    pool, r0 = bench.engine._pool, bench.engine._scheduler.requests["r0"]
    assert [pool.block_hash(block_id) is not None for block_id in r0.block_ids] == [True, True, True, False]
    bench.add("r1", common + [2] * 5, max_tokens=20)
    bench.step()
    assert scheduled(bench) == {"r0": 1, "r1": 5}
    r1 = bench.engine._scheduler.requests["r1"]
    assert r0.block_ids[:3] == r1.block_ids[:3]
    assert [pool.ref_count(block_id) for block_id in r1.block_ids] == [2, 2, 2, 1]
    assert bench.last_plan.num_common_prefix_blocks == 3


def test_admit_same_prompt_together_is_computed_once() -> None:
    bench = EngineBench(num_blocks=64, block_size=4, max_num_batched_tokens=24)
    prompt = unique_prompt(1, 41)
    for name in "abcd":
        bench.add(name, prompt, max_tokens=3)
    bench.add("other", unique_prompt(2, 4), max_tokens=1)
    bench.step()
    assert list(scheduled(bench)) == ["a"], "the first takes the whole budget"
    bench.step()
    assert scheduled(bench) == {"a": 17, "other": 4}, "who waits for a's blocks does not hold up the others"
    bench.run()
    assert all(bench.tokens[name] == oracle_tokens(prompt, 3) for name in "abcd")
    assert bench.num_cached_tokens == {"a": 0, "b": 40, "c": 40, "d": 40, "other": 0}


def test_admit_waits_for_a_prefix_whose_request_is_aborted_then_computes_it() -> None:
    bench = EngineBench(num_blocks=64, block_size=4, max_num_batched_tokens=16)
    prompt = unique_prompt(1, 41)
    for name in "ab":
        bench.add(name, prompt, max_tokens=3)
    bench.step()
    bench.engine.abort_request("a")
    bench.run()
    assert bench.tokens["b"] == oracle_tokens(prompt, 3)
    assert bench.num_cached_tokens["b"] == 16, "what a had finished is a hit"
    bench.assert_nothing_leaked()


def test_admit_fully_cached_prompt_computes_its_last_block() -> None:
    bench = EngineBench(num_blocks=10, block_size=16)
    prompt = unique_prompt(1, 48)
    bench.add("r0", prompt, max_tokens=1)
    bench.run()
    bench.add("r1", prompt, max_tokens=1)
    bench.step()
    assert bench.num_cached_tokens["r1"] == 32
    assert scheduled(bench) == {"r1": 16}
    assert bench.tokens["r1"] == bench.tokens["r0"]


def test_admit_other_salt_never_hits() -> None:
    bench = EngineBench(num_blocks=20, block_size=16)
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        bench.add(name, unique_prompt(1, 55), max_tokens=1, salt=salt)
        bench.run()
    assert bench.num_cached_tokens == {"a": 0, "b": 48, "c": 0, "d": 0}


def test_admit_prompt_logprobs_request_computes_everything_and_still_caches() -> None:
    bench = EngineBench(num_blocks=20, block_size=16)
    for name, count in (("a", None), ("b", 1), ("c", None)):
        bench.add(name, unique_prompt(1, 40), max_tokens=1, prompt_logprobs=count)
        bench.run()
    assert bench.num_cached_tokens == {"a": 0, "b": 0, "c": 32}


def test_admit_prompt_logprobs_request_fills_duplicates_of_cached_blocks() -> None:
    bench = EngineBench(num_blocks=20, block_size=16)
    prompt, pool, requests = unique_prompt(1, 40), bench.engine._pool, bench.engine._scheduler.requests
    bench.add("a", prompt, max_tokens=9)
    bench.step()
    bench.add("b", prompt, max_tokens=9, prompt_logprobs=1)
    bench.step()
    a, b = requests["a"].block_ids, requests["b"].block_ids
    assert not set(a) & set(b)
    assert [pool.block_hash(block_id) for block_id in a] == [pool.block_hash(block_id) for block_id in b]
    assert pool.block_hash(a[0]) is not None


def test_admit_caching_off_counts_no_queries() -> None:
    bench = EngineBench(num_blocks=20, block_size=16, enable_prefix_caching=False)
    for name in ("a", "b"):
        bench.add(name, unique_prompt(1, 40), max_tokens=1)
        bench.run()
    stats = bench.engine.stats
    assert (stats.prefix_cache_query_tokens, stats.prefix_cache_hit_tokens) == (0, 0)
    assert bench.num_cached_tokens["b"] == 0
    assert bench.engine._pool.num_cached_free == 0
    bench.assert_nothing_leaked()


def test_admit_caching_off_and_pool_full_waits_for_free_blocks() -> None:
    bench = EngineBench(num_blocks=5, block_size=4, enable_prefix_caching=False)
    bench.add("a", unique_prompt(1, 9), max_tokens=3)
    bench.add("b", unique_prompt(1, 9), max_tokens=3)
    bench.step()
    assert scheduled(bench) == {"a": 9}, "two blocks are left, and b needs three"
    while "a" not in bench.finished:
        bench.step()
    bench.step()
    assert scheduled(bench) == {"b": 9}
    bench.run()
    assert bench.engine.stats.num_preemptions == 0
    bench.assert_nothing_leaked()


def test_admit_takes_a_cached_block_over_and_half_fills_it_its_old_content_is_gone() -> None:
    bench = EngineBench(num_blocks=2, block_size=4)
    for number in (1, 2):
        bench.add(f"old {number}", unique_prompt(number, 4), max_tokens=1)
        bench.run()
    assert bench.engine._pool.num_cached_free == 2
    bench.add("new", unique_prompt(3, 2), max_tokens=2)
    bench.step()
    (block_id,) = bench.engine._scheduler.requests["new"].block_ids
    assert bench.engine._pool.block_hash(block_id) is None
    bench.run()
    for number, num_hit_tokens in ((2, 4), (1, 0)):
        bench.add(f"again {number}", unique_prompt(number, 4), max_tokens=2, output=oracle_tokens(unique_prompt(number, 4), 1))
        bench.run()
        assert bench.num_cached_tokens[f"again {number}"] == num_hit_tokens
    bench.assert_nothing_leaked()


def test_decode_grows_by_one_block_at_a_time() -> None:
    bench = EngineBench(num_blocks=10, block_size=16)
    bench.add("r", unique_prompt(1, 55), max_tokens=24)
    for _ in range(4):
        bench.step()
    request = bench.engine._scheduler.requests["r"]
    assert len(request.block_ids) == 4
    assert bench.engine._pool.block_hash(request.block_ids[3]) is None
    for _ in range(19):
        bench.step()
    assert len(request.block_ids) == 5
    hashes = [bench.engine._pool.block_hash(block_id) for block_id in request.block_ids]
    assert [block_hash is not None for block_hash in hashes] == [True] * 4 + [False]


def test_reset_prefix_cache_declines_while_in_use_and_forced_keeps_order() -> None:
    bench = EngineBench()
    for name in ("a", "b", "c"):
        bench.add(name, unique_prompt(ord(name), 9), max_tokens=20)
    bench.step()
    assert bench.engine.try_reset_prefix_cache() is False
    hashes = bench.engine._scheduler.requests["a"].block_hashes
    assert bench.engine.num_cached_blocks(hashes) == 2, "nothing was dropped"
    assert bench.engine.try_reset_prefix_cache(force=True) is True
    assert (bench.engine.num_cached_blocks(hashes), bench.engine._pool.num_free) == (0, 64)
    bench.step()
    assert list(scheduled(bench).items()) == [("a", 10), ("b", 10), ("c", 10)], "in their order, from the start"
    bench.run()
    assert all(bench.tokens[name] == oracle_tokens(unique_prompt(ord(name), 9), 20) for name in ("a", "b", "c"))
    bench.assert_nothing_leaked()
