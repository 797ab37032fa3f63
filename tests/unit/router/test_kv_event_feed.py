"""From events to the router's index: what is missing is noticed and asked for, and whoever leaves takes its blocks along."""

from __future__ import annotations

import random

import msgspec

from core.wire.messages import (
    BlockRemoved,
    BlockStored,
    Drain,
    KVEvents,
    KVSnapshotRequest,
    NodeCosts,
    PoolCleared,
)
from tests.unit.router.flow_bench import heartbeat_message, register_message
from tests.unit.router.test_router_core import CoreBench

HASHES = [bytes([number]) * 16 for number in range(10)]


def _bench(*node_ids: str) -> CoreBench:
    return CoreBench(*node_ids, kv_events="on")


def _tell(bench: CoreBench, node_id: str, sequence: int, *events: BlockStored | BlockRemoved | PoolCleared) -> None:
    bench.core.handle_message(node_id.encode(), KVEvents(sequence, events))


def _stored(*numbers: int, medium: str = "") -> BlockStored:
    return BlockStored(tuple(HASHES[number] for number in numbers), medium)


def _removed(*numbers: int, medium: str = "") -> BlockRemoved:
    return BlockRemoved(tuple(HASHES[number] for number in numbers), medium)


def _num_asked(bench: CoreBench, node_id: str) -> int:
    return bench.sent.count((node_id, KVSnapshotRequest()))


def _gauge(bench: CoreBench, node_id: str) -> float | None:
    return bench.core._metrics.registry.get_sample_value("kvrelay_router_index_blocks", {"node_id": node_id})


def test_feed_asks_each_node_that_registers_and_none_when_it_is_off() -> None:
    assert _num_asked(_bench("d0"), "d0") == 1
    off = CoreBench("d0", kv_events="off")
    assert _num_asked(off, "d0") == 0
    _tell(off, "d0", 0, PoolCleared(), _stored(0))
    assert off.core.index.match(HASHES) == {}


def test_feed_events_make_the_index_and_removed_ones_leave_it() -> None:
    bench = _bench("d0", "p0")
    _tell(bench, "d0", 0, PoolCleared(), _stored(0, 1, 2))
    _tell(bench, "p0", 7, PoolCleared(), _stored(0, 2))
    assert bench.core.index.match(HASHES) == {"d0": 3, "p0": 1}, "no hole is believed"
    _tell(bench, "d0", 2, _removed(1, 9), _stored(5))
    assert bench.core.index.match(HASHES) == {"d0": 1, "p0": 1}
    assert (_gauge(bench, "d0"), _gauge(bench, "p0")) == (3.0, 2.0)


def test_feed_what_a_store_holds_is_apart_from_the_pools_and_outlives_the_node() -> None:
    bench = _bench("d0")
    _tell(bench, "d0", 0, PoolCleared(), _stored(0, 1, 2, medium="redis"))
    assert (bench.core.index.match(HASHES), bench.core.index.match_stored(HASHES)) == ({}, 3)
    _tell(bench, "d0", 2, _removed(1, medium="redis"))
    bench.gone = {"d0"}
    bench.core.ping_all()
    assert bench.core.index.match_stored(HASHES) == 1


def test_feed_gap_drops_the_nodes_blocks_until_everything_was_told_anew() -> None:
    bench = _bench("d0", "d1")
    for node_id in ("d0", "d1"):
        _tell(bench, node_id, 0, PoolCleared(), _stored(0, 1))
    _tell(bench, "d0", 3, _stored(2))
    assert bench.core.index.match(HASHES) == {"d1": 2}
    assert _num_asked(bench, "d0") == 2
    _tell(bench, "d0", 4, _stored(3))
    assert _num_asked(bench, "d0") == 2, "one question is enough"
    _tell(bench, "d0", 5, PoolCleared(), _stored(0, 1, 2))
    _tell(bench, "d0", 7, _stored(3))
    assert bench.core.index.match(HASHES) == {"d0": 4, "d1": 2}
    assert bench.core._metrics.registry.get_sample_value("kvrelay_router_index_gaps_total") == 1.0


def test_feed_random_events_with_losses_end_up_equal_once_the_questions_are_answered() -> None:
    rng = random.Random(5)
    bench = _bench("d0")
    held: set[bytes] = set()
    sequence = num_answered = 0
    for _ in range(500):
        if _num_asked(bench, "d0") > num_answered and rng.random() < 0.5:
            num_answered = _num_asked(bench, "d0")
            events = (PoolCleared(), BlockStored(tuple(held)))
        else:
            block_hash = rng.choice(HASHES)
            events = (BlockRemoved((block_hash,)) if block_hash in held else BlockStored((block_hash,)),)  # type: ignore[assignment]
            held ^= {block_hash}
            if rng.random() < 0.1:
                sequence += len(events)  # lost
                continue
        bench.core.handle_message(b"d0", KVEvents(sequence, events))
        sequence += len(events)
        known = {block_hash for block_hash in HASHES if bench.core.index.match([block_hash])}
        assert known in (held, set()), "either the truth or nothing, once a loss was noticed"
    assert num_answered > 10


def test_feed_node_that_dies_drains_or_registers_again_is_forgotten() -> None:
    bench = _bench("d0", "d1", "d2", "d3", "d4")
    for node_id in ("d0", "d1", "d2", "d3", "d4"):
        _tell(bench, node_id, 0, PoolCleared(), _stored(0))
    bench.gone = {"d0"}
    bench.core.ping_all()
    bench.core.drain("d1")
    bench.core.handle_message(b"d2", register_message("d2", "decode", generation=2))
    bench.core.handle_message(b"d3", heartbeat_message("d3", is_draining=True))
    assert bench.core.index.match(HASHES) == {"d4": 1}
    for node_id in ("d0", "d1", "d2", "d3"):
        _tell(bench, node_id, 2, _stored(0))
    assert bench.core.index.match(HASHES) == {"d4": 1}, "of before, or of a node that leaves"
    assert (_num_asked(bench, "d2"), _num_asked(bench, "d1")) == (2, 1)
    assert [_gauge(bench, node_id) for node_id in ("d0", "d1", "d2", "d3")] == [None, None, 0.0, None]
    assert ("d1", Drain()) in bench.sent


def test_feed_node_that_tells_of_more_blocks_than_it_has_is_not_believed() -> None:
    bench = _bench("d0")
    names = tuple(number.to_bytes(16, "little") for number in range(65))
    _tell(bench, "d0", 0, PoolCleared(), BlockStored(names[:64]))
    assert bench.core.index.match(names) == {"d0": 64}
    _tell(bench, "d0", 2, BlockStored(names[64:]))
    _tell(bench, "d0", 3, PoolCleared(), BlockStored(names[:1]))
    assert bench.core.index.match(names) == {}


def test_registry_snapshots_have_the_costs_of_the_last_heartbeat() -> None:
    bench = _bench("d0")
    costs = NodeCosts(decode_step_ms=12.5)
    bench.core.handle_message(b"d0", msgspec.structs.replace(heartbeat_message("d0"), costs=costs))
    (node,) = bench.core.registry.candidates("decode")
    assert node.costs == costs
