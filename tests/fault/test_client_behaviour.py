"""Clients that read slowly or vanish: the node that works for them is not held up, and nothing is held for them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from tests.fault.process_samples import sample_process
from tests.fault.rig import Rig
from tests.fault.verified_load import Question
from tests.support.cluster import HOST, MODEL_NAME

ABORT_LIMIT_S = 10.0  # a step or two; what the abandoned request would still have to do takes several times as long
SLOW_CHOICES, SLOW_TOKENS = 8, 80
MAX_ROUTER_GROWTH_MIB = 48.0


class RawClient:
    """A request over a plain socket, whose reading and end the test decides."""

    def __init__(self, rig: Rig, body: dict[str, object], receive_buffer_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(60.0)
        self.socket.connect((HOST, int(rig.cluster.url.rpartition(":")[2])))
        payload = json.dumps(body | {"stream": True}).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + payload)

    def read_all(self) -> bytes:
        """Until the server closes."""
        received = bytearray()
        while part := self.socket.recv(65536):
            received += part
        return bytes(received)

    def vanish(self, how: str) -> None:
        """Close with FIN, or with RST as a crashed host's peer would see it."""
        if how == "RST":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


@contextlib.contextmanager
def _raw_client(rig: Rig, question: Question, *, receive_buffer_bytes: int = 0, **changes: object) -> Iterator[RawClient]:
    client = RawClient(rig, question.body(MODEL_NAME, "raw") | changes, receive_buffer_bytes)
    try:
        yield client
    finally:
        client.socket.close()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_client_that_vanishes_mid_stream_frees_everything_at_once(rig: Rig, how: str) -> None:
    with _raw_client(rig, rig.questions[2], max_tokens=1500) as client:
        client.socket.recv(4096)
        client.vanish(how)
        rig.cluster.wait_clean(ABORT_LIMIT_S)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", ["FIN", "RST"])
def test_client_that_vanishes_mid_prefill_frees_everything_at_once(rig: Rig, how: str) -> None:
    with _raw_client(rig, rig.questions[-1], cache_salt=f"vanishes mid-prefill by {how}", max_tokens=600) as client:
        rig.cluster.wait_until(lambda: any(node["num_running"] for node in rig.cluster.client.nodes()), "the prefill has begun")
        client.socket.setblocking(False)
        with pytest.raises(BlockingIOError):  # no token yet
            client.socket.recv(1)
        client.vanish(how)
        rig.cluster.wait_clean(ABORT_LIMIT_S)


@pytest.mark.timeout(300)
def test_client_that_reads_nothing_holds_up_no_node_and_gets_it_all_when_it_reads(rig: Rig) -> None:
    long = {"n": SLOW_CHOICES, "max_tokens": SLOW_TOKENS, "logprobs": 20}
    (neighbour,) = rig.new_questions([60], 64)

    def neighbour_s(salt: str) -> float:
        (record,) = rig.start(salt, [neighbour])
        rig.check_right([record])
        return record.ended_at_s - record.sent_at_s

    with _raw_client(rig, rig.questions[1], **long) as fast:
        beside_fast_s = neighbour_s("beside a fast reader")
        expected = fast.read_all()
    print(len(expected))
    rig.cluster.wait_clean()
    before = sample_process(rig.cluster.children["router"].pid)
    with _raw_client(rig, rig.questions[1], receive_buffer_bytes=4096, **long) as slow:
        beside_slow_s = neighbour_s("beside a slow reader")
        rig.cluster.wait_clean(60.0)  # the nodes are done, and the router has no flow, although nobody has read
        time.sleep(0.5)
        growth_mib = sample_process(rig.cluster.children["router"].pid).anon_mib - before.anon_mib
        import subprocess; print(subprocess.run(f'cat /proc/net/tcp | grep -i {int(rig.cluster.url.rpartition(chr(58))[2]):04X}', shell=True, capture_output=True, text=True).stdout)
        received = slow.read_all()
    print(growth_mib, beside_slow_s, beside_fast_s)
    assert received.count(b"data: ") == expected.count(b"data: ")
    assert received.rstrip().endswith(b"0") and b"data: [DONE]" in received
    assert beside_slow_s < 2.0 * beside_fast_s
    assert growth_mib < MAX_ROUTER_GROWTH_MIB
