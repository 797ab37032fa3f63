"""KV in the memory of a device: the pool, and the copies between it and staging memory on the host.

Runs on CUDA, and on the CPU as well, where "the device" is ordinary memory: so the same code is tested without a GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from core.errors import ConfigError
from core.kv.device_copies import DeviceCopies
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

_logger = logging.getLogger(__name__)
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device
CopyBlocks = Callable[[Sequence[int], Sequence[int]], None]


def find_device(name: str) -> torch.device:
    """The device of engine.device: cpu, cuda or cuda:N. Raises ConfigError where torch does not find it."""
    device = torch.device(name)
    if device.type == "cpu":
        return device
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= num_devices:
        found = f"cpu, or cuda:0 to cuda:{num_devices - 1}" if num_devices else "cpu: this torch finds no CUDA device"
        raise ConfigError("engine.device", name, found)
    return torch.device("cuda", device.index or 0)


class DevicePool:
    """num_blocks blocks of `layout` on a device. memory: [num_blocks, block_stride_bytes] uint8."""

    def __init__(self, layout: KVLayout, memory: Tensor) -> None:
        self.layout = layout
        self.memory = memory
        self.num_blocks = memory.shape[0]

    @classmethod
    def allocate(cls, layout: KVLayout, num_blocks: int, device: torch.device) -> DevicePool:
        """Zero-filled."""
        return cls(layout, torch.zeros((num_blocks, layout.block_stride_bytes), dtype=torch.uint8, device=device))

    def open_copies(self, staging: KVPoolMemory) -> TorchCopies:
        """Copies between this pool and one of the same layout in host memory."""
        slots = memory_of(staging)

        def copy_in(block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
            copy_rows(self.memory, block_ids, slots, slot_ids)

        def copy_out(slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
            copy_rows(slots, slot_ids, self.memory, block_ids)

        return TorchCopies(self.memory.device, self.num_blocks, staging, copy_in, copy_out)


class TorchCopies(DeviceCopies):
    """Carries out copy_in(block_ids, slots) and copy_out(slots, block_ids), each on a thread of its own, which is there to wait.

    On CUDA each also has a stream of its own, which is current while the function runs: it need not wait for what it starts.
    The staging memory is pinned until close(); so a connector that moves its pool's memory elsewhere must have done that before.
    """

    def __init__(
        self, device: torch.device, num_blocks: int, staging: KVPoolMemory, copy_in: CopyBlocks, copy_out: CopyBlocks
    ) -> None:
        self.num_blocks = num_blocks
        self._device = device
        self._pinned = _Pinned(staging, device) if device.type == "cuda" else None
        self._copy_in, self._copy_out = copy_in, copy_out
        self._in_thread = ThreadPoolExecutor(1, "kv-copy-in")
        self._out_thread = ThreadPoolExecutor(1, "kv-copy-out")
        self._in_stream = self._out_stream = None
        if device.type == "cuda":
            self._in_stream, self._out_stream = (torch.cuda.Stream(device) for _ in range(2))  # type: ignore[no-untyped-call]

    def mark(self) -> object:
        """An event of the calling thread's stream; on the CPU nothing, since what was computed is there."""
        return None if self._in_stream is None else torch.cuda.current_stream(self._device).record_event()

    def copy_in(self, block_ids: Sequence[int], slots: Sequence[int], after: object) -> Future[None]:
        """See DeviceCopies."""
        return self._in_thread.submit(self._run, self._in_stream, after, self._copy_in, block_ids, slots)

    def copy_out(self, slots: Sequence[int], block_ids: Sequence[int], after: object) -> Future[None]:
        """See DeviceCopies."""
        return self._out_thread.submit(self._run, self._out_stream, after, self._copy_out, slots, block_ids)

    @staticmethod
    def _run(
        stream: torch.cuda.Stream | None, after: object, copy: CopyBlocks, sources: Sequence[int], targets: Sequence[int]
    ) -> None:
        with torch.inference_mode():
            if stream is None:
                copy(sources, targets)
                return
            assert isinstance(after, torch.cuda.Event)
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps instead of spinning
            with torch.cuda.stream(stream):
                stream.wait_event(after)
                try:
                    copy(sources, targets)
                finally:  # what was started before a failure is not to go on behind it
                    done.record(stream)
                    done.synchronize()

    def close(self) -> None:
        """See DeviceCopies."""
        for thread in (self._in_thread, self._out_thread):
            thread.shutdown(wait=True, cancel_futures=True)
        if self._pinned is not None:
            self._pinned.release()


class _Pinned:
    """Host memory that the device's copy engines reach by themselves. Where that is refused, copies pass through the driver's."""

    def __init__(self, memory: KVPoolMemory, device: torch.device) -> None:
        self._memory = memory  # must outlive the registration
        self._address = memory_of(memory).data_ptr()
        self._cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):
            code = int(self._cudart.cudaHostRegister(self._address, len(memory.buffer), _PORTABLE))
        self._is_registered = code == 0
        if not self._is_registered:
            _logger.warning("staging memory cannot be pinned (CUDA error %d): copies will be slower", code)

    def release(self) -> None:
        """Safe to repeat."""
        if self._is_registered:
            self._is_registered = False
            self._cudart.cudaHostUnregister(self._address)


def memory_of(pool: KVPoolMemory | DevicePool) -> Tensor:
    """The pool as [num_blocks, block_stride_bytes] uint8, sharing its memory."""
    if isinstance(pool, DevicePool):
        return pool.memory
    return torch.frombuffer(pool.buffer, dtype=torch.uint8).view(pool.num_blocks, pool.layout.block_stride_bytes)


def copy_rows(source: Tensor, source_ids: Sequence[int], target: Tensor, target_ids: Sequence[int]) -> None:
    """Rows of one tensor to rows of another. Between a device and pinned memory this returns before it is done."""
    for first, target_first, length in runs_of(source_ids, target_ids):
        target[target_first : target_first + length].copy_(source[first : first + length], non_blocking=True)


def runs_of(sources: Sequence[int], targets: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(source, target, length) of blocks that follow one another on both sides: one copy instead of many."""
    start = 0
    for end in range(1, len(sources) + 1):
        length = end - start
        is_run = end < len(sources) and sources[end] == sources[start] + length and targets[end] == targets[start] + length
        if not is_run:
            yield sources[start], targets[start], length
            start = end
