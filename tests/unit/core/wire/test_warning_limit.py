"""One line per peer and interval, whatever arrives."""

from __future__ import annotations

from core.wire.warning_limit import INTERVAL_S, MAX_PEERS, WarningLimit


def test_warning_limit_first_of_a_peer_is_told_and_the_rest_counted() -> None:
    limit = WarningLimit()
    assert [limit.count(b"a", 0.0) for _ in range(5)] == [1, 0, 0, 0, 0]
    assert limit.count(b"b", 0.0) == 1
    assert limit.count(b"a", INTERVAL_S) == 5
    assert limit.count(b"a", INTERVAL_S + 1.0) == 0


def test_warning_limit_flood_of_peers_is_bounded_in_lines_and_memory() -> None:
    limit = WarningLimit()
    num_lines = sum(bool(limit.count(b"%d" % place, 0.0)) for place in range(20_000))
    assert num_lines <= MAX_PEERS + 1
    assert len(limit._due_s_by_peer) <= MAX_PEERS + 1
    assert limit.count(b"new", INTERVAL_S) == 1
