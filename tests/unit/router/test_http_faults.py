"""Nodes that die, hang or err, clients that leave, and a router that is full or ends, over real sockets."""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.unit.router.fake_node import FakeNode, expected_tokens
from tests.unit.router.running_router import RunningRouter

PROMPT = list(range(10, 30))


def complete(router: RunningRouter, num_tokens: int = 12, **fields: object) -> httpx.Response:
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "return_token_ids": True, **fields}
    return httpx.post(f"{router.url}/v1/completions", json=body, timeout=10)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 3.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.01)


def check_idle(router: RunningRouter) -> None:
    """Nothing is left: neither in the router nor at a node that lives."""
    wait_until(lambda: router.dispatcher.core.num_in_flight == 0, "the router has nothing in flight")
    wait_until(lambda: httpx.get(f"{router.url}/audit").status_code == 200, "the audit is clean")
    assert all(not node.in_flight for node in router.dispatcher.core.registry.connected())


def metric(router: RunningRouter, line_start: str) -> float:
    for line in httpx.get(f"{router.url}/metrics").text.splitlines():
        if line.startswith(line_start):
            return float(line.rpartition(" ")[2])
    return 0.0


def expected(router: RunningRouter, num_tokens: int = 12) -> list[int]:
    return expected_tokens(PROMPT, num_tokens, router.model.vocab_size)


def test_decode_node_killed_mid_stream_client_gets_every_token_once(model_folder: Path) -> None:
    with RunningRouter(model_folder, heartbeat_timeout_s=30.0) as router:
        router.add_node("prefill")
        first = router.add_node("decode", "d0", die_after=4, token_delay_s=0.01)
        router.add_node("decode", "d1", die_after=0, token_delay_s=0.01)
        answers = [complete(router) for _ in range(3)]
        assert first.num_tokens_sent >= 4, "the node to be killed was never used"
        assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [expected(router)] * 3
        nodes = {node["node_id"]: node for node in httpx.get(f"{router.url}/nodes").json()["nodes"]}
        assert (nodes["d0"]["status"], nodes["d0"]["down_reason"]) == ("down", "connection closed")
        assert metric(router, 'kvrelay_migrations_total{outcome="resumed",reason="node_down"}') == 1
        check_idle(router)


def test_prefill_node_killed_before_its_token_decode_node_takes_over_at_once(model_folder: Path) -> None:
    with RunningRouter(model_folder, heartbeat_timeout_s=30.0) as router:
        prefill = router.add_node("prefill", is_silent=True)
        router.add_node("decode")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(complete, router)
            wait_until(lambda: bool(prefill.received), "the prefill node has the request")
            prefill.kill()
            assert answer.result(5).json()["choices"][0]["token_ids"] == expected(router)
        assert complete(router).status_code == 200
        assert metric(router, 'kvrelay_local_prefill_total{reason="prefill_failed"}') == 1
        assert metric(router, 'kvrelay_local_prefill_total{reason="no_prefill_node"}') == 1
        check_idle(router)


def test_prefill_node_that_hangs_is_given_up_after_its_timeout(model_folder: Path) -> None:
    with RunningRouter(model_folder, prefill_timeout_s=0.2) as router:
        prefill = router.add_node("prefill", is_silent=True)
        router.add_node("decode")
        assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
        wait_until(lambda: prefill.num_running() == 0, "the prefill node was told to forget the request")
        assert metric(router, 'kvrelay_local_prefill_total{reason="prefill_timeout"}') == 1


def test_no_decode_node_health_says_so_and_requests_get_503(model_folder: Path) -> None:
    with RunningRouter(model_folder, node_wait_s=0.1) as router:
        assert httpx.get(f"{router.url}/health").json()["reasons"] == ["no decode node has registered"]
        answer = complete(router)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["type"] == "no_decode_node"
        node = router.add_node("decode")
        assert httpx.get(f"{router.url}/health").status_code == 200
        node.kill()
        wait_until(lambda: httpx.get(f"{router.url}/health").status_code == 503, "health sees the death")
        assert "connection closed" in httpx.get(f"{router.url}/health").json()["reasons"][0]


def test_no_decode_node_for_a_moment_request_waits_for_one(model_folder: Path) -> None:
    with RunningRouter(model_folder, node_wait_s=5.0) as router, concurrent.futures.ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, router)
        wait_until(lambda: router.dispatcher.core.num_in_flight == 1, "the request waits")
        router.add_node("decode")
        assert answer.result(5).json()["choices"][0]["token_ids"] == expected(router)


def test_request_deadline_before_the_first_token_is_504(model_folder: Path) -> None:
    with RunningRouter(model_folder, request_timeout_s=0.2) as router:
        node = router.add_node("decode", is_silent=True)
        answer = complete(router)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "deadline")
        wait_until(lambda: node.num_running() == 0, "the node was told to forget the request")


def test_error_mid_stream_is_an_event_and_the_end(model_folder: Path) -> None:
    with RunningRouter(model_folder, request_timeout_s=0.4) as router:
        router.add_node("decode", token_delay_s=0.1)
        body = {"prompt": PROMPT, "max_tokens": 100, "stream": True, "return_token_ids": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body) as response:
            assert response.status_code == 200
            events = [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line]
        assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["error"]["type"] == "deadline"
        check_idle(router)


