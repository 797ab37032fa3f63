"""How a model is cut into ranks: nothing is lost or doubled, groups of heads stay whole, work is even."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch.nn import functional

from core.errors import ConfigError, ModelLoadError
from core.model.architecture import ModelArchitecture, RotaryScaling
from core.model.shards import Shard, slice_projection, split_model

SMOLLM2 = ModelArchitecture(
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    rms_norm_eps=1e-5,
    rope_theta=1e5,
    rope_scaling=RotaryScaling(),
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    max_position_embeddings=8192,
)
TINY = dataclasses.replace(
    SMOLLM2, hidden_size=24, intermediate_size=40, num_heads=6, num_kv_heads=3, head_dim=4, vocab_size=101, num_layers=1
)


def joined(parts: list[range]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


@pytest.mark.parametrize("architecture", [SMOLLM2, TINY])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_split_model_covers_everything_once_and_nobody_has_nothing(architecture: ModelArchitecture, num_ranks: int) -> None:
    shards = split_model(architecture, num_ranks)
    group = architecture.num_heads // architecture.num_kv_heads
    assert joined([shard.heads for shard in shards]) == list(range(architecture.num_heads))
    assert joined([shard.kv_heads for shard in shards]) == list(range(architecture.num_kv_heads))
    assert joined([shard.intermediate for shard in shards]) == list(range(architecture.intermediate_size))
    assert joined([shard.vocabulary for shard in shards]) == list(range(architecture.vocab_size))
    for shard in shards:
        assert len(shard.heads) == group * len(shard.kv_heads) > 0
        assert shard.intermediate and shard.vocabulary
        narrow = shard.narrow(architecture)
        assert (narrow.num_heads, narrow.num_kv_heads) == (len(shard.heads), len(shard.kv_heads))
        assert (narrow.head_dim, narrow.hidden_size) == (architecture.head_dim, architecture.hidden_size)


def test_split_model_uneven_heads_are_evened_out_by_the_feed_forward_part() -> None:
    first, second = split_model(SMOLLM2, 2)
    assert (len(first.kv_heads), len(second.kv_heads)) == (2, 1)
    assert len(first.intermediate) % 32 == len(second.intermediate) % 32 == 0

    def num_weights(shard: Shard) -> int:
        return (2 * len(shard.heads) + 2 * len(shard.kv_heads)) * 64 + 3 * len(shard.intermediate)

    assert num_weights(first) == pytest.approx(num_weights(second), rel=0.05)
    assert [len(shard.intermediate) for shard in split_model(SMOLLM2, 3)] == [512, 512, 512]


@pytest.mark.parametrize("num_ranks", [4, 64])
def test_split_model_more_ranks_than_kv_heads_is_refused(num_ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size.*1 to 3"):
        split_model(SMOLLM2, num_ranks)


def test_split_model_of_another_family_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size.*1 for gemma"):
        split_model(dataclasses.replace(SMOLLM2, family="gemma", norm_offset=1.0), 2)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_slice_projection_parts_together_are_the_whole(num_ranks: int) -> None:
    """By outputs: each part has its rows of the product. By inputs: the parts' products add up to it."""
    torch.manual_seed(0)
    heads, intermediate, hidden = 4, TINY.intermediate_size, TINY.hidden_size
    shards = split_model(TINY, num_ranks)
    inputs = torch.randn(5, hidden)
    qkv, qkv_bias = torch.randn((6 + 3 + 3) * heads, hidden), torch.randn((6 + 3 + 3) * heads)
    whole = functional.linear(inputs, qkv, qkv_bias).view(5, 12, heads)
    gate_up = torch.randn(2 * intermediate, hidden)
    gate, up = functional.linear(inputs, gate_up).chunk(2, dim=-1)
    down, down_bias, activated = torch.randn(hidden, intermediate), torch.randn(hidden), torch.randn(5, intermediate)
    o_proj, attended = torch.randn(hidden, 6 * heads), torch.randn(5, 6, heads)
    down_sum, o_sum = torch.zeros(5, hidden), torch.zeros(5, hidden)
    for shard in shards:
        kv, h, m = shard.kv_slice, slice(shard.heads.start, shard.heads.stop), shard.intermediate
        part = functional.linear(inputs, *slice_projection(shard, TINY, "model.layers.0.self_attn.qkv_proj", qkv, qkv_bias))
        expected = torch.cat((whole[:, :6][:, h], whole[:, 6:9][:, kv], whole[:, 9:][:, kv]), dim=1)
        assert torch.allclose(part, expected.flatten(1), atol=1e-5)
        part = functional.linear(inputs, *slice_projection(shard, TINY, "model.layers.0.mlp.gate_up_proj", gate_up, None))
        expected = torch.cat((gate[:, m.start : m.stop], up[:, m.start : m.stop]), dim=1)
        assert torch.allclose(part, expected, atol=1e-5)
        weight, bias = slice_projection(shard, TINY, "model.layers.0.mlp.down_proj", down, down_bias)
        down_sum += functional.linear(activated[:, m.start : m.stop], weight, bias)
        weight, bias = slice_projection(shard, TINY, "model.layers.0.self_attn.o_proj", o_proj, None)
        o_sum += functional.linear(attended[:, h].flatten(1), weight, bias)
    assert torch.allclose(down_sum, functional.linear(activated, down, down_bias), atol=1e-5)
    assert torch.allclose(o_sum, functional.linear(attended.flatten(1), o_proj), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape"), [("mlp.router", (4, 24)), ("mlp.down_proj", (24, 20)), ("self_attn.qkv_proj", (24, 24))]
)
def test_slice_projection_of_another_name_or_size_is_refused(name: str, shape: tuple[int, int]) -> None:
    with pytest.raises(ModelLoadError, match=name):
        slice_projection(split_model(TINY, 2)[0], TINY, f"model.layers.0.{name}", torch.zeros(shape), None)
