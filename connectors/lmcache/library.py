"""The one file that imports LMCache: what its two modes need of it, with what it would do unasked turned off first."""

from __future__ import annotations

import os
from typing import Any

# LMCache reads its settings from the environment when it is imported.
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # else it sends usage statistics to its makers
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")  # what it calls errors are misses here

from lmcache.v1.distributed import api, config, internal_api, storage_manager
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.multiprocess import custom_types
from lmcache.v1.multiprocess.token_hasher import TokenHasher
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

__all__ = [
    "FSNativeL2AdapterConfig",
    "L2AdaptersConfig",
    "TokenHasher",
    "api",
    "config",
    "connect",
    "custom_types",
    "internal_api",
    "storage_manager",
]


def connect(address: str, context: Any) -> Any:
    """LMCache's own client of a server at HOST:PORT, on a zmq.Context. It connects, and connects anew, by itself."""
    return RequestClientFactory.create(f"tcp://{address}", context=context)
