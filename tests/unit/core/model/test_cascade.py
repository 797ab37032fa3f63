"""Requests that share blocks read their tiles together: the same bits as one by one, for any mix, and less is read."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from core.model.attention import AttentionBatch
from core.model.attention_torch import TorchAttention
from core.model.shared_tiles import CascadeRule, find_sharing
from core.sampling_params import SamplingParams
from tests.unit.core.model.support import BLOCK_SIZE, Driver, random_prompt, save_llama

ALWAYS, NEVER = CascadeRule(min_requests=2, min_saved_reads=0), CascadeRule(min_requests=1_000_000)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((9, 3, 64), (6, 2, 16), (5, 5, 20), (16, 2, 32), (8, 1, 64))  # query heads, KV heads, head_dim


@dataclass
class Mix:
    """A random batch over a pool: requests on a tree of prefixes, decoding or computing chunks. What nobody wrote is NaN."""

    rng: random.Random
    shape: tuple[int, int, int]
    block_size: int
    dtype: torch.dtype
    tables: list[list[int]] = field(default_factory=list)
    seq_lens: list[int] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        _, kv_heads, head_dim = self.shape
        num_blocks = 11_000 // self.block_size
        self.free = self.rng.sample(range(num_blocks), num_blocks)
        self.pool = torch.full((num_blocks, 2, self.block_size, kv_heads, head_dim), float("nan")).to(self.dtype)

    def take(self, num_tokens: int, num_written: int) -> list[int]:
        """Blocks for num_tokens tokens, the first num_written of which have KV."""
        block_ids = [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]
        positions = torch.arange(num_written)
        where = torch.tensor(block_ids, dtype=torch.int64)[positions // self.block_size], positions % self.block_size
        self.pool.transpose(1, 2)[where] = torch.randn(num_written, 2, *self.pool.shape[3:]).to(self.dtype)
        return block_ids

    def add_request(self, prefix: list[int], num_before: int, num_tokens: int) -> None:
        """It has computed the prefix and num_before tokens more, and computes num_tokens now."""
        num_own = num_before + num_tokens
        self.tables.append(prefix + self.take(num_own, num_before))
        self.seq_lens.append(len(prefix) * self.block_size + num_own)
        self.num_tokens.append(num_tokens)

    def add_request_within(self, prefix: list[int], num_tokens: int) -> None:
        """It computes the last num_tokens of the prefix's tokens again, in the very blocks that others read."""
        self.tables.append(prefix)
        self.seq_lens.append(len(prefix) * self.block_size)
        self.num_tokens.append(num_tokens)

    def random_qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows for the batch. What is computed again is what was there."""
        heads, kv_heads, head_dim = self.shape
        num_rows = -(-sum(self.num_tokens) // 8) * 8
        query, key, value = (torch.randn(num_rows, n, head_dim).to(self.dtype) for n in (heads, kv_heads, kv_heads))
        slots = self.batch(0).slot_mapping
        before = self.pool[slots // self.block_size, :, slots % self.block_size]
        is_written = ~before.isnan().flatten(1).any(1)
        key[: len(slots)][is_written], value[: len(slots)][is_written] = before[is_written].unbind(1)
        return query, key, value

    @property
    def num_common_blocks(self) -> int:
        same = [len(set(column)) == 1 for column in zip(*self.tables, strict=False)]
        return same.index(False) if False in same else len(same)

    def batch(self, num_common_blocks: int) -> AttentionBatch:
        width = max(map(len, self.tables))
        slots = [
            table[position // self.block_size] * self.block_size + position % self.block_size
            for table, seq_len, count in zip(self.tables, self.seq_lens, self.num_tokens, strict=True)
            for position in range(seq_len - count, seq_len)
        ]
        return AttentionBatch(
            slot_mapping=torch.tensor(slots),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for table in self.tables]),
            query_start=torch.tensor([0, *np.cumsum(self.num_tokens)]),
            seq_lens=torch.tensor(self.seq_lens),
            num_common_blocks=num_common_blocks,
        )

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], rule: CascadeRule, num_common_blocks: int = 0) -> tuple[Tensor, int]:
        """The output's bits, and how many tiles were read."""
        heads, kv_heads, head_dim = self.shape
        attention = TorchAttention(self.block_size, heads, kv_heads, rule=rule)
        pool = self.pool.clone()
        with torch.inference_mode():
            attention.begin_step(self.batch(num_common_blocks))
            output = attention.attend(*qkv, pool[:, 0], pool[:, 1], head_dim**-0.5)
        assert not output.isnan().any()
        return output.view(torch.int32 if self.dtype == torch.float32 else torch.int16), attention.plan.num_tile_reads


