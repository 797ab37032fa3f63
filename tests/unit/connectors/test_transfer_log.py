"""What is logged of transfers that fail in numbers."""

from __future__ import annotations

import logging

import pytest

import connectors.transfer_log
from connectors.transfer_log import TransferLog
from core.kv.connector import Transfer, TransferDirection, TransferOutcome, TransferResult

LOAD = Transfer(1, TransferDirection.LOAD, "r", (0,), (bytes(16),), 1e9)


def test_transfer_log_many_of_one_kind_are_a_line_with_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = TransferLog(logging.getLogger("store"), "nvme")
    for outcome in (TransferOutcome.CORRUPT, TransferOutcome.ERROR, TransferOutcome.MISS) * 40:
        log.note(LOAD, TransferResult(1, 0, outcome, detail="it broke"))
    assert [record.message for record in caplog.records] == [
        "nvme: load of r: it broke; `kvrelay cache verify --remove` finds and removes all damaged blocks",
        "nvme: load of r: it broke",
    ]
    monkeypatch.setattr(connectors.transfer_log, "_PAUSE_S", 0.0)
    log.note(LOAD, TransferResult(1, 0, TransferOutcome.ERROR, detail="again"))
    assert caplog.records[-1].message == "nvme: load of r: again (and 39 more like it since the last such line)"
