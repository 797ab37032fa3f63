"""The plugin's view of vLLM's tensors, on tensors like those of several attention backends."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: make test-vllm installs it", allow_module_level=True)

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from connectors.vllm_plugin import _LayerCaches
from core.errors import ConfigError
from core.kv.pool_memory import KVPoolMemory

NUM_BLOCKS, HEADS, BLOCK, HEAD = 6, 3, 4, 8
NAMES = ["layers.0", "layers.1"]


def head_major() -> torch.Tensor:
    """As the backend for CPUs: [blocks, heads, tokens, K and V]."""
    return torch.randn(NUM_BLOCKS, HEADS, BLOCK, 2 * HEAD)


def token_major() -> torch.Tensor:
    """The same shape over memory in which tokens come before heads."""
    return torch.randn(NUM_BLOCKS, BLOCK, HEADS, 2 * HEAD).permute(0, 2, 1, 3)


def packed() -> torch.Tensor:
    """Blocks with another layer's pages in between."""
    return torch.randn(NUM_BLOCKS, 2, HEADS, BLOCK, 2 * HEAD)[:, 1]


def kv_first() -> torch.Tensor:
    """K of all blocks, then V of all blocks: a block is two ranges."""
    return torch.randn(2, NUM_BLOCKS, HEADS, BLOCK, HEAD).transpose(0, 1)


def understand(caches: dict[str, torch.Tensor], num_blocks: int = NUM_BLOCKS) -> _LayerCaches:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD, dtype=torch.float32)
    group = SimpleNamespace(layer_names=NAMES, kv_cache_spec=spec)
    layer: Any = SimpleNamespace(isa="vec", get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "TEST"))
    parallel = SimpleNamespace(rank=1, tensor_parallel_size=2)
    compilation = SimpleNamespace(static_forward_context=dict.fromkeys(NAMES, layer))
    config = SimpleNamespace(parallel_config=parallel, compilation_config=compilation)
    return _LayerCaches(caches, config, SimpleNamespace(kv_cache_groups=[group], num_blocks=num_blocks))


@pytest.mark.parametrize("make", [head_major, token_major, packed])
def test_blocks_copied_to_the_pool_and_back_elsewhere_are_the_same(make: Any) -> None:
    caches = {name: make() for name in NAMES}
    layers = understand(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    layers.bind(KVPoolMemory(layers.rank_layout.layout, 4))
    layers.copy_in([5, 2], [3, 0])
    layers.copy_out([3, 0], [1, 4])
    for name, cache in caches.items():
        assert torch.equal(cache[1], before[name][5]) and torch.equal(cache[4], before[name][2])
        assert all(torch.equal(cache[number], before[name][number]) for number in (0, 2, 3, 5))


def test_order_in_memory_is_part_of_the_fingerprint_and_place_is_not() -> None:
    made = [understand({name: make() for name in NAMES}) for make in (head_major, head_major, token_major)]
    first, again, other = (layers.rank_layout.fingerprint for layers in made)
    assert first == again != other
    assert "tp=1/2" in made[0].rank_layout.details


def test_layers_that_share_a_cache_are_moved_once() -> None:
    shared = head_major()
    assert understand(dict.fromkeys(NAMES, shared)).rank_layout.layout.num_layers == 1


@pytest.mark.parametrize(
    ("make", "num_blocks"),
    [(kv_first, NUM_BLOCKS), (head_major, NUM_BLOCKS // 2), (lambda: head_major()[..., :HEAD], NUM_BLOCKS)],
)
def test_tensors_that_are_not_understood_are_refused_with_their_shape(make: Any, num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=r"KV cache of layers\.0.*shape"):
        understand({name: make() for name in NAMES}, num_blocks)


def test_quantized_cache_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        understand({name: head_major().to(torch.uint8) for name in NAMES})
