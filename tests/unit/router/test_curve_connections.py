"""CURVE on real sockets: the right keys register, nothing else does, in both directions, and the router outlives it all."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import zmq

from core.clock import MonotonicClock
from core.config import RouterOptions
from core.errors import ConfigError
from core.node_link import NodeLink
from core.wire.curve import NODE, ROUTER, CurveKeys, create_keys, load_keys
from core.wire.messages import Register, RouterMessage, encode
from core.wire.numbering import OUTSIDE
from router.dispatcher import Dispatcher
from router.metrics import RouterMetrics
from tests.unit.router.fake_node import model_info
from tests.unit.router.running_router import RunningRouter

DEADLINE_S = 20.0


def keys_of(folder: Path, role: str) -> CurveKeys:
    keys = load_keys(str(folder), role)
    assert keys is not None
    return keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[CurveKeys, CurveKeys]:
    """A cluster's keys: the router's and the nodes'."""
    folder = tmp_path_factory.mktemp("cluster") / "keys"
    create_keys(folder)
    return keys_of(folder, ROUTER), keys_of(folder, NODE)


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[CurveKeys, CurveKeys]:
    """Another cluster's."""
    folder = tmp_path_factory.mktemp("other") / "keys"
    create_keys(folder)
    return keys_of(folder, ROUTER), keys_of(folder, NODE)


@pytest.fixture
def secure_router(model_folder: Path, keys: tuple[CurveKeys, CurveKeys]) -> Iterator[RunningRouter]:
    with RunningRouter(model_folder, keys=keys[0], node_keys=keys[1]) as router:
        yield router


def registration(router: RunningRouter, node_id: str) -> Register:
    return Register(
        node_id=node_id,
        role="decode",
        generation=1,
        model=model_info(router.model.vocab_size, router.model.max_model_len),
        max_num_seqs=1,
        num_blocks=8,
        connector="none",
    )


@contextmanager
def linked(router: RunningRouter, node_keys: CurveKeys | None, port: int = 0, host: str = "127.0.0.1") -> Iterator[NodeLink]:
    """The production link of a node "probe"."""
    link = NodeLink(f"{host}:{port or router.control_port}", registration(router, "probe"), node_keys)
    link.start()
    try:
        yield link
    finally:
        link.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {DEADLINE_S:.0f} s until {what}"
        time.sleep(0.02)


def num_failed_handshakes(router: RunningRouter) -> float:
    lines = httpx.get(f"{router.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("kvrelay_failed_handshakes_total ")).split()[1])


def node_ids(router: RunningRouter) -> set[str]:
    return {node["node_id"] for node in httpx.get(f"{router.url}/nodes").json()["nodes"]}


def assert_serves(router: RunningRouter) -> None:
    """A node with the right keys joins and answers."""
    node = router.add_node("decode")
    assert node.refusal == ""
    answer = httpx.post(f"{router.url}/v1/completions", json={"prompt": [5, 6, 7], "max_tokens": 2}, timeout=10)
    assert answer.status_code == 200, answer.text


def test_keys_right_ones_register_and_serve(secure_router: RunningRouter, keys: tuple[CurveKeys, CurveKeys]) -> None:
    with linked(secure_router, keys[1]) as link:
        wait_until(lambda: link.is_registered, "the node is registered")
        assert link.refusal == ""
        assert node_ids(secure_router) == {"probe"}
    wait_until(lambda: "probe" not in up_nodes(secure_router), "the node that left is down")
    assert_serves(secure_router)
    assert num_failed_handshakes(secure_router) == 0


def up_nodes(router: RunningRouter) -> set[str]:
    return {node["node_id"] for node in httpx.get(f"{router.url}/nodes").json()["nodes"] if node["status"] == "up"}


@pytest.mark.parametrize("case", ["missing", "wrong", "stolen_public_key", "wrong_router"])
def test_keys_wrong_ones_never_register_and_say_so(
    secure_router: RunningRouter,
    keys: tuple[CurveKeys, CurveKeys],
    other_keys: tuple[CurveKeys, CurveKeys],
    caplog: pytest.LogCaptureFixture,
    case: str,
) -> None:
    other_node = other_keys[1]
    node_keys = {
        "missing": None,
        "wrong": other_node,  # another cluster's folder
        "stolen_public_key": CurveKeys(other_node.public_key, other_node.secret_key, keys[0].public_key),
        "wrong_router": CurveKeys(keys[1].public_key, keys[1].secret_key, other_keys[0].public_key),
    }[case]
    with caplog.at_level(logging.WARNING), linked(secure_router, node_keys) as link:
        wait_until(lambda: num_failed_handshakes(secure_router) >= 2, "the node has tried twice")
        assert not link.is_registered
        assert node_ids(secure_router) == set()
        wait_until(lambda: any(record.name == "core.node_link" for record in caplog.records), "the node has said why")
    said = [record.getMessage() for record in caplog.records if record.name == "core.node_link"]
    assert any("not registered: the router at 127.0.0.1" in line and "security.keys" in line for line in said), said
    assert any("failed the handshake" in record.getMessage() for record in caplog.records if record.name == "kvrelay.router")
    assert_serves(secure_router)


def test_keys_of_the_node_alone_router_in_the_clear_gets_nothing(
    model_folder: Path, keys: tuple[CurveKeys, CurveKeys], caplog: pytest.LogCaptureFixture
) -> None:
    with RunningRouter(model_folder) as router:
        with caplog.at_level(logging.WARNING), linked(router, keys[1]) as link:
            wait_until(lambda: num_failed_handshakes(router) >= 2, "the node has tried twice")
            assert not link.is_registered
            assert node_ids(router) == set()
        said = [record.getMessage() for record in caplog.records if record.name == "core.node_link"]
        assert any("it has no keys (security.keys)" in line for line in said), said
        assert "kvrelay_wire_errors_total 0.0" in httpx.get(f"{router.url}/metrics").text, "not a byte of a message has come"
        assert_serves(router)


def test_keys_router_that_gets_the_right_ones_later_is_found(model_folder: Path, keys: tuple[CurveKeys, CurveKeys]) -> None:
    with RunningRouter(model_folder) as wrong_router:
        port = wrong_router.control_port
        with linked(wrong_router, keys[1]) as link:
            wait_until(lambda: num_failed_handshakes(wrong_router) >= 2, "the node has tried twice")
            wrong_router.__exit__()
            with RunningRouter(model_folder, keys=keys[0], node_keys=keys[1], control_port=port) as router:
                wait_until(lambda: link.is_registered, "a node whose handshake failed has not given up")
                assert node_ids(router) == {"probe"}


def test_keys_plain_client_and_noise_reach_nothing(secure_router: RunningRouter) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    plain = context.socket(zmq.DEALER)
    plain.connect(f"tcp://127.0.0.1:{secure_router.control_port}")
    try:
        plain.send(encode(registration(secure_router, "plain"), OUTSIDE))
        for noise in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48), b"\x00" * 4096):
            with socket.create_connection(("127.0.0.1", secure_router.control_port)) as raw:
                raw.sendall(noise)
        wait_until(lambda: num_failed_handshakes(secure_router) >= 2, "the router has seen them")
        assert plain.poll(100) == 0
        assert node_ids(secure_router) == set()
        assert_serves(secure_router)
    finally:
        context.destroy(linger=0)


