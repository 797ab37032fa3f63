"""From options to a runner that is ready: finds the model, sizes and allocates the KV pool, loads the weights.

What a node's process calls once at start.
"""

from __future__ import annotations

import logging
import time

from core.config import MIB, EngineOptions, ModelOptions
from core.engine_model import EngineModel
from core.errors import ConfigError
from core.kv.hashing import Namespace
from core.kv.pool_memory import KVPoolMemory
from core.model.description import describe_model
from core.model.runner import TorchModelRunner
from core.model_files import resolve_model

_logger = logging.getLogger(__name__)


def load_model(model: ModelOptions, engine: EngineOptions) -> tuple[EngineModel, KVPoolMemory, TorchModelRunner]:
    """Everything that an EngineCore needs of the model room. Raises ModelLoadError or ConfigError."""
    started_s = time.monotonic()
    model_dir = resolve_model(model.path)
    description = describe_model(model_dir, model, engine.block_size)
    layout = description.kv_layout
    num_blocks = engine.num_blocks or engine.kv_pool_mib * MIB // layout.block_stride_bytes
    if num_blocks < 1:
        raise ConfigError("engine.kv_pool_mib", engine.kv_pool_mib, f"at least {layout.block_stride_bytes / MIB:.1f}, one block")
    pool = KVPoolMemory(layout, num_blocks)
    runner = TorchModelRunner.load(model_dir, description, pool, engine.num_threads)
    _logger.info(
        "loaded %s as %s in %.1f s; KV pool: %d blocks of %d tokens, %.0f MiB",
        model.path,
        layout.dtype,
        time.monotonic() - started_s,
        num_blocks,
        engine.block_size,
        num_blocks * layout.block_stride_bytes / MIB,
    )
    return (
        EngineModel(
            namespace=Namespace(description.model_fingerprint, layout.fingerprint, engine.block_size),
            layout=layout,
            max_model_len=description.max_model_len,
            vocab_size=description.vocab_size,
            eos_token_ids=description.eos_token_ids,
        ),
        pool,
        runner,
    )
