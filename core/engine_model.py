"""What an engine must know of the model that it serves: a plain value between the model room and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from core.kv.hashing import Namespace
from core.kv.layout import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """max_model_len: prompt and output together, in tokens. eos_token_ids end a generation unless a request ignores them."""

    namespace: Namespace
    layout: KVLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
