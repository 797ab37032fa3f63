"""What a connector logs of transfers that went wrong: a broken store fails thousands a second, and each line says the same."""

from __future__ import annotations

import logging
import threading
import time

from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult

_PAUSE_S = 1.0  # between two lines of one kind
_EXPECTED = (TransferOutcome.OK, TransferOutcome.MISS, TransferOutcome.CANCELLED)
_ADVICE = "; `kvrelay cache verify --remove` finds and removes all damaged blocks"


class TransferLog:
    """At most one warning a second for each direction and outcome; the next one says how many were left out. Any thread."""

    def __init__(self, logger: logging.Logger, store: str) -> None:
        """logger: the connector's own. store: its name, as users know it."""
        self._logger = logger
        self._store = store
        self._mutex = threading.Lock()
        self._last_s: dict[tuple[TransferDirection, TransferOutcome], float] = {}
        self._num_left_out: dict[tuple[TransferDirection, TransferOutcome], int] = {}

    def note(self, transfer: Transfer, result: TransferResult) -> None:
        """Say what went wrong, if something did that an operator should know."""
        if result.outcome in _EXPECTED:
            return
        self.warn(transfer, result.outcome, result.detail)

    def warn(self, transfer: Transfer, outcome: TransferOutcome, detail: str) -> None:
        """The same for a fault that the result does not tell."""
        kind, now_s = (transfer.direction, outcome), time.monotonic()
        with self._mutex:
            if now_s - self._last_s.get(kind, float("-inf")) < _PAUSE_S:
                self._num_left_out[kind] = self._num_left_out.get(kind, 0) + 1
                return
            self._last_s[kind] = now_s
            num_left_out = self._num_left_out.pop(kind, 0)
        more = f" (and {num_left_out} more like it since the last such line)" if num_left_out else ""
        advice = _ADVICE if outcome is TransferOutcome.CORRUPT else ""
        self._logger.warning(
            "%s: %s of %s: %s%s%s", self._store, transfer.direction.value, transfer.request_id, detail, advice, more
        )
