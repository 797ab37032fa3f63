"""What connectors that move blocks on TransferWorkers have in common towards the engine."""

from __future__ import annotations

from connectors.transfer_workers import TransferWorkers
from core.kv.connector import KVConnector, Transfer, TransferResult


class QueuedConnector(KVConnector):
    """Hands transfers to its workers. Subclasses make them, with _notify to be called after each result."""

    _workers: TransferWorkers

    def start_load(self, transfer: Transfer) -> None:
        """Queue a load."""
        self._workers.start(transfer)

    def start_save(self, transfer: Transfer) -> None:
        """Queue a save."""
        self._workers.start(transfer)

    def poll_transfers(self) -> list[TransferResult]:
        """Results since the last call."""
        return self._workers.poll()

    def _notify(self) -> None:
        if self.on_result is not None:
            self.on_result()
