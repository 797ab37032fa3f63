"""How often a peer's bad messages are worth a line in the log: a flood of them must not become a flood of lines.

Not thread-safe: one per loop that receives.
"""

from __future__ import annotations

INTERVAL_S = 10.0
MAX_PEERS = 256  # those beyond share one allowance, so that a flood of names is none of lines


class WarningLimit:
    """Counts by peer; a peer's first message is due at once, later ones with their number every INTERVAL_S."""

    def __init__(self) -> None:
        self._due_s_by_peer: dict[bytes, float] = {}
        self._num_by_peer: dict[bytes, int] = {}

    def count(self, peer: bytes, now_s: float) -> int:
        """Count one more message. 0: stay silent; else how many there were since the last line, this one included."""
        if peer not in self._due_s_by_peer and len(self._due_s_by_peer) >= MAX_PEERS:
            self._forget_quiet_peers(now_s)
            if len(self._due_s_by_peer) >= MAX_PEERS:
                peer = b""
        num = self._num_by_peer.get(peer, 0) + 1
        if now_s < self._due_s_by_peer.get(peer, now_s):
            self._num_by_peer[peer] = num
            return 0
        self._due_s_by_peer[peer] = now_s + INTERVAL_S
        self._num_by_peer.pop(peer, None)
        return num

    def _forget_quiet_peers(self, now_s: float) -> None:
        for peer, due_s in list(self._due_s_by_peer.items()):
            if peer and due_s <= now_s:
                del self._due_s_by_peer[peer]
                self._num_by_peer.pop(peer, None)