def test_keys_flood_of_failed_handshakes_keeps_no_node_waiting(secure_router: RunningRouter) -> None:
    # libzmq's I/O thread waits when its monitor's queue of 2,000 events is full, so the router has to read them as they come.
    node = secure_router.add_node("decode")
    for _ in range(2500):
        with socket.create_connection(("127.0.0.1", secure_router.control_port)) as raw:
            raw.sendall(b"x" * 80)
    assert_serves(secure_router)
    assert up_nodes(secure_router) >= {node.node_id}


@pytest.mark.parametrize(("control_host", "node_host"), [("::1", "[::1]"), ("localhost", "localhost")])
def test_control_host_by_ipv6_and_by_name_is_found_skipped_without_ipv6(
    model_folder: Path, keys: tuple[CurveKeys, CurveKeys], control_host: str, node_host: str
) -> None:
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with (
        RunningRouter(model_folder, keys=keys[0], control_host=control_host) as router,
        linked(router, keys[1], host=node_host) as link,
    ):
        wait_until(lambda: link.is_registered, "the node is registered")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.77", "no-such-name.invalid"])
def test_control_host_beyond_loopback_is_not_bound_without_keys(host: str) -> None:
    async def bind() -> None:
        dispatcher = Dispatcher(RouterOptions(), MonotonicClock(), RouterMetrics("tiny"))
        try:
            dispatcher.bind(host, 0)
        finally:
            await dispatcher.stop()

    with pytest.raises(ConfigError, match=rf"^router\.control_host: got '{host}'"):
        asyncio.run(bind())


def test_keys_messages_travel_encrypted(secure_router: RunningRouter, keys: tuple[CurveKeys, CurveKeys]) -> None:
    """Between node and router: a listener in the middle sees no word of what is said."""
    seen = bytearray()
    with _relay(secure_router.control_port, seen) as port, linked(secure_router, keys[1], port) as link:
        wait_until(lambda: link.is_registered, "the node is registered")
        commands: list[RouterMessage] = list(link.commands)
    assert not commands and len(seen) > 500
    assert b"probe" not in seen and b"register" not in seen and b"CURVE" in seen


@contextmanager
def _relay(port: int, seen: bytearray) -> Iterator[int]:
    """A TCP relay for one connection that keeps what passes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def copy(source: socket.socket, target: socket.socket) -> None:
        while True:
            try:
                piece = source.recv(65536)
                seen.extend(piece)
                target.sendall(piece)
            except OSError:
                return
            if not piece:
                return

    def accept() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(("127.0.0.1", port)) as server:
            back = threading.Thread(target=copy, args=(server, client))
            back.start()
            copy(client, server)
            server.shutdown(socket.SHUT_RDWR)
            back.join()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()
