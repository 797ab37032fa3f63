"""KV on a device: what the runner writes there, and copies to and from the host. On the CPU, and on a GPU where there is one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from core.errors import ConfigError
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.device_pool import DevicePool, TorchCopies, find_device, memory_of, runs_of
from core.model.runner import TorchModelRunner
from tests.unit.core.model.support import Driver, random_prompt, save_llama

LAYOUT = KVLayout(num_layers=2, block_size=16, num_kv_heads=2, head_dim=16, dtype="float32")
NUM_BLOCKS, NUM_SLOTS = 24, 10
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
ANY_DEVICE = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=needs_gpu)], ids=["on_the_cpu", "where_there_is_a_gpu"]
)


@pytest.fixture
def opened() -> Iterator[list[TorchCopies]]:
    copies: list[TorchCopies] = []
    yield copies
    for one in copies:
        one.close()


class DeviceDriver(Driver):
    """A Driver whose pool is on a device."""

    def __init__(self, folder: Path, device: str, dtype: str) -> None:
        super().__init__(folder, dtype)
        self.pool = DevicePool.allocate(self.description.kv_layout, 256, torch.device(device))
        self.runner = TorchModelRunner.load(folder, self.description, self.pool)


def test_runs_are_all_pairs_in_their_order_and_as_long_as_can_be() -> None:
    rng = random.Random(0)
    for _ in range(200):
        starts = [(rng.randrange(9), rng.randrange(9), rng.randrange(1, 4)) for _ in range(rng.randrange(5))]
        pairs = [(source + step, target + step) for source, target, length in starts for step in range(length)]
        runs = list(runs_of([source for source, _ in pairs], [target for _, target in pairs]))
        assert [(source + step, target + step) for source, target, length in runs for step in range(length)] == pairs
        ends = [(source + length, target + length) for source, target, length in runs]
        assert all(end != begin[:2] for end, begin in zip(ends, runs[1:], strict=False))


@ANY_DEVICE
def test_blocks_copied_in_and_out_elsewhere_are_the_same(device: str, opened: list[TorchCopies]) -> None:
    memory = torch.randint(0, 256, (NUM_BLOCKS, LAYOUT.block_stride_bytes), dtype=torch.uint8)
    pool, staging = DevicePool(LAYOUT, memory.to(device, copy=True)), KVPoolMemory(LAYOUT, NUM_SLOTS)
    copies = pool.open_copies(staging)
    opened.append(copies)
    block_ids, slots, others = [3, 4, 5, 20, 0], [6, 7, 8, 2, 9], [10, 11, 12, 13, 23]
    copies.copy_in(block_ids, slots, copies.mark()).result(60.0)
    assert torch.equal(memory_of(staging)[slots], memory[block_ids])
    copies.copy_out(slots, others, copies.mark()).result(60.0)
    expected = memory.clone()
    expected[others] = memory[block_ids]
    assert torch.equal(pool.memory.cpu(), expected)


@needs_gpu
def test_copies_where_there_is_a_gpu_wait_for_what_was_computed_before_their_mark(opened: list[TorchCopies]) -> None:
    pool, staging = DevicePool.allocate(LAYOUT, NUM_BLOCKS, torch.device("cuda")), KVPoolMemory(LAYOUT, NUM_SLOTS)
    copies = pool.open_copies(staging)
    opened.append(copies)
    memory_of(staging)[5] = 9
    torch.cuda._sleep(500_000_000)  # a step that takes long, still running when the transfers start
    pool.memory[1].fill_(7)
    pool.memory[2].fill_(8)
    mark = copies.mark()
    saved, loaded = copies.copy_in([1], [0], mark), copies.copy_out([5], [2], mark)
    assert not saved.done()
    saved.result(60.0)
    loaded.result(60.0)
    assert memory_of(staging).is_pinned()
    assert bytes(staging.block(0)) == bytes([7]) * LAYOUT.block_bytes
    assert bool((pool.memory[2] == 9).all())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runner_over_a_device_pool_on_the_cpu_gives_the_same_bits(tmp_path: Path, dtype: str) -> None:
    save_llama(tmp_path)
    plain, staged = Driver(tmp_path, dtype), DeviceDriver(tmp_path, "cpu", dtype)
    requests = [driver.run_alone(driver.add("r", random_prompt(100, 1)), 6, chunk=48) for driver in (plain, staged)]
    assert requests[0].output == requests[1].output
    assert torch.equal(plain.kv(requests[0]), staged.kv(requests[1]))


@needs_gpu
def test_runner_where_there_is_a_gpu_samples_the_same_tokens_and_nearly_the_same_kv(tmp_path: Path) -> None:
    save_llama(tmp_path)
    plain, on_gpu = Driver(tmp_path), DeviceDriver(tmp_path, "cuda", "float32")
    requests = [driver.run_alone(driver.add("r", random_prompt(300, 1)), 6, chunk=100) for driver in (plain, on_gpu)]
    assert requests[0].output == requests[1].output
    torch.testing.assert_close(on_gpu.kv(requests[1]).cpu(), plain.kv(requests[0]), rtol=1e-3, atol=1e-3)


def test_device_that_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ConfigError, match=r"engine\.device.*cuda:98.*cpu"):
        find_device("cuda:98")
