"""Clients that read slowly or vanish: the node that works for them is not held up, and nothing is held for them."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.process_samples import sample_process
from tests.fault.rig import Rig
from tests.fault.verified_load import Question
from tests.support.cluster import HOST, MODEL_NAME

ABORT_LIMIT_S = 10.0  # a step or two; what the abandoned request would still have to do takes several times as long
SLOW_CHOICES, SLOW_TOKENS = 32, 112  # some 3 MB with 20 logprobs each: more than the kernel buffers
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
    (neighbour,) = rig.new_questions([60], 32)

    def neighbour_s(salt: str) -> float:
        (record,) = rig.start(salt, [neighbour])
        rig.check_right([record])
        return record.ended_at_s - record.sent_at_s

    before = sample_process(rig.cluster.children["router"].pid)
    long = {"n": SLOW_CHOICES, "max_tokens": SLOW_TOKENS, "logprobs": 20}
    with _raw_client(rig, rig.questions[1], receive_buffer_bytes=4096, **long) as slow:
        rig.cluster.wait_until(lambda: rig.cluster.audit()["router"]["requests_in_flight"] > 0, "it is being served")
        rig.cluster.wait_clean(180.0)  # the nodes are done, and the router has no request, although nobody has read
        beside_slow_s = neighbour_s("beside a slow reader")
        growth_mib = sample_process(rig.cluster.children["router"].pid).anon_mib - before.anon_mib
        num_queued_in_kernel = _num_unsent_bytes(slow.socket)
        received = slow.read_all()
    beside_nobody_s = neighbour_s("beside nobody")
    assert received.count(b"data: ") == SLOW_CHOICES * SLOW_TOKENS + 1
    assert b"data: [DONE]" in received
    assert len(received) > num_queued_in_kernel + 2 * 65536, "the router must have been kept from sending"
    assert beside_slow_s < 2.0 * beside_nobody_s
    assert growth_mib < MAX_ROUTER_GROWTH_MIB


def _num_unsent_bytes(client: socket.socket) -> int:
    """What the kernel holds for the server's end of this connection."""
    local, remote = f":{client.getpeername()[1]:04X}", f":{client.getsockname()[1]:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(local) and fields[2].endswith(remote):
            return int(fields[4].partition(":")[0], 16)
    raise AssertionError("the server has no such connection")
