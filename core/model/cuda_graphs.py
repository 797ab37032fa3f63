"""Decode steps as CUDA graphs (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs): recorded once per batch size,
then replayed, so that a step costs the host one launch instead of one per kernel.

What differs between steps is copied into buffers that the graph refers to. A batch is padded to the next recorded size by
repeating its first request: that computes and writes the same KV to the same slot again, so padding needs no slot of its own.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from core.model.attention_cuda import DecodeBuffers

_logger = logging.getLogger(__name__)
IntArray = npt.NDArray[np.int64]
Forward = Callable[
    [Tensor, Tensor, DecodeBuffers], Tensor
]  # (token_ids [size], positions [size], buffers) -> hidden [size, hidden]


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """One token of each request. token_ids, positions, slot_mapping: [num_requests]; block_tables: [num_requests, any]."""

    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    block_tables: IntArray


class Recorded(Protocol):
    """Work that was recorded; reads and writes the tensors that it was recorded with."""

    def replay(self) -> None:
        """Start it; what follows on the stream sees its results."""


Record = Callable[[Callable[[], Tensor]], tuple[Recorded, Tensor]]  # of work: the recording, and where its result will be


def padded_batch_sizes(max_num_seqs: int, row_multiple: int) -> list[int]:
    """Sizes to record, ascending multiples of row_multiple up to all of max_num_seqs: few, and no more than a third of a large
    batch is padding.
    """
    most = -(-max_num_seqs // row_multiple) * row_multiple
    sizes, size = [], row_multiple
    while size < most:
        sizes.append(size)
        size += max(size // (2 * row_multiple), 1) * row_multiple
    return [*sizes, most]


def pad_batch(batch: DecodeBatch, size: int) -> DecodeBatch:
    """`size` requests, those beyond the batch's own like its first."""
    order = np.zeros(size, dtype=np.int64)
    order[: len(batch.token_ids)] = np.arange(len(batch.token_ids))
    return DecodeBatch(batch.token_ids[order], batch.positions[order], batch.slot_mapping[order], batch.block_tables[order])


class DecodeGraphs:
    """Recordings by size, made when a size is first needed. Step thread only, inside torch.inference_mode."""

    def __init__(self, forward: Forward, record: Record, sizes: Sequence[int], max_blocks: int, device: torch.device) -> None:
        """max_blocks: of a block table, of the longest sequence."""
        self._forward = forward
        self._record = record
        self._sizes = sorted(sizes)
        self._max_blocks = max_blocks
        self._device = device
        self._recorded: dict[int, _Recording] = {}
        self._is_broken = False

    def try_run(self, batch: DecodeBatch) -> Tensor | None:
        """Hidden states [size >= num_requests, hidden], valid until the next call. None: the batch fits no size, or recording
        failed once, and the step has to run without a graph. Writes the requests' KV.
        """
        place = bisect.bisect_left(self._sizes, len(batch.token_ids))
        if self._is_broken or place == len(self._sizes) or batch.block_tables.shape[1] > self._max_blocks:
            return None
        size = self._sizes[place]
        padded = pad_batch(batch, size)
        recording = self._recorded.get(size)
        if recording is None:
            recording = self._start(size, padded)
            if recording is None:
                return None
        recording.fill(padded)
        recording.graph.replay()
        return recording.hidden

    def _start(self, size: int, batch: DecodeBatch) -> _Recording | None:
        """Recording runs the work with the batch's own places, so that what it writes is what the step would."""
        buffers = DecodeBuffers.allocate(size, self._max_blocks, self._device)
        token_ids, positions = (torch.zeros(size, dtype=torch.int64, device=self._device) for _ in range(2))
        fill = _Fill(token_ids, positions, buffers)
        fill(batch)
        try:
            graph, hidden = self._record(lambda: self._forward(token_ids, positions, buffers))
        except RuntimeError as error:
            _logger.warning(
                "decode steps run without CUDA graphs: %s", str(error).strip().splitlines()[0] if str(error) else error
            )
            self._is_broken = True
            self._recorded.clear()
            return None
        self._recorded[size] = _Recording(graph, hidden, fill)
        return self._recorded[size]


@dataclass(frozen=True, slots=True)
class _Fill:
    token_ids: Tensor
    positions: Tensor
    buffers: DecodeBuffers

    def __call__(self, batch: DecodeBatch) -> None:
        """Copy a batch of exactly this size in."""
        self.token_ids.copy_(torch.from_numpy(batch.token_ids))
        self.positions.copy_(torch.from_numpy(batch.positions))
        self.buffers.slot_mapping.copy_(torch.from_numpy(batch.slot_mapping))
        self.buffers.seq_lens.copy_(torch.from_numpy(batch.positions + 1))
        self.buffers.block_tables[:, : batch.block_tables.shape[1]].copy_(torch.from_numpy(batch.block_tables))


@dataclass(frozen=True, slots=True)
class _Recording:
    graph: Recorded
    hidden: Tensor
    fill: _Fill


class CudaRecorder:
    """Record on CUDA. All graphs share one memory pool, since one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: object = None

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Recorded, Tensor]:
        """Run `work` twice on a side stream, as kernels allocate and choose on their first run, then record it."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                work()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads copy KV meanwhile; what they ask of the device does not concern the recording.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            hidden = work()
        self._pool = self._pool or graph.pool()
        return graph, hidden
