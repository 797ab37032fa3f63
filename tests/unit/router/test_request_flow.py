"""The life of one request in many orders of events. FlowBench checks on every step that no token is repeated or missing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from core.wire.messages import RequestUpdate
from tests.unit.router.fake_node import expected_tokens, logprob_of
from tests.unit.router.flow_bench import PROMPT, FlowBench


def test_flow_handoff_delivers_first_token_once_and_finishes() -> None:
    bench = FlowBench().start()
    assert (bench.nodes, bench.dispatches[0].message.stage) == (["p0"], "prefill")
    bench.update(1, finish_reason="length")
    assert bench.tokens == [1], "the first token is streamed before the blocks are visible"
    assert bench.nodes == ["p0"]
    bench.update(is_prefill_done=True)
    assert bench.nodes == ["p0", "d0"]
    assert bench.dispatches[1].message.output_token_ids == [1]
    assert bench.dispatches[1].message.sampling.max_tokens == 6
    bench.update(2, 3).update(4, 5, 6, finish_reason="length")
    assert (bench.tokens, bench.finish_reason) == ([1, 2, 3, 4, 5, 6], "length")
    assert bench.aborted == []


def test_flow_prefill_done_before_the_token_waits_for_it() -> None:
    bench = FlowBench().start().update(is_prefill_done=True)
    assert bench.nodes == ["p0"]
    bench.update(1, finish_reason="length")
    assert bench.nodes == ["p0", "d0"]


@pytest.mark.parametrize(("sampling", "reason"), [({"max_tokens": 1}, "length"), ({"max_tokens": 9}, "stop")])
def test_flow_first_token_that_ends_the_request_needs_no_decode_node(sampling: dict[str, int], reason: str) -> None:
    bench = FlowBench(sampling=sampling).start().update(1, finish_reason=reason, stop_token_id=1 if reason == "stop" else None)
    assert (bench.tokens, bench.finish_reason, bench.nodes) == ([1], reason, ["p0"])
    assert bench.delivered[0].stop_token_id == (1 if reason == "stop" else None)


def test_flow_prefill_node_dies_before_its_token_decode_node_does_it_all() -> None:
    bench = FlowBench().start().lose("p0")
    assert (bench.nodes, bench.dispatches[1].message.output_token_ids) == (["p0", "d0"], [])
    assert bench.counted("local_prefill") == ["prefill_failed"]
    assert bench.update(1, finish_reason="stop").tokens == [1]


def test_flow_prefill_node_dies_after_its_token_decode_goes_on_from_it() -> None:
    bench = FlowBench().start().update(1, finish_reason="length").lose("p0")
    assert bench.nodes == ["p0", "d0"]
    bench.update(2, finish_reason="stop")
    assert (bench.tokens, bench.finish_reason) == ([1, 2], "stop")


def test_flow_prefill_node_reports_error_decode_node_does_it_all() -> None:
    bench = FlowBench(num_prefill=2).start().update(finish_reason="error", error="no room")
    assert bench.nodes == ["p0", "d0"]
    assert bench.counted("retry") == ["node_error"]


def test_flow_prefill_timeout_goes_on_at_the_decode_node_and_ignores_the_late_token() -> None:
    bench = FlowBench(prefill_timeout_s=2.0).start().wait(2.0)
    assert bench.nodes == ["p0", "d0"]
    assert bench.aborted == ["r.1"]
    assert bench.counted("local_prefill") == ["prefill_timeout"]
    assert bench.counted("retry") == [], "a timeout is no fault of the request"
    bench.update(7, wire_id="r.1", node_id="p0", first_index=0, finish_reason="length")
    bench.update(1, wire_id="r.1", node_id="p0", first_index=0, is_prefill_done=True)
    assert bench.tokens == []
    assert bench.update(1, 2, finish_reason="stop").tokens == [1, 2]


def test_flow_prefill_done_that_never_comes_goes_on_with_the_first_token() -> None:
    bench = FlowBench(prefill_timeout_s=2.0).start().update(1, finish_reason="length").wait(2.0)
    assert (bench.nodes, bench.dispatches[1].message.output_token_ids) == (["p0", "d0"], [1])


def test_flow_decode_node_dies_mid_stream_another_goes_on() -> None:
    bench = FlowBench(num_decode=2).start().update(1, is_prefill_done=True).update(2, 3)
    first, other = bench.nodes[1], {"d0": "d1", "d1": "d0"}[bench.nodes[1]]
    bench.lose(first)
    assert bench.nodes[2] == other
    assert bench.dispatches[2].message.output_token_ids == [1, 2, 3]
    bench.update(9, wire_id="r.2", node_id=first, first_index=3)
    bench.update(4, 5, 6, finish_reason="length")
    assert bench.tokens == [1, 2, 3, 4, 5, 6]
    assert [(count.reason, count.outcome) for count in bench.counts if count.what == "migration"] == [("node_down", "resumed")]


def test_flow_all_decode_nodes_dead_waits_for_one_and_goes_on() -> None:
    bench = FlowBench(node_wait_s=10.0).start().update(1, is_prefill_done=True).update(2).lose("d0")
    bench.wait(9.0)
    assert bench.fail is None
    bench.add("d7", "decode")
    assert bench.nodes[-1] == "d7"
    assert bench.update(3, finish_reason="stop").tokens == [1, 2, 3]


def test_flow_all_decode_nodes_dead_for_too_long_fails_with_503() -> None:
    bench = FlowBench(node_wait_s=10.0).start().update(1, is_prefill_done=True).update(2).lose("d0").wait(10.0)
    assert bench.fail is not None
    assert (bench.fail.kind, bench.fail.http_status) == ("no_decode_node", 503)
    assert "d0 died" in bench.fail.message
    assert [(count.reason, count.outcome) for count in bench.counts if count.what == "migration"] == [("node_down", "failed")]


def test_flow_no_node_at_start_waits_and_then_uses_the_prefill_node_too() -> None:
    bench = FlowBench(num_prefill=0, num_decode=0, node_wait_s=3.0).start().wait(2.0)
    assert bench.add("p5", "prefill").nodes == [], "without a decode node nothing could finish"
    assert bench.add("d5", "decode").nodes == ["p5"]


def test_flow_same_node_back_under_a_new_generation_is_used_after_a_pause() -> None:
    bench = FlowBench(num_prefill=0).start().update(1).lose("d0").add("d0", "decode")
    assert bench.nodes == ["d0"]
    bench.wait(1.0)
    assert bench.nodes == ["d0", "d0"]
    assert bench.update(2, finish_reason="stop").tokens == [1, 2]


def test_flow_poison_request_fails_after_max_attempts() -> None:
    bench = FlowBench(num_prefill=1, num_decode=8, max_attempts=3).start()
    for _ in range(3):
        bench.lose(bench.nodes[-1])
    assert bench.fail is not None
    assert (bench.fail.kind, bench.fail.http_status) == ("too_many_attempts", 500)
    assert len(bench.nodes) == 3


def test_flow_node_that_refuses_at_once_is_tried_again_with_pauses() -> None:
    bench = FlowBench(num_prefill=0, max_attempts=4).start()
    start_s = bench.now_s
    for _ in range(3):
        bench.update(finish_reason="error", error="queue is full")
        assert not bench.open, "an immediate retry would burn the attempts"
        bench.wait(bench.flow.next_deadline_s - bench.now_s)
    bench.update(finish_reason="error", error="queue is full")
    assert bench.fail is not None and "queue is full" in bench.fail.message
    assert bench.now_s - start_s == pytest.approx(0.05 + 0.1 + 0.2)


def test_flow_node_error_prefers_another_node_at_once() -> None:
    bench = FlowBench(num_prefill=0, num_decode=2).start()
    first = bench.nodes[0]
    bench.update(finish_reason="abort")
    assert len(bench.nodes) == 2 and bench.nodes[1] != first
    assert bench.counted("retry") == ["node_abort"]


@pytest.mark.parametrize("progress", ["waiting", "prefill", "decode"])
def test_flow_deadline_aborts_and_fails_with_504(progress: str) -> None:
    num_nodes = 0 if progress == "waiting" else 1
    bench = FlowBench(num_nodes, num_nodes, request_timeout_s=5.0, node_wait_s=60.0).start()
    if progress == "decode":
        bench.update(1, is_prefill_done=True)
    bench.wait(5.0)
    assert bench.fail is not None
    assert (bench.fail.kind, bench.fail.http_status) == ("deadline", 504)
    assert len(bench.aborted) == num_nodes


def test_flow_dispatch_carries_the_time_that_is_left() -> None:
    bench = FlowBench(request_timeout_s=50.0).start()
    bench.now_s += 20.0
    bench.update(1, is_prefill_done=True)
    assert [dispatch.message.time_left_s for dispatch in bench.dispatches] == [50.0, 30.0]


@pytest.mark.parametrize("progress", ["prefill", "decode"])
def test_flow_client_gone_aborts_and_stays_silent(progress: str) -> None:
    bench = FlowBench().start()
    if progress == "decode":
        bench.update(1, is_prefill_done=True)
    wire_id = next(iter(bench.open))
    bench.take(bench.flow.cancel())
    assert bench.aborted == [wire_id]
    num_delivered = len(bench.delivered)
    bench.update(8, wire_id=wire_id, node_id=bench.nodes[-1]).lose("d0").lose("p0").wait(9999.0)
    assert (len(bench.delivered), bench.fail, bench.open) == (num_delivered, None, {})


def test_flow_repeated_update_is_delivered_once() -> None:
    bench = FlowBench(num_prefill=0).start().update(1, 2)
    bench.update(1, 2, first_index=0).update(2, 3, first_index=1)
    assert bench.tokens == [1, 2, 3]


def test_flow_gap_is_a_fault_and_the_missing_tokens_are_made_again() -> None:
    bench = FlowBench(num_prefill=0, num_decode=2).start().update(1).update(3, first_index=2)
    assert bench.tokens == [1]
    assert bench.counted("retry") == ["token_gap"]
    assert bench.dispatches[1].message.output_token_ids == [1]


def test_flow_late_update_of_an_older_dispatch_to_the_same_node_is_ignored() -> None:
    bench = FlowBench(num_prefill=0).start().update(finish_reason="abort").wait(1.0)
    assert list(bench.open) == ["r.2"]
    bench.update(5, wire_id="r.1", node_id="d0", first_index=0)
    assert bench.tokens == []
    assert bench.update(1, finish_reason="stop").tokens == [1]


def test_flow_prefill_that_ends_without_a_token_is_a_fault() -> None:
    bench = FlowBench().start().update(finish_reason="length", is_prefill_done=True)
    assert (bench.nodes, bench.counted("retry")) == (["p0", "d0"], ["node_error"])


def test_flow_update_of_another_node_under_our_id_is_ignored() -> None:
    bench = FlowBench(num_prefill=0, num_decode=2).start()
    wire_id, node_id = next(iter(bench.open.items()))
    bench.update(5, wire_id=wire_id, node_id="d1" if node_id == "d0" else "d0")
    assert bench.tokens == []


def test_flow_more_tokens_than_asked_for_are_cut() -> None:
    bench = FlowBench(num_prefill=0, sampling={"max_tokens": 2}).start().update(1, 2, 3)
    assert (bench.tokens, bench.finish_reason, bench.aborted) == ([1, 2], "length", ["r.1"])


def test_flow_logprobs_stay_parallel_when_repeated_tokens_are_skipped() -> None:
    bench = FlowBench(num_prefill=0).start().update(1)
    bench.update(1, 2, first_index=0, logprobs=(logprob_of(1, 0), logprob_of(2, 0)))
    assert bench.delivered[-1].logprobs == (logprob_of(2, 0),)


def test_flow_prompt_logprobs_of_chunks_come_once_and_complete() -> None:
    bench = FlowBench(sampling={"prompt_logprobs": 0}).start()
    entries = tuple(logprob_of(token_id, 0) for token_id in PROMPT[1:])
    bench.update(prompt_logprobs=entries[:7])
    assert bench.delivered == []
    bench.update(1, prompt_logprobs=entries[7:], is_prefill_done=True)
    assert bench.delivered[0].prompt_logprobs == entries
    assert bench.dispatches[1].message.sampling.prompt_logprobs is None
    bench.update(2, prompt_logprobs=entries, finish_reason="stop")
    assert [delivery.prompt_logprobs for delivery in bench.delivered] == [entries, None]


def test_flow_prompt_logprobs_cut_off_by_a_death_are_collected_anew() -> None:
    bench = FlowBench(sampling={"prompt_logprobs": 0}).start()
    entries = tuple(logprob_of(token_id, 0) for token_id in PROMPT[1:])
    bench.update(prompt_logprobs=entries[:7]).lose("p0")
    assert bench.dispatches[1].message.sampling.prompt_logprobs == 0
    bench.update(1, prompt_logprobs=entries)
    assert bench.delivered[0].prompt_logprobs == entries


def test_flow_cached_tokens_are_of_the_stage_that_ran_first() -> None:
    bench = FlowBench().start().update(1, num_cached_tokens=4, is_prefill_done=True)
    bench.update(2, num_cached_tokens=16, finish_reason="stop")
    assert [delivery.num_cached_tokens for delivery in bench.delivered] == [4, 4]


@pytest.mark.parametrize("seed", range(60))
def test_flow_random_faults_give_the_same_tokens_or_an_honest_error(seed: int) -> None:
    """Nodes answer truthfully, die, stall, repeat themselves and come back, in random order."""
    source = random.Random(seed)
    wanted = expected_tokens(PROMPT, 6, 100)
    bench = FlowBench(num_prefill=2, num_decode=3, max_attempts=6, request_timeout_s=60.0, prefill_timeout_s=3.0).start()
    generation = 10
    for _ in range(200):
        if bench.flow.is_done:
            break
        choice = source.random()
        if choice < 0.15:
            bench.lose(source.choice(["p0", "p1", "d0", "d1", "d2"]))
        elif choice < 0.3:
            generation += 1
            node_id = source.choice(["p0", "p1", "d0", "d1", "d2"])
            bench.lose(node_id).add(node_id, "prefill" if node_id[0] == "p" else "decode", generation)
        elif choice < 0.45:
            bench.wait(source.choice([0.01, 0.3, 4.0]))
        elif bench.open:
            wire_id, node_id = next(iter(bench.open.items()))
            start = source.randint(0, len(bench.tokens))
            end = min(6, len(bench.tokens) + source.randint(0, 2))
            if bench.flow.phase.value == "prefill":
                end = min(end, 1)
            reason = "length" if end == 6 or (end == 1 and bench.flow.phase.value == "prefill") else ""
            update = RequestUpdate(
                request_id=wire_id,
                first_index=start,
                token_ids=tuple(wanted[start:end]),
                finish_reason=reason,
                is_prefill_done=source.random() < 0.5,
            )
            bench.take(bench.flow.on_update(node_id, update, bench.now_s))
    bench.wait(100.0)
    assert bench.flow.is_done
    assert bench.tokens == wanted[: len(bench.tokens)]
    assert (bench.finish_reason == "length" and bench.tokens == wanted) != (bench.fail is not None)


@pytest.mark.parametrize(
    ("fields", "fragment"),
    [
        ({"token_ids": (100,)}, "vocabulary"),
        ({"token_ids": (-1,)}, "vocabulary"),
        ({"token_ids": (7, 8), "logprobs": (logprob_of(7, 0),)}, "log-probabilities of other tokens"),
        ({"token_ids": (7,), "logprobs": (logprob_of(8, 0),)}, "log-probabilities of other tokens"),
        ({"token_ids": (99,), "logprobs": (logprob_of(99, 2),)}, "vocabulary"),
        ({"prompt_logprobs": (logprob_of(2**62, 0),)}, "vocabulary"),
        ({"token_ids": (7, 8), "first_index": -1}, "first_index -1"),
        ({"num_cached_tokens": len(PROMPT) + 1}, "num_cached_tokens"),
        ({"num_cached_tokens": -1}, "num_cached_tokens"),
    ],
)
def test_flow_update_that_cannot_be_true_is_a_fault_and_nothing_of_it_is_delivered(fields: dict[str, Any], fragment: str) -> None:
    bench = FlowBench(num_prefill=0, num_decode=2).start()
    (wire_id, first), *_ = bench.open.items()
    bench.take(bench.flow.on_update(first, RequestUpdate(wire_id, **fields), bench.now_s, 100))
    assert (bench.tokens, bench.aborted, len(set(bench.nodes))) == ([], [wire_id], 2)
    assert bench.counted("retry") == ["bad_update"]
    assert fragment in bench.flow._last_fault
