"""Whatever clients send over HTTP gets an honest answer in time, and the next honest request works."""

from __future__ import annotations

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai_protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tests.fuzz.examples import num_examples
from tests.fuzz.hostile import SCALARS
from tests.fuzz.http_client import HANG_S, check_honest, check_raw_answer, post_checked, send_raw
from tests.unit.router.running_router import RunningRouter
from tests.unit.router.test_http_faults import wait_until
from tests.unit.router.tiny_model import CHAT_TEMPLATE, build_byte_level_folder

# Leaves as they are written in JSON, or should not be.
_WRITTEN = st.sampled_from(
    [
        *(
            "1e999",
            "-1e999",
            "1e-999",
            "9" * 4000,
            "9" * 5000,
            "1" + "0" * 400,
            "-1",
            "0",
            "1",
            "2",
            "-0",
            "1.5",
            "0x1",
            "NaN",
            "01",
        ),
        *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"💥"', '""', '"a"', '"\x01"', '"' + "a" * 5000 + '"', "'a'", '"\\x"'),
        *("null", "true", "false", "[]", "{}", "[[]]", "[1,2,3]", '["a","b"]', '[1,"a"]', "[[1,2],[3]]", "[null]", '{"5":1e9}'),
        *("[" * depth + "]" * depth for depth in range(880, 1000, 8)),
        *('[{"role":"assistant","tool_calls":[{"a":' + "[" * depth + "]" * depth + "}]}]" for depth in range(15, 1000, 12)),
        *("[" * 3000 + "]" * 3000, '{"a":' * 200 + "1" + "}" * 200, "[" + "1," * 2000 + "1]", "", ",", '{"a":1,"a":2}'),
        *('[{"role":"user","content":"hi"}]', '[{"role":"user","content":[{"type":"text","text":"hi"}]}]', '[{"role":"tool"}]'),
        *('[{"type":"function","function":{"name":"f"}}]', '{"type":"function","function":{"name":"f"}}', '"required"', '"auto"'),
        '[{"type":"function","function":{"name":"f","parameters":' + '{"not":' * 70 + "true" + "}" * 70 + "}}]",
        *('{"type":"text"}', '{"include_usage":true}', '[{"role":"user","content":"x","tool_calls":[{"a":[[[[]]]]}]}]'),
    ]
)


def _is_json(value: Any) -> bool:
    return not isinstance(value, bytes)


_VALUES = st.one_of(_WRITTEN, SCALARS.filter(_is_json).map(lambda value: json.dumps(value, ensure_ascii=False)))


def _bodies(struct: type, good: dict[str, str]) -> st.SearchStrategy[bytes]:
    """Bodies of an endpoint: what makes a small request succeed, then fields with anything in them, some twice."""
    names = st.sampled_from([*struct.__struct_fields__, "metadata", "model"])  # type: ignore[attr-defined]
    fields = st.lists(st.tuples(names, _VALUES), max_size=4)
    start = st.sampled_from([good, good, good, {}])
    body = st.builds(lambda base, more: _write([*base.items(), *more]), start, fields)
    return st.one_of(body, body, body, st.builds(_cut, body, st.integers(0, 300), st.binary(max_size=4)), _VALUES.map(_encode))


def _write(fields: list[tuple[str, str]]) -> bytes:
    return _encode("{" + ",".join(f'"{name}":{value}' for name, value in fields) + "}")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _cut(body: bytes, place: int, inserted: bytes) -> bytes:
    return body[:place] + inserted + body[place + 1 :]


