"""How much of the pool transfers may pin: a store may never let go of it, and there must be room left to compute.

Plain state of the ledger's, which brings the time. Step thread only.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.kv.connector import TransferDirection

_LOAD_SHARE, _SAVE_SHARE, _LATE_SAVE_SHARE = 0.25, 0.5, 0.25  # of the pool; the last once a save is late
_LATE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Pins:
    num_blocks: int
    started_s: float


class PinBudget:
    """Pins of the transfers in flight, by direction. A block that two transfers pin counts twice."""

    def __init__(self, num_pool_blocks: int) -> None:
        self._num_pool_blocks = num_pool_blocks
        self._pins: dict[TransferDirection, dict[int, _Pins]] = {direction: {} for direction in TransferDirection}
        self._num_pinned = dict.fromkeys(TransferDirection, 0)

    def has_room(self, direction: TransferDirection, num_blocks: int, now_s: float) -> bool:
        """Whether a transfer may pin so many blocks more. The only one of its direction may pin what it likes."""
        oldest = next(iter(self._pins[direction].values()), None)
        if oldest is None:
            return True
        share = _LOAD_SHARE
        if direction is TransferDirection.SAVE:
            share = _SAVE_SHARE if now_s - oldest.started_s < _LATE_S else _LATE_SAVE_SHARE
        return self._num_pinned[direction] + num_blocks <= share * self._num_pool_blocks

    def begin(self, direction: TransferDirection, transfer_id: int, num_blocks: int, now_s: float) -> None:
        """A transfer pins these from now on."""
        self._pins[direction][transfer_id] = _Pins(num_blocks, now_s)
        self._num_pinned[direction] += num_blocks

    def end(self, direction: TransferDirection, transfer_id: int) -> None:
        """The transfer has let go of them. Safe to repeat."""
        if (pins := self._pins[direction].pop(transfer_id, None)) is not None:
            self._num_pinned[direction] -= pins.num_blocks
