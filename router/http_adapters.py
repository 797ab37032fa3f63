"""Endpoints that load and unload LoRA adapters while requests run, as vLLM has them. An administrator's, and off by default.

They make every node read a folder by its path, so a path comes from nowhere else than here and the configuration.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from core.errors import InvalidInputError
from router.adapters import MAX_ADAPTERS, adapter_from_folder
from router.dispatcher import Dispatcher
from router.openai_protocol import LoadAdapterRequest, UnloadAdapterRequest, decode_body

LOAD_TIMEOUT_S = 120.0


class AdapterEndpoints:
    """Handlers. Loads follow one another, so that two of one name cannot cross."""

    def __init__(self, dispatcher: Dispatcher, model_names: Collection[str]) -> None:
        self._dispatcher = dispatcher
        self._model_names = model_names
        self._one_at_a_time = asyncio.Lock()

    async def load(self, _request: Request, body: bytes) -> Response:
        """POST /v1/load_lora_adapter: 200 once every connected node has the adapter in memory; else nothing has changed."""
        parsed = decode_body(body, LoadAdapterRequest)
        async with self._one_at_a_time:
            names = self._dispatcher.core.adapters.names
            if parsed.lora_name in names and not parsed.load_inplace:
                raise InvalidInputError("lora_name", parsed.lora_name, "a name that is not loaded yet, or load_inplace true")
            if len(names) >= MAX_ADAPTERS and parsed.lora_name not in names:
                raise InvalidInputError("lora_name", parsed.lora_name, f"at most {MAX_ADAPTERS} adapters at a time")
            adapter = await asyncio.to_thread(adapter_from_folder, parsed.lora_name, parsed.lora_path, self._model_names)
            errors = await self._dispatcher.load_adapter(adapter, LOAD_TIMEOUT_S)
        if errors:
            problems = "; ".join(f"{node_id}: {error}" for node_id, error in sorted(errors.items()))
            raise HTTPException(400, f"lora_path: got {adapter.path!r}, which not every node can serve ({problems})")
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    async def unload(self, _request: Request, body: bytes) -> Response:
        """POST /v1/unload_lora_adapter: requests in flight keep the adapter, new ones cannot name it."""
        name = decode_body(body, UnloadAdapterRequest).lora_name
        async with self._one_at_a_time:
            if not self._dispatcher.core.adapters.unload(name):
                raise HTTPException(404, f"lora_name: got {name[:256]!r}; no adapter of that name is loaded")
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
