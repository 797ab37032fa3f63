"""Raw garbage on real control sockets, in both directions: afterwards, and meanwhile, both ends work."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import zmq

from core.wire import messages
from core.wire.numbering import OUTSIDE, add_header
from tests.support.fake_runner import oracle_tokens
from tests.unit.core.test_node import NodeUnderTest, _generate
from tests.unit.router.flow_bench import heartbeat_message, register_message
from tests.unit.router.running_router import RunningRouter
from tests.unit.router.test_http_faults import complete, expected, metric, wait_until
from tests.unit.router.tiny_model import build_byte_level_folder

PROMPT = [1, 2, 3, 4, 5, 6]


CANARY = Path(tempfile.gettempdir()) / f"kvrelay-unpickled-{os.getpid()}"
PICKLE = f"cos\nsystem\n(S'touch {CANARY}'\ntR.".encode()  # whoever unpickles this runs a command


@pytest.fixture(autouse=True)
def nothing_is_ever_unpickled() -> Iterator[None]:
    yield
    assert not CANARY.exists(), "bytes from a peer were unpickled"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny model."""
    return build_byte_level_folder(tmp_path_factory.mktemp("tiny"))


def garbage(well_formed: bytes) -> list[list[bytes]]:
    """Frames that are no message."""
    truncated = [[well_formed[:length]] for length in range(0, len(well_formed), max(1, len(well_formed) // 20))]
    return [
        [b""],
        [b"", b""],
        [b"junk"],
        [PICKLE],
        [add_header(OUTSIDE, PICKLE)],
        [well_formed, b""],
        [b"", well_formed],
        [b"x"] * 300,
        [bytes(10 * 1024 * 1024)],
        [b"\x91" * 1_000_000],
        [b"\xdd\xff\xff\xff\xff"],
        *([os.urandom(size)] for size in (1, 10, 1000, 100_000)),
        *truncated,
    ]


@pytest.fixture
def node() -> Iterator[NodeUnderTest]:
    under_test = NodeUnderTest()
    yield under_test
    under_test.close()


def test_node_fed_with_garbage_frames_goes_on_with_its_requests(node: NodeUnderTest, caplog: pytest.LogCaptureFixture) -> None:
    node.register()
    node.send(_generate("a", max_tokens=200))
    tokens = node.wait_for_tokens("a", 2)
    frames = garbage(messages.encode(_generate("b")))
    for payload in frames:
        node.socket.send_multipart([node.identity, *payload])
    node.send(_generate("c"))
    assert node.wait_for_tokens("c", 5) == oracle_tokens(PROMPT, 5)
    assert tokens == oracle_tokens(PROMPT, 2)
    node.send(messages.Abort(("a",)))
    reply = node.audit()
    assert (reply.problems, reply.counts["requests"]) == ((), 0)
    assert node.wait_for(messages.Heartbeat).node_id == "n1"
    lines = [record for record in caplog.records if "ignored" in record.message and record.levelno >= logging.WARNING]
    assert 1 <= len(lines) <= 3, f"{len(frames)} bad messages made {len(lines)} lines"


@pytest.mark.parametrize("interval_s", [float("nan"), -1.0])
def test_node_told_an_absurd_heartbeat_interval_registers_again_and_lives(node: NodeUnderTest, interval_s: float) -> None:
    node.wait_for(messages.Register)
    node.send_at(OUTSIDE, messages.RegisterReply(heartbeat_interval_s=interval_s))
    node.wait_for(messages.Register)  # that was no answer
    node.send_at(OUTSIDE, messages.RegisterReply(heartbeat_interval_s=0.05))
    assert node.wait_for(messages.Heartbeat).node_id == "n1"
    node.send(_generate("a"))
    assert node.wait_for_tokens("a", 5) == oracle_tokens(PROMPT, 5)


def test_node_flooded_with_garbage_still_sends_heartbeats_and_tokens(node: NodeUnderTest) -> None:
    node.register()
    node.send(_generate("a"))
    for _ in range(20_000):
        node.socket.send_multipart([node.identity, b"junk"], zmq.NOBLOCK)
    assert node.wait_for_tokens("a", 5) == oracle_tokens(PROMPT, 5)
    assert node.wait_for(messages.Heartbeat).node_id == "n1"


def test_router_fed_with_garbage_frames_and_raw_bytes_serves_on(model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with RunningRouter(model_folder) as router:
        router.add_node("prefill")
        router.add_node("decode")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{router.control_port}")
        frames = garbage(messages.encode(register_message("evil", "decode")))
        for payload in frames:
            dealer.send_multipart(payload)
        for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, os.urandom(5000), b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f"):
            with socket.create_connection(("127.0.0.1", router.control_port)) as stranger:
                stranger.sendall(raw)
        assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
        wait_until(lambda: metric(router, "kvrelay_wire_errors_total") >= len(frames) - 1, "all of it was counted")
        assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
        lines = [record for record in caplog.records if "ignored" in record.message]
        assert 1 <= len(lines) <= 3, f"{len(frames)} bad messages made {len(lines)} lines"
        dealer.close(linger=0)
        context.term()


def test_router_flooded_on_its_control_socket_still_answers_clients(model_folder: Path) -> None:
    with RunningRouter(model_folder, heartbeat_timeout_s=20.0) as router:
        router.add_node("decode")
        must_end = threading.Event()
        flood = threading.Thread(target=_flood, args=(router.control_port, must_end))
        flood.start()
        try:
            wait_until(lambda: metric(router, "kvrelay_wire_errors_total") > 500, "the flood is there", 20.0)
            for _ in range(3):
                assert complete(router).json()["choices"][0]["token_ids"] == expected(router)
            assert httpx.get(f"{router.url}/health", timeout=5).status_code == 200
        finally:
            must_end.set()
            flood.join()


def _flood(port: int, must_end: threading.Event) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.SNDHWM, 1000)
    dealer.connect(f"tcp://127.0.0.1:{port}")
    heartbeat = messages.encode(heartbeat_message("nobody"))
    while not must_end.is_set():
        try:
            dealer.send(b"junk", zmq.NOBLOCK)
            dealer.send(heartbeat, zmq.NOBLOCK)
        except zmq.Again:
            time.sleep(0.001)
    dealer.close(linger=0)
    context.term()