@pytest.mark.parametrize("is_stream", [True, False])
def test_client_that_leaves_frees_the_node(model_folder: Path, is_stream: bool) -> None:
    with RunningRouter(model_folder) as router:
        node = router.add_node("decode", token_delay_s=0.02)
        body = {"prompt": PROMPT, "max_tokens": 200, "stream": is_stream}
        with httpx.Client() as client:
            if is_stream:
                with client.stream("POST", f"{router.url}/v1/completions", json=body) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{router.url}/v1/completions", json=body, timeout=0.2)
        wait_until(lambda: len(node.aborted) == 1, "the node was told to abort")
        check_idle(router)
        assert metric(router, 'kvrelay_request_success_total{finished_reason="abort"}') == 1


def test_node_error_is_tried_elsewhere_and_told_when_all_fail(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_attempts=3) as router:
        router.add_node("decode", "d0", fail_with="no blocks left")
        answer = complete(router)
        assert answer.status_code == 500
        assert "no blocks left" in answer.json()["error"]["message"]
        router.add_node("decode", "d1")
        assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
        check_idle(router)


def test_too_many_requests_are_429_with_retry_after(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_num_requests=2) as router, concurrent.futures.ThreadPoolExecutor() as pool:
        router.add_node("decode", token_delay_s=0.02)
        running = [pool.submit(complete, router, 20) for _ in range(2)]
        wait_until(lambda: router.dispatcher.core.num_in_flight == 2, "the router is full")
        refused = complete(router)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert [answer.result(5).status_code for answer in running] == [200, 200]
        assert complete(router, n=3).status_code == 429, "three choices never fit"
        assert complete(router).status_code == 200


def test_node_of_another_model_is_refused_and_told_why(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        router.add_node("decode", "d0")
        other = router.add_node("decode", "d1", fingerprint=b"x" * 16)
        assert other.refusal is not None and "model_fingerprint" in other.refusal


def test_node_restarted_under_its_name_takes_over(model_folder: Path) -> None:
    with RunningRouter(model_folder, heartbeat_timeout_s=30.0) as router, concurrent.futures.ThreadPoolExecutor() as pool:
        old = router.add_node("decode", "d0", is_silent=True)
        answer = pool.submit(complete, router)
        wait_until(lambda: bool(old.received), "the old process has the request")
        router.add_node("decode", "d0", generation=2)
        assert answer.result(5).json()["choices"][0]["token_ids"] == expected(router)
        wait_until(lambda: "taken over" in (old.refusal or ""), "the old process was told to end")


def test_router_that_forgot_a_node_gets_its_registration_again(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router:
        node = router.add_node("decode", "d0")
        router.dispatcher.core.registry.mark_down("d0", "a test says so")
        wait_until(lambda: router.dispatcher.core.registry.has_candidate("decode"), "the node registered again")
        assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
        assert node.refusal == ""


def test_silent_node_is_down_after_its_heartbeat_timeout(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with RunningRouter(model_folder, heartbeat_timeout_s=0.3) as router:
        node = router.add_node("decode", "d0")
        monkeypatch.setattr(node, "_step", lambda _socket: time.sleep(1.0))  # the whole process hangs, its connection stays
        router.add_node("decode", "d1")
        answers = [complete(router) for _ in range(2)]
        assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == [expected(router)] * 2
        assert metric(router, 'kvrelay_retries_total{reason="node_down"}') == 1


def test_stalled_step_thread_loses_its_requests_to_another_node(model_folder: Path) -> None:
    with RunningRouter(model_folder, step_stall_timeout_s=5.0) as router:
        stuck = router.add_node("decode", "d0", is_silent=True)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(complete, router)
            wait_until(lambda: bool(stuck.received), "the node has the request")
            router.add_node("decode", "d1")
            stuck.step_age_s = 6.0
            assert answer.result(5).json()["choices"][0]["token_ids"] == expected(router)
        nodes = {node["node_id"]: node["status"] for node in httpx.get(f"{router.url}/nodes").json()["nodes"]}
        assert nodes == {"d0": "stalled", "d1": "up"}


def test_garbage_on_the_control_socket_is_counted_and_harmless(model_folder: Path) -> None:
    import zmq

    with RunningRouter(model_folder) as router:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(f"tcp://127.0.0.1:{router.control_port}")
        for payload in ([b"junk"], [b""], [b"\x81\xa4type\xa8register"], [b"a", b"b"]):
            socket.send_multipart(payload)
        wait_until(lambda: metric(router, "kvrelay_wire_errors_total") == 4, "all four were counted")
        socket.close(linger=0)
        context.term()
        router.add_node("decode")
        assert complete(router).status_code == 200


def test_shutdown_refuses_new_requests_and_ends_streams_with_an_error(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router, concurrent.futures.ThreadPoolExecutor() as pool:
        router.add_node("decode", token_delay_s=0.05)
        running = pool.submit(complete, router, 200)
        wait_until(lambda: router.dispatcher.core.num_in_flight == 1, "the request runs")
        router.set_shutting_down()
        refused = complete(router)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        router.fail_all()
        assert running.result(5).json()["error"]["type"] == "shutdown"
        check_idle(router)


def test_burst_of_requests_over_several_nodes_keeps_every_answer_apart(model_folder: Path) -> None:
    with RunningRouter(model_folder) as router, concurrent.futures.ThreadPoolExecutor(16) as pool:
        nodes: list[FakeNode] = [router.add_node("prefill"), *(router.add_node("decode") for _ in range(2))]
        prompts = [[place + 3, *range(10, 30), place + 4] for place in range(60)]
        answers = list(pool.map(lambda prompt: complete(router, 10, prompt=prompt).json(), prompts))
        tokens = [answer["choices"][0]["token_ids"] for answer in answers]
        assert tokens == [expected_tokens(prompt, 10, router.model.vocab_size) for prompt in prompts]
        assert all(len(node.received) >= 20 for node in nodes)
        check_idle(router)
