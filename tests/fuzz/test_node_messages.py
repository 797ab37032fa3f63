"""Whatever nodes and strangers send to the router: it neither raises nor grows, and honest requests end with their tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from core.stats import EngineStats
from core.step import TokenLogprob
from core.wire.messages import (
    AdapterReply,
    AuditReply,
    BlockRemoved,
    BlockStored,
    Heartbeat,
    KVEvents,
    ModelInfo,
    NodeCosts,
    NodeLoad,
    PoolCleared,
    Register,
    RequestUpdate,
    Updates,
    encode,
)
from router.registry import MAX_NODES
from tests.fuzz.examples import num_examples
from tests.fuzz.hostile import FLOATS, INTS, TEXTS, payloads
from tests.fuzz.router_bench import HONEST, HOSTILE, RouterBench
from tests.unit.router.fake_node import model_info
from tests.unit.router.flow_bench import register_message

TAGS = ["register", "heartbeat", "updates", "audit_reply", "adapter_reply", "kv_events"]
IDENTITIES = st.sampled_from([b"e0", b"e1", b"e2"])
OWN_IDS = st.sampled_from(["evil-0", "evil-1", "honest-d2"])
# An honest node's name in a Register is a takeover, which is a matter of authentication: not here.
ANY_IDS = st.one_of(OWN_IDS, st.sampled_from(["honest-p", "honest-d"]), TEXTS)
GOOD_MODEL = model_info(100, 256)


def _or_hostile(good: Any, hostile: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(st.just(good), hostile)


MODELS = st.one_of(
    st.just(GOOD_MODEL),
    st.just(GOOD_MODEL),
    st.builds(
        ModelInfo,
        model_name=TEXTS,
        model_fingerprint=st.binary(max_size=20),
        layout_fingerprint=st.binary(max_size=20),
        block_size=INTS,
        max_model_len=INTS,
        vocab_size=INTS,
        dtype=TEXTS,
    ),
)
REGISTERS = st.builds(
    Register,
    node_id=st.one_of(OWN_IDS, TEXTS),
    role=_or_hostile("decode", st.one_of(st.just("prefill"), TEXTS)),
    generation=INTS,
    model=MODELS,
    max_num_seqs=_or_hostile(8, INTS),
    num_blocks=_or_hostile(64, INTS),
    connector=TEXTS,
    metrics_address=_or_hostile("127.0.0.1:1", st.sampled_from(["http://169.254.169.254/", "\n", "[::]:x", "z" * 5000])),
    protocol_version=st.one_of(st.just(1), st.just(1), INTS),
    registration_index=INTS,
    kv_address=_or_hostile("127.0.0.1:1", st.sampled_from(["", "\n", "[::]:x", "z" * 5000])),
)
STATS_FIELDS = {
    leaf.name: st.dictionaries(
        st.one_of(st.sampled_from(["load.ok", "load", "load.ok.ok", "load.ok.x", "."]), TEXTS),
        FLOATS if leaf.name == "step_seconds" else INTS,
        max_size=4,
    )
    if "dict" in str(leaf.type)
    else (
        TEXTS if "[str" in str(leaf.type) else FLOATS if leaf.type == "float" else st.booleans() if leaf.type == "bool" else INTS
    )
    for leaf in dataclasses.fields(EngineStats)
}
LOADS = st.builds(
    NodeLoad, num_running=INTS, num_waiting=INTS, num_waiting_tokens=INTS, kv_usage=FLOATS, step_age_s=_or_hostile(0.0, FLOATS)
)
HEARTBEATS = st.builds(
    Heartbeat,
    node_id=ANY_IDS,
    generation=st.one_of(st.just(1), INTS),
    load=LOADS,
    stats=st.builds(EngineStats, **STATS_FIELDS),
    is_draining=st.booleans(),
    costs=_or_hostile(
        NodeCosts(), st.builds(NodeCosts, prefill_overhead_ms=FLOATS, load_ms_per_block=FLOATS, decode_step_ms=FLOATS)
    ),
)
LOGPROBS = st.none() | st.lists(
    st.builds(TokenLogprob, INTS, FLOATS, INTS, st.lists(st.tuples(INTS, FLOATS), max_size=3).map(tuple)), max_size=4
).map(tuple)


UPDATE = st.builds(
    RequestUpdate,
    request_id=st.just(""),
    first_index=st.integers(0, 4) | INTS,
    token_ids=st.lists(INTS, max_size=4).map(tuple),
    finish_reason=st.one_of(st.sampled_from(["", "", "stop", "length", "abort", "error"]), TEXTS),
    stop_token_id=st.none() | INTS,
    error=TEXTS,
    is_prefill_done=st.booleans(),
    num_cached_tokens=st.integers(0, 9) | INTS,
    logprobs=LOGPROBS,
    prompt_logprobs=LOGPROBS,
)
# A wire id is only known once the router has chosen it: updates name it by its place among those, filled in when they are sent.
UPDATES = st.lists(st.tuples(st.integers(0, 50) | TEXTS, UPDATE), min_size=1, max_size=3)
AUDIT_REPLIES = st.builds(
    AuditReply,
    audit_id=INTS,
    node_id=ANY_IDS,
    counts=st.dictionaries(TEXTS, INTS, max_size=3),
    problems=st.lists(TEXTS, max_size=3).map(tuple),
)
ADAPTER_REPLIES = st.builds(AdapterReply, st.binary(min_size=16, max_size=16), TEXTS)
BLOCK_HASHES = st.lists(
    st.integers(0, 99).map(lambda number: number.to_bytes(16, "little")) | st.binary(max_size=20), max_size=80
).map(tuple)
MEDIA = _or_hostile("", _or_hostile("redis", TEXTS))
EVENTS = st.one_of(
    st.builds(PoolCleared), st.builds(BlockStored, BLOCK_HASHES, MEDIA), st.builds(BlockRemoved, BLOCK_HASHES, MEDIA)
)
KV_EVENTS = st.builds(KVEvents, st.integers(0, 5) | INTS, st.lists(EVENTS, max_size=4).map(tuple))
MESSAGES = st.one_of(REGISTERS, REGISTERS, HEARTBEATS, AUDIT_REPLIES, ADAPTER_REPLIES, KV_EVENTS)
STEPS = st.lists(
    st.one_of(
        st.sampled_from(["submit", "submit", "answer", "audit"]),
        st.floats(0.0, 3.0),
        st.tuples(IDENTITIES, MESSAGES.map(encode)),
        st.tuples(IDENTITIES, UPDATES),
        st.tuples(IDENTITIES, payloads(TAGS, MESSAGES.map(encode))),
    ),
    max_size=30,
)


@given(STEPS)
@settings(max_examples=num_examples(150))
def test_router_core_fed_with_hostile_messages_serves_honest_requests_exactly(steps: list[Any]) -> None:
    bench = RouterBench()
    for step in steps:
        match step:
            case "submit":
                bench.submit()
            case "answer":
                bench.answer_one()
            case "audit":
                bench.check()
            case float():
                bench.let_time_pass(step)
            case (identity, bytes() as payload):
                bench.feed(identity, payload)
            case (identity, updates):
                named = [
                    msgspec.structs.replace(
                        update, request_id=bench.wire_id(identity, place) if isinstance(place, int) else place
                    )
                    for place, update in updates
                ]
                bench.feed(identity, encode(Updates(tuple(named))))
        for node in bench.core.registry.nodes.values():
            assert bench.core.index.num_blocks(node.node_id) <= node.num_blocks
    bench.settle()


def test_router_core_flood_of_node_ids_is_bounded() -> None:
    bench = RouterBench()
    for place in range(5_000):
        bench.feed(b"e%d" % place, encode(register_message(f"evil-{place}", "decode")))
        if place % 100 == 0:
            bench.submit()
            bench.let_time_pass(0.1)
    assert len(bench.core.registry.nodes) <= 2 * MAX_NODES
    bench.settle()
    for _ in range(200):
        bench.let_time_pass(4.0)
    assert set(bench.core.registry.nodes) == {node_id for node_id, _role in HONEST.values()}
    assert b"evil-" not in bench.metrics.render(), "a series is kept for a node that is forgotten"


def test_router_core_many_names_behind_one_connection_are_one_node() -> None:
    bench = RouterBench()
    for place in range(50):
        bench.feed(b"e0", encode(register_message(f"evil-{place}", "decode")))
    assert sum(node.is_connected for node in bench.core.registry.nodes.values()) == len(HONEST) + len(HOSTILE)


def test_router_core_audit_answered_for_another_node_still_waits_for_it() -> None:
    bench = RouterBench()
    bench.feed(b"e0", encode(register_message("evil-0", "decode")))
    round_ = bench.core.start_audit()
    bench.feed(b"e0", encode(AuditReply(audit_id=round_.audit_id, node_id="honest-d", counts={}, problems=("a lie",))))
    assert "honest-d" in round_.missing and round_.replies == {}
