"""A node's KV events as messages: only when asked, numbered without a hole, cut to size, ahead of their step's news."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from core.errors import WireError
from core.kv.load_cost import MeasuredCosts
from core.kv_event_stream import KVEventStream
from core.node_core import NodeCore, NodeIdentity, node_costs
from core.sampling_params import SamplingParams
from core.wire import messages
from core.wire.numbering import OUTSIDE, add_header
from tests.support.engine_bench import EngineBench
from tests.support.memory_connector import MemoryConnector


def _bench() -> EngineBench:
    return EngineBench(num_blocks=24, block_size=4, connector=MemoryConnector())


def _generate(request_id: str, first_token: int) -> messages.Generate:
    return messages.Generate(
        request_id=request_id,
        stage="decode",
        prompt_token_ids=[first_token, *range(1, 18)],
        output_token_ids=[],
        sampling=SamplingParams(temperature=0.0, max_tokens=6),
        time_left_s=60.0,
    )


def _replay(known: set[bytes], news: list[messages.NodeMessage]) -> None:
    for message in news:
        for event in message.events if isinstance(message, messages.KVEvents) else ():
            if isinstance(event, messages.PoolCleared):
                known.clear()
            elif event.medium == "":
                change = known.update if isinstance(event, messages.BlockStored) else known.difference_update
                change(event.block_hashes)


def test_node_tells_no_kv_events_before_it_is_asked_nor_after_another_registration() -> None:
    node = NodeCore(NodeIdentity("d0", "decode", 1), _bench().engine)

    def serve(request_id: str, first_token: int) -> list[messages.NodeMessage]:
        news = node.handle(_generate(request_id, first_token))
        while node.engine.has_work():
            news += node.step()[0]
        return [message for message in news if isinstance(message, messages.KVEvents)]

    assert serve("a", 1) == []
    assert len(node.handle(messages.KVSnapshotRequest())) == 1
    assert serve("b", 2) != []
    node.handle(messages.RegisterAgain())
    assert serve("c", 3) == []


@pytest.mark.parametrize("seed", range(5))
def test_node_kv_events_replayed_are_its_cache_after_every_step_and_precede_the_news(seed: int) -> None:
    rng = random.Random(seed)
    node = NodeCore(NodeIdentity("d0", "decode", 1), _bench().engine)
    known: set[bytes] = set()
    told: list[messages.KVEvents] = []
    for number in range(30):
        news = node.handle(_generate(str(number), rng.randrange(1, 9)))
        if number % 10 == 0:
            news += node.handle(messages.KVSnapshotRequest())
        while node.engine.has_work():
            _replay(known, news)
            told += [message for message in news if isinstance(message, messages.KVEvents)]
            news = node.step()[0]
            kinds = [type(message) for message in news]
            assert messages.KVEvents not in kinds[1:]
        _replay(known, news)
        told += [message for message in news if isinstance(message, messages.KVEvents)]
        assert known == set(node.engine.cached_hashes())
    assert all(later.first_sequence == earlier.first_sequence + len(earlier.events) for earlier, later in pairwise(told))
    assert any(isinstance(event, messages.BlockRemoved) for message in told for event in message.events)
    media = {event.medium for message in told for event in message.events if isinstance(event, messages.BlockStored)}
    assert media == {"", "memory"}


def test_kv_event_stream_cuts_a_snapshot_into_messages_of_bounded_size() -> None:
    bench = _bench()
    node = NodeCore(NodeIdentity("d0", "decode", 1), bench.engine)
    node.handle(_generate("a", 1))
    while node.engine.has_work():
        node.step()
    parts = KVEventStream(bench.engine, max_hashes_per_message=2).start()
    known: set[bytes] = set()
    _replay(known, parts)
    assert known == set(bench.engine.cached_hashes()) and len(known) == 5
    assert len(parts) == 3
    starts = [isinstance(part, messages.KVEvents) and part.events[0] == messages.PoolCleared() for part in parts]
    assert starts == [True, False, False]


def test_node_costs_are_in_milliseconds_per_block_and_always_a_message() -> None:
    costs = node_costs(MeasuredCosts(0.03, 1e-3, 1e-6, 0.002, 1e-9, float("inf")), block_bytes=1_000_000)
    assert costs.prefill_overhead_ms == pytest.approx(30.0) and costs.prefill_ms_per_token == pytest.approx(1.0)
    assert costs.load_latency_ms == pytest.approx(2.0) and costs.load_ms_per_block == pytest.approx(1.0)
    assert costs.decode_step_ms == messages.MAX_COST_MS
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(costs), type=messages.NodeCosts) == costs


@pytest.mark.parametrize(
    "message",
    [
        {"type": "kv_events", "first_sequence": -1, "events": []},
        {"type": "kv_events", "first_sequence": 0, "events": [{"type": "stored", "block_hashes": [b"short"]}]},
        {"type": "kv_events", "first_sequence": 0, "events": [{"type": "stored", "block_hashes": [], "medium": "a b"}]},
        {"type": "kv_events", "first_sequence": 0, "events": [{"type": "cleared"}] * (messages.MAX_EVENTS + 1)},
        {
            "type": "kv_events",
            "first_sequence": 0,
            "events": [{"type": "stored", "block_hashes": [b"0" * 16] * (messages.MAX_EVENT_HASHES + 1)}],
        },
    ],
    ids=["negative", "short hash", "medium", "events", "hashes"],
)
def test_kv_events_out_of_bounds_are_no_message(message: dict[str, object]) -> None:
    with pytest.raises(WireError):
        messages.decode_node_message(add_header(OUTSIDE, msgspec.msgpack.encode(message)))
