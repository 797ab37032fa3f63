"""Why a server takes nothing new although it answers: it is full, or may not be written. Said once, not at each save."""

from __future__ import annotations

import logging
import threading
import time

from connectors.redis.resp_stream import RespError

logger = logging.getLogger(__name__)

# A replica, a disk that cannot be written, a user who may not: it is read all the same.
UNWRITABLE = ("READONLY", "MISCONF", "NOPERM")
_VALID_S = 300.0  # whoever has nothing new to save does not learn that there is room again
_LOG_INTERVAL_S = 60.0  # at its limit, a server takes some saves and refuses others


class SaveTrouble:
    """What the last save that told anything told of it. Any thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._mutex = threading.Lock()  # of the three below
        self._text = ""
        self._noted_s = self._may_log_after_s = float("-inf")

    @property
    def text(self) -> str:
        """For an operator; "": saves go through, or none was refused for minutes."""
        return self._text if time.monotonic() - self._noted_s < _VALID_S else ""

    def note(self, *, is_full: bool, error: Exception | None, has_stored: bool) -> None:
        """What became of a save's new blocks."""
        if is_full:
            text = f"{self._address} is full (OOM) and evicts nothing: no new KV is stored. Raise maxmemory, or set "
            text += "maxmemory-policy volatile-ttl"
        elif isinstance(error, RespError) and error.word in UNWRITABLE:
            text = f"{self._address} cannot be written: {error}"
        elif has_stored and error is None:
            text = ""
        else:
            return
        with self._mutex:
            self._noted_s = time.monotonic()
            is_news, self._text = text != self._text, text
            may_log = not text or time.monotonic() >= self._may_log_after_s
            if is_news and text and may_log:
                self._may_log_after_s = time.monotonic() + _LOG_INTERVAL_S
        if is_news and may_log:
            logger.log(logging.WARNING if text else logging.INFO, "redis: %s", text or f"{self._address} takes new KV again")
