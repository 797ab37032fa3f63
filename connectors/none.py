"""The connector of an engine that shares its KV with nobody: stores nothing, finds nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.clock import Clock
from core.config import options_from_mapping
from core.kv.connector import KVConnector, PrefixLookup, Transfer, TransferOutcome, TransferResult
from core.kv.pool_memory import KVPoolMemory


@dataclass(frozen=True, slots=True)
class NoneOptions:
    """There are none."""


class NoneConnector(KVConnector):
    """Every transfer is a MISS at once."""

    name = "none"

    def __init__(self) -> None:
        self._results: list[TransferResult] = []

    def get_num_new_matched_tokens(self, lookup: PrefixLookup, num_computed_tokens: int) -> int | None:
        """Always 0."""
        return 0

    def register_kv_cache(self, pool: KVPoolMemory) -> None:
        """Needs no pool."""

    def start_load(self, transfer: Transfer) -> None:
        """Report a MISS."""
        self._results.append(TransferResult(transfer.transfer_id, 0, TransferOutcome.MISS, detail="nothing is stored"))
        if self.on_result is not None:
            self.on_result()

    def start_save(self, transfer: Transfer) -> None:
        """Report a MISS: there is no room."""
        self.start_load(transfer)

    def poll_transfers(self) -> list[TransferResult]:
        """Results since the last call."""
        results, self._results = self._results, []
        return results

    def close(self) -> None:
        """Nothing to let go of."""


def create_connector(options: Mapping[str, Any], clock: Clock) -> KVConnector:
    """Raises ConfigError for any option."""
    options_from_mapping(NoneOptions, options, "connector.options")
    return NoneConnector()
