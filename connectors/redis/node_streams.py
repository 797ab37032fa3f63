"""The connections of one user of a store: to one server, or to each primary of a cluster, where a block's hash says which.

Questions go to all servers before the first answer is read. Knows which bytes go where, not what they mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from connectors.redis.resp_stream import Reply, RespError, RespStream
from connectors.redis.server import Node, RedisServer


class NodeStreams:
    """Up to max_per_node connections to each server. Used by one thread at a time; after an exception they are out of step.

    Opening raises ConnectorError; everything else, what RespStream raises.
    """

    def __init__(self, server: RedisServer, max_per_node: int = 1, num_pipelined: int = 1) -> None:
        self._server = server
        self._max_per_node = max_per_node
        self._num_pipelined = num_pipelined
        self._streams_by_node: dict[Node, list[RespStream]] = {}
        self._num_taken_by_node: dict[Node, int] = {}

    def close(self) -> None:
        """Let go of all connections. Does not raise."""
        while self._streams_by_node:
            _node, streams = self._streams_by_node.popitem()
            for stream in streams:
                stream.close()

    def drop_stale(self) -> None:
        """Between two transfers: close what is broken, and what leads to a server that has no blocks any more."""
        nodes = self._server.nodes
        for node, streams in list(self._streams_by_node.items()):
            fine = [stream for stream in streams if node in nodes and not stream.is_stale()]
            for stream in streams:
                if stream not in fine:
                    stream.close()
            self._streams_by_node[node] = fine

    # -- questions, over the first connection to each ------------------------------------------------------------------
    def first_of_each(self) -> dict[Node, RespStream]:
        """One connection to each server."""
        return {node: self._stream(node, 0) for node in self._server.nodes}

    def ask_each(self, commands: bytes, num_replies: int) -> dict[Node, list[Reply | RespError]]:
        """The same of all servers; a refusal stands in its command's place."""
        streams = self.first_of_each()
        for stream in streams.values():
            stream.send([commands])
        return {node: stream.receive_replies(num_replies) for node, stream in streams.items()}

    def ask(
        self,
        block_hashes: Sequence[bytes],
        command_of: Callable[[int], bytes],
        num_digits: int,
        trailer: bytes = b"",
        num_trailing: int = 0,
    ) -> tuple[list[bytes], dict[Node, list[Reply | RespError]]]:
        """What command_of(position) says about each block, which is num_digits replies of a digit each; then what the servers
        that were asked say to the num_trailing commands of `trailer`.

        A block that is being moved to another server has the digits of one that is not there.
        """
        groups = [(node, self._stream(node, 0), positions) for node, positions in self._split(block_hashes).items()]
        for _node, stream, positions in groups:
            stream.send([b"".join(map(command_of, positions)) + trailer])
        answers = [b""] * len(block_hashes)
        replies: dict[Node, list[Reply | RespError]] = {}
        for node, stream, positions in groups:
            digits = stream.receive_digits(num_digits * len(positions))
            for index, position in enumerate(positions):
                answers[position] = digits[index * num_digits : (index + 1) * num_digits]
            replies[node] = stream.receive_replies(num_trailing)
        return answers, replies

    def _split(self, block_hashes: Sequence[bytes]) -> Mapping[Node, Sequence[int]]:
        """Positions by server."""
        nodes = self._server.nodes
        if len(nodes) == 1:
            return {nodes[0]: range(len(block_hashes))}
        positions_by_node: dict[Node, list[int]] = {}
        for position, block_hash in enumerate(block_hashes):
            positions_by_node.setdefault(self._server.node_of(block_hash), []).append(position)
        return positions_by_node

    # -- blocks --------------------------------------------------------------------------------------------------------
    def begin_blocks(self) -> int:
        """Nothing is under way: begin with the first connections. How many blocks should be under way."""
        self._num_taken_by_node.clear()
        return len(self._server.nodes) * self._max_per_node * self._num_pipelined

    def next_for(self, block_hash: bytes) -> RespStream:
        """The connection over which a block shall move: num_pipelined on the same, then the next ones, and around."""
        node = self._server.node_of(block_hash)
        num_taken = self._num_taken_by_node.get(node, 0)
        self._num_taken_by_node[node] = num_taken + 1
        return self._stream(node, num_taken // self._num_pipelined % self._max_per_node)

    def _stream(self, node: Node, index: int) -> RespStream:
        streams = self._streams_by_node.setdefault(node, [])
        while len(streams) <= index:
            streams.append(self._server.open_stream(node))
        return streams[index]