_REQUESTS = st.one_of(
    st.tuples(st.just("/v1/completions"), _bodies(CompletionRequest, {"prompt": "[5,6,7]", "max_tokens": "2"})),
    st.tuples(
        st.just("/v1/chat/completions"),
        _bodies(ChatRequest, {"messages": '[{"role":"user","content":"hi"}]', "max_tokens": "2"}),
    ),
    st.tuples(st.just("/tokenize"), _bodies(TokenizeRequest, {"prompt": '"hello"'})),
    st.tuples(st.just("/detokenize"), _bodies(DetokenizeRequest, {"tokens": "[5,6]"})),
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return build_byte_level_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def router(model_folder: Path) -> Iterator[RunningRouter]:
    """A router with two nodes that do what they should, and a chat template with tools."""
    template = model_folder / "tools.jinja"
    template.write_text("{{ tools | tojson }}" + CHAT_TEMPLATE)
    limits: dict[str, Any] = {"max_choices": 4, "max_body_bytes": 200_000, "header_timeout_s": 5.0, "body_timeout_s": 5.0}
    with RunningRouter(model_folder, chat_template=str(template), tool_call_parser="hermes", **limits) as running:
        running.add_node("prefill")
        running.add_node("decode")
        yield running


@pytest.fixture(scope="module")
def client(router: RunningRouter) -> Iterator[httpx.Client]:
    """One connection that is used again."""
    with httpx.Client(base_url=router.url) as opened:
        yield opened


@given(request=_REQUESTS)
@settings(max_examples=num_examples(400))
def test_http_hostile_body_gets_an_honest_answer(router: RunningRouter, client: httpx.Client, request: tuple[str, bytes]) -> None:
    post_checked(client, *request)


def test_http_after_hostile_bodies_nothing_is_held(router: RunningRouter) -> None:
    check_honest(router)
    wait_until(lambda: router.dispatcher.core.num_in_flight == 0, "the router has nothing in flight")
    assert httpx.get(f"{router.url}/audit").status_code == 200


_LINES = [
    b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: 40\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffff\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: \xb2\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: text/\xff\r\ncontent-length: 2\r\n\r\n{}",
    b"GET /\xff\xfe HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /%ff%00/../../etc/passwd HTTP/1.1\r\nhost: a\r\n\r\n",
    b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET /health\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-key: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nx-request-id: " + b"\xff" * 50 + b"\r\n\r\n",
    b"GET /v1/models/" + b"a/" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET /health HTTP/1.1\r\nhost: a\r\nfolded: a\r\n b\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
    b"\r\n" * 1000,
    b"\x00",
    b"",
]


@pytest.mark.parametrize("data", _LINES, ids=range(len(_LINES)))
def test_http_garbage_instead_of_a_request_is_answered_or_cut(router: RunningRouter, data: bytes) -> None:
    check_raw_answer(send_raw(router, data))


@given(
    st.one_of(
        st.binary(max_size=300),
        st.builds(_cut, st.sampled_from(_LINES), st.integers(0, 120), st.binary(max_size=3)),
    )
)
@settings(max_examples=num_examples(60))
def test_http_random_bytes_are_answered_or_cut(router: RunningRouter, data: bytes) -> None:
    check_raw_answer(send_raw(router, data))


def test_http_headers_without_end_are_refused(router: RunningRouter) -> None:
    for headers in (b"x: " + b"a" * 200_000, b"x: a\r\n" * 50_000):
        answer = send_raw(router, b"GET /health HTTP/1.1\r\nhost: a\r\n" + headers + b"\r\n\r\n", half_close=False)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 431 ")
        check_raw_answer(answer)
    assert send_raw(router, b"GET /" + b"a" * 200_000, half_close=False)[:13] in (b"HTTP/1.1 431 ", b"")
    chunked = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"x: a\r\n" * 50_000
    check_raw_answer(send_raw(router, chunked, half_close=False))
    check_honest(router)


def test_http_client_that_is_slow_or_silent_is_cut(model_folder: Path) -> None:
    with RunningRouter(model_folder, header_timeout_s=0.3, body_timeout_s=0.3) as router:
        router.add_node("decode")
        starts = {
            b"": b"408 ",  # a connection and nothing else
            b"GET /health HTTP/1.1\r\nhost:": b"408 ",
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 100\r\n\r\n{": b"408 ",
            b"POST /tokenize HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n": b"408 ",
            b"GET /version HTTP/1.1\r\nhost: a\r\n\r\nGET /ver": b"200 ",  # the second one is too slow
        }
        for start, status in starts.items():
            answer = send_raw(router, start, half_close=False)
            assert answer.startswith(b"HTTP/1.1 " + status), (start, answer)
            check_raw_answer(answer)
        started_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) as trickle, pytest.raises(OSError):
            while time.monotonic() - started_s < HANG_S:
                trickle.sendall(b"G")
                time.sleep(0.02)
        assert time.monotonic() - started_s < HANG_S, "a byte now and then held the connection"
        check_honest(router)
        wait_until(lambda: not router.api._num_body_bytes, "no body is counted any more")


def test_http_client_that_takes_nothing_is_cut(model_folder: Path) -> None:
    with RunningRouter(model_folder, send_timeout_s=0.3) as router:
        router.add_node("decode")
        connections = router._server.server_state.connections
        with socket.socket() as greedy:
            greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            greedy.connect(("127.0.0.1", int(router.url.rpartition(":")[2])))
            greedy.settimeout(1.0)
            try:
                for _ in range(200):
                    greedy.sendall(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n" * 50)
            except OSError:
                pass  # it is not read any more, or cut already
            wait_until(lambda: not connections, "the connection was cut", HANG_S)
        check_honest(router)


def test_http_more_connections_than_allowed_are_refused_and_leave_room_when_they_end(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_connections=8) as router:
        router.add_node("decode")
        held = [socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2]))) for _ in range(8)]
        wait_until(lambda: len(router._server.server_state.connections) == 8, "all are accepted")
        answer = send_raw(router, b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 503 ")
        check_raw_answer(answer)
        for connection in held:
            connection.close()
        wait_until(lambda: not router._server.server_state.connections, "all have left")
        check_honest(router)


def test_http_many_large_bodies_at_a_time_are_bounded(model_folder: Path) -> None:
    with RunningRouter(model_folder, max_body_bytes=100_000, body_timeout_s=30.0) as router:
        router.add_node("decode")
        head = b"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: 99999\r\n\r\n"
        held = []
        for _ in range(7):
            connection = socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])))
            connection.sendall(head + b" " * 99_000)
            held.append(connection)
        wait_until(lambda: router.api._num_body_bytes >= 7 * 99_000, "seven bodies are nearly there")
        for _ in range(3):
            connection = socket.create_connection(("127.0.0.1", int(router.url.rpartition(":")[2])))
            connection.sendall(head + b" " * 99_000)
            held.append(connection)
        readable = select.select(held, [], [], HANG_S)[0]
        assert readable and not set(readable) & set(held[:7]), "those that came first go on"
        assert all(connection.recv(12) == b"HTTP/1.1 429" for connection in readable)
        assert router.api._num_body_bytes <= 8 * 100_000
        for connection in held:
            connection.close()
        wait_until(lambda: router.api._num_body_bytes == 0, "nothing is counted any more")
        check_honest(router)


def test_http_random_bytes_as_bodies_are_refused(router: RunningRouter, client: httpx.Client) -> None:
    for size in (0, 1, 100, 100_000):
        assert post_checked(client, "/v1/completions", os.urandom(size)).status_code == 400
    assert post_checked(client, "/v1/completions", b"[" * 200_000).status_code == 400
    assert post_checked(client, "/v1/completions", bytes(200_001)).status_code == 413
