"""A Redis Cluster: several primaries, each with a part of the 16,384 slots into which keys fall by their hash.

A block's keys have its hash as their hash tag, so that they lie in one slot. Which server has a slot is asked when the link
connects, and again when a server says that a slot has moved; until then its blocks are misses. A slot that is on its way
(ASK, TRYAGAIN) is a miss until it has arrived. All primaries must be reachable: of a prefix cut by holes little could be used.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from connectors.redis.resp_stream import RespError
from connectors.redis.server import Credentials, Node, RedisClient, RedisServer, parse_addresses, read_slots, slot_of
from core.addresses import host_of
from core.errors import ConfigError, ConnectorError

CLUSTER_FIELD = "connector.options.cluster_nodes"


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Which primary has each slot."""

    node_by_slot: tuple[Node, ...]
    nodes: tuple[Node, ...]

    @classmethod
    def of(cls, reply: Any, asked_host: str) -> SlotMap:
        """From the reply of CLUSTER SLOTS by a server at asked_host. Raises ConnectorError where slots have no server."""
        primaries = read_slots(reply, asked_host)
        found = tuple(node for node in primaries if node is not None)
        if len(found) < len(primaries):
            raise ConnectorError(f"{len(primaries) - len(found)} slots of the cluster have no server")
        return cls(found, tuple(dict.fromkeys(found)))

    def node_of(self, block_hash: bytes) -> Node:
        """The primary that has a block's keys."""
        return self.node_by_slot[slot_of(block_hash)]


class RedisCluster(RedisServer):
    """All primaries of a cluster. Any thread; locate() is the link's."""

    def __init__(
        self, url: str, credentials: Credentials, connect_timeout_s: float, op_timeout_s: float, addresses: Sequence[str]
    ) -> None:
        """addresses: HOST:PORT of some of its servers; scheme, user and query arguments are the URL's. Raises ConfigError."""
        super().__init__(url, credentials, connect_timeout_s, op_timeout_s)
        if "path" in self._settings or self._settings.get("db"):
            raise ConfigError(CLUSTER_FIELD, ",".join(addresses), "none, with a unix:// URL or a database other than 0")
        self._settings = {name: value for name, value in self._settings.items() if name not in ("host", "port", "db")}
        self._seeds = parse_addresses(CLUSTER_FIELD, addresses)
        self._on_redirect = self._note_redirect
        self._map_mutex = threading.Lock()  # of the three below
        self._map: SlotMap | None = None
        self._informant: Node | None = None  # asked first: the one that a redirection named, or that answered last
        self._has_moved = False

    @property
    def is_cluster(self) -> bool:
        return True

    @property
    def address(self) -> str:
        return f"cluster of {self._seeds[0][0]}:{self._seeds[0][1]}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._known_map.nodes

    def node_of(self, block_hash: bytes) -> Node:
        return self._known_map.node_of(block_hash)

    @property
    def has_moved(self) -> bool:
        return self._has_moved

    def locate(self) -> None:
        """Ask servers one after the other, until one knows where all slots are and that they are served."""
        with self._map_mutex:
            known = () if self._map is None else self._map.nodes
            candidates = (*([] if self._informant is None else [self._informant]), *known, *self._seeds)
            self._has_moved = False  # what is said from now on is news
        complaint = ""
        for node in dict.fromkeys(candidates):
            try:
                found = self._ask_map(node)
            except ConnectorError as error:
                complaint = str(error)
                continue
            with self._map_mutex:
                self._map, self._informant = found, node
            return
        raise ConnectorError(f"no server of the {self.address} can be used: {complaint}")

    def _ask_map(self, node: Node) -> SlotMap:
        state, reply = self._ask_once(self._place_of(node), (("CLUSTER", "INFO"), ("CLUSTER", "SLOTS")))
        if b"cluster_state:ok" not in state:
            raise ConnectorError(f"the cluster is down, says {node[0]}:{node[1]}")
        return SlotMap.of(reply, node[0])

    def _note_redirect(self, refusal: RespError) -> None:
        if refusal.word != "MOVED":  # on its way: the map is still right
            return
        target = str(refusal).rpartition(" ")[2]  # it knows best
        host, port = host_of(target), target.rpartition(":")[2]
        with self._map_mutex:
            self._has_moved = True
            if host and port.isdecimal():
                self._informant = (host, int(port))

    def open_client(self) -> RedisClient:
        return self._open_cluster_client(self._seeds)

    @property
    def _known_map(self) -> SlotMap:
        found = self._map
        if found is None:
            raise ConnectorError(f"it is not known yet which server of the {self.address} has what")
        return found

    def _place_of(self, node: Node) -> dict[str, Any]:
        return {"host": node[0], "port": node[1]}