def random_mix(seed: int) -> Mix:
    """Prefixes end anywhere around the ends of tiles; some requests are within a prefix that others are long past."""
    rng = random.Random(seed)
    mix = Mix(rng, rng.choice(SHAPES), rng.choice((16, 16, 32, 24)), rng.choice(DTYPES))
    blocks_per_tile = 256 // mix.block_size
    prefixes: list[list[int]] = [[]]
    for _ in range(rng.randint(1, 3)):
        num_blocks = rng.choice((1, blocks_per_tile - 1, blocks_per_tile, blocks_per_tile + 1, 2 * blocks_per_tile))
        prefixes.append(rng.choice(prefixes) + mix.take(num_blocks * mix.block_size, num_blocks * mix.block_size))
    for _ in range(rng.randint(2, 8)):
        prefix = rng.choice(prefixes)
        if rng.random() < 0.3:
            prefix = prefix[: rng.randint(0, len(prefix))]
        if prefix and rng.random() < 0.2:
            mix.add_request_within(prefix, min(rng.choice((1, 2, 20, 200)), len(prefix) * mix.block_size))
            continue
        mix.add_request(prefix, rng.choice((0, 5, mix.block_size, 70, 257)), rng.choice((1, 1, 1, 1, 2, 5, 40, 130, 270)))
    return mix


