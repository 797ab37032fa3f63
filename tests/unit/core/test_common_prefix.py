"""The number of leading blocks that all running requests share."""

from __future__ import annotations

from core.kv.block_pool import BlockPool
from core.kv_cache_manager import KVCacheManager
from core.request import Request
from core.sampling_params import SamplingParams

BLOCK_SIZE = 4


def admit(kv: KVCacheManager, name: str, prefix: list[int], num_tokens: int) -> Request:
    """A request whose table begins with the blocks `prefix`."""
    request = Request(request_id=name, token_ids=list(range(num_tokens)), num_prompt_tokens=num_tokens, sampling=SamplingParams())
    assert kv.try_allocate_table(request, prefix, num_tokens)
    return request


def test_common_prefix_tree_of_requests_counts_what_all_share() -> None:
    kv = KVCacheManager(BlockPool(100), BLOCK_SIZE)
    first = admit(kv, "first", [], 40)
    second = admit(kv, "second", first.block_ids[:7], 40)
    third = admit(kv, "third", second.block_ids[:3], 40)
    assert kv.num_common_prefix_blocks([first, second]) == 7
    assert kv.num_common_prefix_blocks([first, second, third]) == 3
    assert kv.num_common_prefix_blocks([third, first, second]) == 3
    assert kv.num_common_prefix_blocks([first]) == 0
    assert kv.num_common_prefix_blocks([]) == 0


def test_common_prefix_one_odd_request_is_none_until_it_ends() -> None:
    kv = KVCacheManager(BlockPool(100), BLOCK_SIZE)
    first = admit(kv, "first", [], 40)
    second = admit(kv, "second", first.block_ids[:7], 40)
    odd = admit(kv, "odd", [], 40)
    assert kv.num_common_prefix_blocks([first, second, odd]) == 0
    kv.release(odd)
    assert kv.num_common_prefix_blocks([first, second]) == 7


def test_common_prefix_blocks_pinned_by_transfers_are_not_taken_for_shared() -> None:
    kv = KVCacheManager(BlockPool(100), BLOCK_SIZE)
    first = admit(kv, "first", [], 40)
    second = admit(kv, "second", first.block_ids[:2], 40)
    third = admit(kv, "third", first.block_ids[:2], 40)
    kv.pool.add_references(first.block_ids)
    kv.pool.add_references(first.block_ids)
    assert kv.num_common_prefix_blocks([first, second, third]) == 2


def test_common_prefix_odd_request_among_many_costs_no_comparison_of_tables() -> None:
    compared = 0

    class CountingTable(list[int]):
        def __getitem__(self, key):  # type: ignore[no-untyped-def,override]
            nonlocal compared
            compared += 1
            return super().__getitem__(key)

    kv = KVCacheManager(BlockPool(1000), BLOCK_SIZE)
    first = admit(kv, "first", [], 40)
    requests = [first, *(admit(kv, f"r{index}", first.block_ids[:7], 40) for index in range(50)), admit(kv, "odd", [], 40)]
    for request in requests[1:]:
        request.block_ids = CountingTable(request.block_ids)
    assert kv.num_common_prefix_blocks(requests) == 0
    assert compared == 0
    assert kv.num_common_prefix_blocks(requests[:-1]) == 7
    assert compared == 50
