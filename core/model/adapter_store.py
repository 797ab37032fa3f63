"""The adapters in memory, and the thread that reads them: core.step.AdapterStore in torch.

Which adapters are here is decided elsewhere (core/adapter_gate.py). A load costs the step thread nothing but the interpreter's
share of it: files are read, hashed and cast on a thread of their own, one at a time.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import torch

from core.adapter_files import read_adapter
from core.errors import InvalidInputError
from core.model.architecture import ModelArchitecture
from core.model.lora import AdapterLayers, build_adapter
from core.step import AdapterLoad

_logger = logging.getLogger(__name__)


class TorchAdapterStore:
    """All methods are the step thread's."""

    def __init__(self, architecture: ModelArchitecture, dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        self._layers_by_adapter: dict[str, AdapterLayers] = {}
        self._architecture = architecture
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")
        self._ended: deque[tuple[AdapterLoad, AdapterLayers | None]] = deque()

    def start_load(self, adapter: str, path: str) -> None:
        """See core.step.AdapterStore."""
        self._reader.submit(self._load, adapter, path)

    def poll_loads(self) -> list[AdapterLoad]:
        """See core.step.AdapterStore."""
        loads = []
        while self._ended:
            load, layers = self._ended.popleft()
            if layers is not None:
                self._layers_by_adapter[load.adapter] = layers
            loads.append(load)
        return loads

    def find(self, adapter: str) -> AdapterLayers:
        """See core.step.AdapterStore."""
        return self._layers_by_adapter[adapter]

    def drop(self, adapter: str) -> None:
        """See core.step.AdapterStore."""
        self._layers_by_adapter.pop(adapter, None)

    def _load(self, adapter: str, path: str) -> None:
        """On the reader's thread; its broad except, so that whoever waits for the load always hears of its end."""
        layers: AdapterLayers | None = None
        error = ""
        started_s = time.monotonic()
        try:
            layers = self._read(adapter, path)
            _logger.info("loaded the adapter %s of %s in %.2f s", adapter, path, time.monotonic() - started_s)
        except Exception as fault:
            _logger.warning("the adapter %s of %s cannot be loaded: %s", adapter, path, fault)
            error = str(fault) if isinstance(fault, InvalidInputError) else f"{type(fault).__name__}: {fault}"
        self._ended.append((AdapterLoad(adapter, error), layers))

    def _read(self, adapter: str, path: str) -> AdapterLayers:
        if not self._architecture.takes_adapters:
            raise InvalidInputError(
                "lora_path", path, "no adapter: this model's family takes none; dense models of Llama's tensors do"
            )
        files = read_adapter(path)
        if files.rank > self._max_rank:
            raise InvalidInputError("r", files.rank, f"at most {self._max_rank} (engine.max_lora_rank)")
        if files.fingerprint.hex() != adapter:  # what was read and nothing else is what is checked: no race with a writer
            raise InvalidInputError("lora_path", path, "files with the content that was loaded; they have changed since")
        return build_adapter(files, self._architecture, self._dtype, self._device)
