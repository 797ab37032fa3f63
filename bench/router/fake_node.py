"""Nodes that compute nothing: they speak the real wire and answer every request with as many tokens as it asked for.

python -m bench.router.fake_node --router 127.0.0.1:8001 --nodes 4 --pace-ms 10

pace 0: all tokens at once, an Updates message each. Else a message every pace-ms with one token of each request, as an engine's
steps give them. One process and one thread for all nodes; it ends with SIGTERM.
"""

from __future__ import annotations

import argparse
import time

import zmq

from core.node_session import NodeSession
from core.stats import EngineStats
from core.wire.messages import Abort, Generate, Heartbeat, ModelInfo, NodeLoad, NodeMessage, Register, RequestUpdate, Updates
from core.wire.sockets import open_node_socket

FIRST_TOKEN_ID = 1000  # tokens from here on are text in any vocabulary
NUM_TOKEN_IDS = 500
REGISTER_AGAIN_S = 1.0
_MODEL = ModelInfo(
    model_name="fake",
    model_fingerprint=bytes(16),
    layout_fingerprint=bytes(16),
    block_size=16,
    max_model_len=8192,
    vocab_size=49152,
    dtype="bfloat16",
)


class FakeNode:
    """One decode node. `poll` is called again and again by the loop that owns it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], router_address: str, node_id: str, pace_s: float) -> None:
        self._node_id = node_id
        self._pace_s = pace_s
        registration = Register(
            node_id=node_id, role="decode", generation=1, model=_MODEL, max_num_seqs=1024, num_blocks=65536, connector="none"
        )
        self._session = NodeSession(registration)
        self.socket = open_node_socket(context, router_address, node_id.encode())
        self._num_tokens_by_id: dict[str, tuple[int, int]] = {}  # sent, wanted
        self._next_step_s = 0.0
        self._next_word_s = 0.0  # of registration, then of heartbeats

    def poll(self, now_s: float) -> None:
        """Read what is there, then send what is due."""
        while self.socket.poll(0):
            for message in self._session.receive(self.socket.recv()):
                if isinstance(message, Generate):
                    self._num_tokens_by_id[message.request_id] = (0, message.sampling.max_tokens)
                elif isinstance(message, Abort):
                    for request_id in message.request_ids:
                        self._num_tokens_by_id.pop(request_id, None)
        self._keep_in_touch(now_s)
        if self._pace_s == 0:
            while self._num_tokens_by_id:
                self._step()
        elif self._num_tokens_by_id and now_s >= self._next_step_s:
            self._next_step_s = now_s + self._pace_s
            self._step()

    def _step(self) -> None:
        updates = []
        for request_id, (num_sent, num_wanted) in list(self._num_tokens_by_id.items()):
            is_last = num_sent + 1 >= num_wanted
            token_id = FIRST_TOKEN_ID + num_sent % NUM_TOKEN_IDS
            updates.append(RequestUpdate(request_id, num_sent, (token_id,), "length" if is_last else ""))
            if is_last:
                del self._num_tokens_by_id[request_id]
            else:
                self._num_tokens_by_id[request_id] = (num_sent + 1, num_wanted)
        self._send(Updates(tuple(updates)))

    def _keep_in_touch(self, now_s: float) -> None:
        if now_s < self._next_word_s:
            return
        if not self._session.is_registered:
            self._next_word_s = now_s + REGISTER_AGAIN_S
            self.socket.send(self._session.register())
            return
        self._next_word_s = now_s + self._session.heartbeat_interval_s
        load = NodeLoad(num_running=len(self._num_tokens_by_id))
        self._send(Heartbeat(node_id=self._node_id, generation=1, load=load, stats=EngineStats()))

    def _send(self, message: NodeMessage) -> None:
        if (frame := self._session.pack(message)) is not None:
            self.socket.send(frame)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True, help="its control address, HOST:PORT")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--pace-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pace_s = arguments.pace_ms / 1000
    nodes = [FakeNode(context, arguments.router, f"fake-{place}", pace_s) for place in range(arguments.nodes)]
    poller = zmq.Poller()
    for node in nodes:
        poller.register(node.socket, zmq.POLLIN)
    while True:
        poller.poll(max(1, int(arguments.pace_ms / 4)) if pace_s else 50)
        for node in nodes:
            node.poll(time.monotonic())


if __name__ == "__main__":
    main()
