"""Block tables over a pool: all or nothing, and what hits and references are after a refusal."""

from __future__ import annotations

from core.kv.block_pool import BlockPool
from core.kv_cache_manager import KVCacheManager
from core.request import Request
from core.sampling_params import SamplingParams


def make_request(name: str, token_ids: list[int]) -> Request:
    return Request(request_id=name, token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=SamplingParams())


def computed(kv: KVCacheManager, name: str, token_ids: list[int]) -> Request:
    """A request with a table whose full blocks are in the prefix cache."""
    request = make_request(name, token_ids)
    assert kv.try_allocate_table(request, [], len(token_ids))
    request.num_computed_tokens = request.num_written_tokens = len(token_ids)
    kv.commit(request)
    return request


def test_allocate_table_too_few_free_behind_the_hit_is_refused_and_references_stay() -> None:
    pool = BlockPool(8)
    kv = KVCacheManager(pool, 4)
    token_ids = list(range(24))
    ended = computed(kv, "ended", token_ids)
    live = make_request("live", token_ids[:13])
    assert kv.try_allocate_table(live, kv.find_local_hit(live), 12)
    kv.release(ended)
    request = make_request("r", [*token_ids, *range(100, 112)])  # six hit blocks, of which three are free, and three more
    hit = kv.find_local_hit(request)
    assert len(hit) == 6
    assert kv.try_allocate_table(request, hit, 36) is False
    assert [pool.ref_count(block_id) for block_id in hit] == [1, 1, 1, 0, 0, 0]
    assert (request.block_ids, pool.num_free, kv.find_local_hit(request)) == ([], 5, hit)
    assert kv.try_allocate_table(request, hit, 32) is True, "two are free besides"
    assert [pool.ref_count(block_id) for block_id in request.block_ids] == [2, 2, 2, 1, 1, 1, 1, 1]
