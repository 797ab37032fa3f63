"""From options to a runner that is ready: finds the model, sizes and allocates the KV pool, loads the weights.

What a node's process calls once at start.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from core.config import MIB, EngineOptions, ModelOptions
from core.engine_model import EngineModel
from core.errors import ConfigError
from core.kv.device_copies import OpenCopies
from core.kv.hashing import Namespace
from core.kv.pool_memory import KVPoolMemory
from core.model.cuda_graphs import CudaRecorder
from core.model.description import ModelDescription, describe_model
from core.model.device_pool import DevicePool, find_device
from core.model.kernels import choose_native, kernel_class
from core.model.parallel import ParallelRunner
from core.model.parallel_loading import load_parallel
from core.model.runner import TORCH_DTYPES, TorchModelRunner
from core.model_files import resolve_model

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that a node needs of the model room. model_dir: with the tokenizer. num_blocks: of the KV pool.

    connector_memory: what a connector is to read and write: the KV pool itself or, where that is on a device, staging memory;
    open_copies then copies between the two, and is None otherwise.
    """

    model: EngineModel
    runner: TorchModelRunner | ParallelRunner
    model_dir: Path
    num_blocks: int
    connector_memory: KVPoolMemory
    open_copies: OpenCopies | None


def load_model(model: ModelOptions, engine: EngineOptions) -> LoadedModel:
    """Raises ModelLoadError or ConfigError."""
    started_s = time.monotonic()
    device = find_device(engine.device)
    model_dir = resolve_model(model.path)
    description = describe_model(model_dir, model, engine.block_size)
    layout = description.kv_layout
    num_blocks = engine.num_blocks or engine.kv_pool_mib * MIB // layout.block_stride_bytes
    if num_blocks < 1:
        raise ConfigError("engine.kv_pool_mib", engine.kv_pool_mib, f"at least {layout.block_stride_bytes / MIB:.1f}, one block")
    try:
        runner, connector_memory, open_copies = _load_runner(model_dir, description, engine, num_blocks, device)
    except torch.OutOfMemoryError as error:
        pool_mib = num_blocks * layout.block_stride_bytes // MIB
        raise ConfigError("engine.kv_pool_mib", pool_mib, f"a pool that fits on {device} beside the weights") from error
    native = choose_native(engine.cpu_kernels, device, TORCH_DTYPES[description.dtype])
    kernels = kernel_class(native) if device.type == "cpu" else device.type
    _logger.info(
        "loaded %s as %s%s on %s (%s kernels) in %.1f s, %d rank(s); KV pool: %d blocks of %d tokens in %s, %.0f MiB",
        model.path,
        model.dtype,
        "" if model.quantization == "none" else f" with {model.quantization} projections",
        device,
        kernels,
        time.monotonic() - started_s,
        engine.tensor_parallel_size,
        num_blocks,
        engine.block_size,
        layout.dtype,
        num_blocks * layout.block_stride_bytes / MIB,
    )
    return LoadedModel(
        model=EngineModel(
            namespace=Namespace(_fingerprint_by(kernels, description.model_fingerprint), layout.fingerprint, engine.block_size),
            layout=layout,
            max_model_len=description.max_model_len,
            vocab_size=description.vocab_size,
            eos_token_ids=description.eos_token_ids,
        ),
        runner=runner,
        model_dir=model_dir,
        num_blocks=num_blocks,
        connector_memory=connector_memory,
        open_copies=open_copies,
    )


def _load_runner(
    model_dir: Path, description: ModelDescription, engine: EngineOptions, num_blocks: int, device: torch.device
) -> tuple[TorchModelRunner | ParallelRunner, KVPoolMemory, OpenCopies | None]:
    """The runner over a KV pool of num_blocks, and what a connector is to have of that."""
    layout = description.kv_layout
    num_slots = 0
    if device.type != "cpu":
        num_slots = engine.staging_mib * MIB // layout.block_stride_bytes
        if num_slots < 2:
            least = f"at least {2 * layout.block_stride_bytes / MIB:.1f}, two blocks"
            raise ConfigError("engine.staging_mib", engine.staging_mib, least)
    if engine.tensor_parallel_size > 1:
        parallel = load_parallel(model_dir, description, engine, num_blocks, num_slots)
        return parallel.runner, parallel.connector_memory, parallel.open_copies
    pool = DevicePool.allocate(layout, num_blocks, device) if num_slots else KVPoolMemory(layout, num_blocks)
    runner = TorchModelRunner.load(
        model_dir,
        description,
        pool,
        engine.num_threads,
        max_lora_rank=engine.max_lora_rank,
        is_batch_invariant=engine.batch_invariant,
        cpu_kernels=engine.cpu_kernels,
    )
    if device.type == "cuda":
        runner.use_decode_graphs(CudaRecorder(device), engine.max_num_seqs, description.max_model_len)
    if isinstance(pool, DevicePool):
        return runner, KVPoolMemory(layout, num_slots), pool.open_copies
    return runner, pool, None


def _fingerprint_by(kernels: str, model_fingerprint: bytes) -> bytes:
    """Kernels round differently: KV of one kind must not be a hit for the other, or answers depend on who computed what.

    The number of ranks is not part of it: what they save is to be read by nodes of any other number, though that rounds
    differently, too. Where answers must not depend on that, a cluster's nodes have the same number.
    """
    return sha256(model_fingerprint + kernels.encode()).digest()[: len(model_fingerprint)]