@pytest.mark.parametrize("seeds", [range(12), range(12, 24), range(24, 36)])
def test_attend_random_batches_sharing_leaves_every_bit(seeds: range) -> None:
    num_saved = 0
    for seed in seeds:
        torch.manual_seed(seed)
        mix = random_mix(seed)
        qkv = mix.random_qkv()
        expected, num_alone = mix.attend(qkv, NEVER)
        known = mix.num_common_blocks
        for rule, num_common_blocks in ((ALWAYS, 0), (ALWAYS, known), (CascadeRule(3, 0), known // 2), (CascadeRule(), known)):
            found, num_reads = mix.attend(qkv, rule, num_common_blocks)
            assert torch.equal(found, expected), f"seed {seed}, {rule}, {num_common_blocks} blocks known to be common"
            assert num_reads <= num_alone
            num_saved += num_alone - num_reads
    assert num_saved > 10, "hardly anything was shared"


@pytest.mark.parametrize("num_requests", [3, 9, 70])
def test_attend_batch_over_one_prefix_reads_it_once(num_requests: int) -> None:
    torch.manual_seed(0)
    mix = Mix(random.Random(0), (6, 2, 16), 16, torch.bfloat16)
    prefix = mix.take(1104, 1104)  # four whole tiles, and more
    for index in range(num_requests):
        mix.add_request(prefix, index % 5, 1)
    qkv = mix.random_qkv()
    expected, num_alone = mix.attend(qkv, NEVER)
    found, num_reads = mix.attend(qkv, CascadeRule())
    assert torch.equal(found, expected)
    assert (num_alone, num_reads) == (5 * num_requests, 4 + num_requests)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_runner_requests_over_one_prefix_same_bits_as_alone(tmp_path: Path, dtype: str) -> None:
    """Some decode, some compute what follows the prefix, one computes the prefix's last tile again, one shares nothing."""
    save_llama(tmp_path)
    asking = SamplingParams(temperature=0.0, max_tokens=100, logprobs=3)
    shared = random_prompt(528, seed=1)
    prompts = [shared + random_prompt(count, seed=10 + count) for count in (1, 2, 5, 40, 300)] + [random_prompt(530, seed=9)]
    alone = Driver(tmp_path, dtype, seed=1, cpu_kernels="torch")
    expected = []
    for index, prompt in enumerate(prompts):
        request = alone.run_alone(alone.add(f"r{index}", prompt, asking), 4, chunk=10_000)
        expected.append((request.output, request.logprobs, alone.kv(request)))
        alone.remove(request)
    together = Driver(tmp_path, dtype, num_blocks=400, seed=2, cpu_kernels="torch")
    first = together.run_alone(together.add("first", shared, asking), 1, chunk=10_000)
    requests = [together.add(f"r{index}", prompt, asking) for index, prompt in enumerate(prompts)]
    for index, request in enumerate(requests[:-1]):
        num_tokens = 528 if index else 272  # the second tile is then computed again, in a block of its own
        request.block_ids, request.num_computed_tokens = first.block_ids[: num_tokens // BLOCK_SIZE], num_tokens
    reads = []
    while any(len(request.output) < 4 for request in requests):
        together.step([(request, min(len(request.token_ids) - request.num_computed_tokens, 200)) for request in requests])
        plan = together.runner._attention.plan  # type: ignore[attr-defined]
        reads.append(0 if plan.shared is None else sum(run.num_tiles for run in plan.shared.runs))
    assert min(reads) >= 2, "the shared tiles were read one by one"
    for request, (output, logprobs, kv) in zip(requests, expected, strict=True):
        assert request.output[:4] == output
        assert request.logprobs[:4] == logprobs
        found = together.kv(request)[:, :, : kv.shape[2]]
        assert torch.equal(found.contiguous().view(torch.uint8), kv.contiguous().view(torch.uint8))


def sharing_of(tables: list[list[int]], num_full: list[int], rule: CascadeRule = ALWAYS, num_common: int = 0):  # type: ignore[no-untyped-def]
    return find_sharing(np.array(tables), num_full, [1] * len(tables), 2, rule, num_common)


def test_sharing_tree_of_prefixes_groups_lie_side_by_side() -> None:
    tables = [
        [1, 2, 3, 4, 5, 6],
        [9, 9, 9, 9, 9, 9],
        [1, 2, 3, 4, 7, 8],
        [1, 2, 3, 0, 5, 6],
        [1, 2, 3, 4, 5, 6],
        [1, 2, 3, 0, 5, 6],
    ]
    sharing = sharing_of(tables, [3, 3, 3, 3, 3, 3])
    assert sharing.num_tiles == [3, 0, 2, 3, 3, 3]
    assert sharing.num_tokens == 5
    by_tile = {tile: sorted(sorted(group.members) for group in sharing.groups if group.tile == tile) for tile in range(3)}
    assert by_tile == {0: [[0, 2, 3, 4, 5]], 1: [[0, 2, 4], [3, 5]], 2: [[0, 4], [3, 5]]}
    for group in sharing.groups:
        numbers = range(group.first_token, group.first_token + group.num_tokens)
        assert sorted(sharing.first_token[r] for r in group.members) == list(numbers)


def test_sharing_request_within_the_prefix_shares_only_what_it_sees_whole() -> None:
    sharing = sharing_of([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]], [2, 1, 0])
    assert sharing.num_tiles == [1, 1, 0]
    assert [(group.tile, group.members) for group in sharing.groups] == [(0, [0, 1])]


def test_sharing_rule_leaves_small_groups_and_small_gains_alone() -> None:
    tables = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], [1, 2, 7, 8, 9, 9]]
    assert sharing_of(tables, [3, 3, 3], CascadeRule(3, 0)).num_tiles == [1, 1, 1]
    assert sharing_of(tables, [3, 3, 3], CascadeRule(2, 2)).num_tiles == [3, 3, 1]
    assert sharing_of(tables, [2, 2, 3], CascadeRule(2, 2)).num_tiles == [1, 1, 1], "two requests would save one read"
    assert sharing_of(tables, [3, 3, 3], CascadeRule(2, 3)).groups == [], "three have one tile in common"
    assert sharing_of(tables[:2], [3, 3], CascadeRule(2, 3)).num_tiles == [3, 3]
    assert sharing_of(tables[:2], [3, 2], CascadeRule(2, 3)).groups == []


def test_sharing_blocks_known_to_be_common_are_not_looked_at() -> None:
    tables = [[1, 2, 3, 4], [0, 0, 3, 4]]
    assert sharing_of(tables, [2, 2], num_common=2).num_tiles == [2, 2]
    assert sharing_of(tables, [2, 2], num_common=1).num_tiles == [0, 0]
