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
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory
from core.model.cuda_graphs import CudaRecorder
from core.model.description import describe_model
from core.model.device_pool import DevicePool, find_device
from core.model.kernels import choose_native, kernel_class
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
    runner: TorchModelRunner
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
        pool, connector_memory = _allocate(layout, num_blocks, device, engine.staging_mib)
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
    except torch.OutOfMemoryError as error:
        pool_mib = num_blocks * layout.block_stride_bytes // MIB
        raise ConfigError("engine.kv_pool_mib", pool_mib, f"a pool that fits on {device} beside the weights") from error
    native = choose_native(engine.cpu_kernels, device, TORCH_DTYPES[description.dtype])
    kernels = kernel_class(native) if device.type == "cpu" else device.type
    _logger.info(
        "loaded %s as %s%s on %s (%s kernels) in %.1f s; KV pool: %d blocks of %d tokens in %s, %.0f MiB",
        model.path,
        model.dtype,
        "" if model.quantization == "none" else f" with {model.quantization} projections",
        device,
        kernels,
        time.monotonic() - started_s,
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
        open_copies=pool.open_copies if isinstance(pool, DevicePool) else None,
    )


def _allocate(
    layout: KVLayout, num_blocks: int, device: torch.device, staging_mib: int
) -> tuple[KVPoolMemory | DevicePool, KVPoolMemory]:
    """The KV pool, and what a connector is to have of it."""
    if device.type == "cpu":
        pool = KVPoolMemory(layout, num_blocks)
        return pool, pool
    num_slots = staging_mib * MIB // layout.block_stride_bytes
    if num_slots < 2:
        raise ConfigError("engine.staging_mib", staging_mib, f"at least {2 * layout.block_stride_bytes / MIB:.1f}, two blocks")
    return DevicePool.allocate(layout, num_blocks, device), KVPoolMemory(layout, num_slots)


def _fingerprint_by(kernels: str, model_fingerprint: bytes) -> bytes:
    """Kernels round differently: KV of one kind must not be a hit for the other, or answers depend on who computed what."""
    return sha256(model_fingerprint + kernels.encode()).digest()[: len(model_fingerprint)]
