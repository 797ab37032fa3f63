"""Every operating fault that crosses a room's border, as a typed exception.

Library errors are translated into these once, in the connector or transport file that met them. A broken
invariant is not here: it asserts.
"""

from __future__ import annotations

import reprlib


class KVRelayError(Exception):
    """Base of all faults that kvrelay raises on purpose."""


class InvalidInputError(KVRelayError):
    """Input from a user, a file or a peer is outside what is allowed.

    `field` is the name the sender used, `value` what was sent, `allowed` what would have been accepted, in words.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        shown = _shown(value)
        if len(shown) > 120:
            shown = f"{shown[:117]}..."
        super().__init__(f"{field}: got {shown}; allowed: {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class NotRepresentable(str):
    """A value as it was written, where no Python value stands for it; shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _shown(value: object) -> str:
    """A short repr that never walks through all of a large value."""
    if isinstance(value, NotRepresentable):
        return value[:120]
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 120
    try:
        return short.repr(value)
    except ValueError:  # a whole number with more digits than Python is willing to write
        return "a very large number"


class ConfigError(InvalidInputError):
    """A configuration value is missing or not allowed; raised before anything is started."""


class ModelLoadError(KVRelayError):
    """The model's folder or weights cannot be used; the message says which file and why."""


class RankLostError(KVRelayError):
    """Another process of this node has ended, or is silent for too long. What it had is lost: the node ends as a whole."""


class ConnectorError(KVRelayError):
    """A connector could not start or lost its medium. Never reaches a request: losing KV means recompute."""


class WireError(KVRelayError):
    """A peer sent bytes that are no message of this protocol version."""


class GrammarLimitError(KVRelayError):
    """Following a request's grammar takes more time or memory than one request may have."""


class OverloadedError(KVRelayError):
    """A bounded queue is full. `retry_after_s` (seconds) is when trying again makes sense."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestFailedError(KVRelayError):
    """An accepted request ended without its answer. `kind` is a short stable word for metrics and clients."""

    def __init__(self, request_id: str, kind: str, message: str) -> None:
        super().__init__(message)
        self.request_id = request_id
        self.kind = kind
