"""Which nodes exist, what they serve and how loaded they are: plain state with methods that take the time as an argument.

No sockets and no clocks live here. RouterCore is the one writer; routing policies read snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter

from core.stats import EngineStats
from core.wire.messages import Heartbeat, ModelInfo, NodeCosts, NodeLoad, Register
from core.wire.numbering import PROTOCOL_VERSION, MessageNumbers

ROLES = ("prefill", "decode")
ROUTER_NAME = "router"  # what people call the router where they name a process: no node may have this name
FORGET_AFTER_S = 600.0  # a node that is down stays listed this long, so that an operator sees it; then memory is given back
MAX_NODES = 1024  # connected at a time: a flood of names is refused
MAX_NODES_DOWN = 256
MAX_SUPERSEDED = 1024  # old generations remembered, so that a process whose name was taken over does not take it back


class NodeStatus(Enum):
    """Where a node stands. Only UP nodes get new requests; DRAINING nodes finish what they have."""

    UP = "up"
    DRAINING = "draining"
    STALLED = "stalled"  # heartbeats arrive but the step thread does not move
    DOWN = "down"


@dataclass(slots=True)
class NodeState:
    """One node as the router sees it. in_flight: wire request id -> tokens dispatched with it. Times are Clock seconds."""

    node_id: str
    role: str
    identity: bytes
    generation: int
    model: ModelInfo
    max_num_seqs: int
    num_blocks: int
    connector: str
    metrics_address: str
    registered_s: float
    last_heartbeat_s: float
    status: NodeStatus = NodeStatus.UP
    down_reason: str = ""
    load: NodeLoad = field(default_factory=NodeLoad)
    stats: EngineStats = field(default_factory=EngineStats)
    costs: NodeCosts = field(default_factory=NodeCosts)
    in_flight: dict[str, int] = field(default_factory=dict)
    num_in_flight_tokens: int = 0
    numbers: MessageNumbers = field(default_factory=lambda: MessageNumbers(0))
    prefill_ms_by_wire_id: dict[str, float] = field(default_factory=dict)  # predicted, of prompts without a first token yet
    prefill_backlog_ms: float = 0.0  # their sum
    suspects: set[str] = field(default_factory=set)  # wire ids in flight of requests that nodes have died with
    kv_address: str = ""
    known_snapshot: NodeSnapshot | None = None  # None: something has changed
    drain_deadline_s: float | None = None  # set once it was told to drain: from then on its requests are handed over

    @property
    def is_connected(self) -> bool:
        """True unless the node is down: messages can be sent to it."""
        return self.status is not NodeStatus.DOWN

    def snapshot(self) -> NodeSnapshot:
        """What a routing policy may look at; the same object as long as nothing has changed."""
        if self.known_snapshot is None:
            self.known_snapshot = NodeSnapshot(
                node_id=self.node_id,
                role=self.role,
                max_num_seqs=self.max_num_seqs,
                num_in_flight=len(self.in_flight),
                num_in_flight_tokens=self.num_in_flight_tokens,
                num_prefilling=len(self.prefill_ms_by_wire_id),
                prefill_backlog_ms=self.prefill_backlog_ms,
                has_suspect=bool(self.suspects),
                load=self.load,
                costs=self.costs,
            )
        return self.known_snapshot

    def end_prefill(self, wire_id: str) -> None:
        """The dispatch's prompt is no longer ahead of others. Safe to repeat."""
        if wire_id in self.prefill_ms_by_wire_id:
            self.prefill_backlog_ms -= self.prefill_ms_by_wire_id.pop(wire_id)
            if not self.prefill_ms_by_wire_id:
                self.prefill_backlog_ms = 0.0  # rounding errors do not add up
            self.known_snapshot = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """A node that may get a request, as routing policies see it.

    num_in_flight and what follows are counted by the router and always current: num_prefilling have no token yet, and their
    prompts were predicted to take prefill_backlog_ms. load and costs are as old as the last
    heartbeat.
    """

    node_id: str
    role: str
    max_num_seqs: int
    num_in_flight: int = 0
    num_in_flight_tokens: int = 0
    num_prefilling: int = 0
    prefill_backlog_ms: float = 0.0
    has_suspect: bool = False
    load: NodeLoad = field(default_factory=NodeLoad)
    costs: NodeCosts = field(default_factory=NodeCosts)


@dataclass(frozen=True, slots=True)
class Registration:
    """Outcome of a Register. refusal is empty when accepted; lost_request_ids are dispatches that the node has dropped."""

    refusal: str = ""
    lost_request_ids: tuple[str, ...] = ()


class HeartbeatOutcome(Enum):
    """What a heartbeat or an update from an identity means."""

    KNOWN = "known"
    UNKNOWN = "unknown"  # never registered, or down: it must register again
    SUPERSEDED = "superseded"  # a newer process took over its node_id: it must end
    STALLED = "stalled"  # this heartbeat turned the node from working to stalled
    RECOVERED = "recovered"  # this heartbeat made the node eligible again


class NodeRegistry:
    """All nodes by node_id. Not thread-safe: used from the router's event loop alone."""

    def __init__(self, heartbeat_timeout_s: float, step_stall_timeout_s: float) -> None:
        self.nodes: dict[str, NodeState] = {}
        self.model: ModelInfo | None = None  # of the cluster; kept when the last node leaves, replaced by the next first one
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_stall_timeout_s = step_stall_timeout_s
        self._node_id_by_identity: dict[bytes, str] = {}
        self._superseded: dict[tuple[str, int], None] = {}

    # -- inputs --------------------------------------------------------------------------------------------------------
    def register(self, message: Register, identity: bytes, now_s: float) -> Registration:
        """Add or replace a node. A new registration has nothing in flight: whatever the node had is returned as lost."""
        old = self.nodes.get(message.node_id)
        if refusal := self._refusal(message, identity, old):
            return Registration(refusal=refusal)
        lost: tuple[str, ...] = ()
        drain_deadline_s = old.drain_deadline_s if old is not None and old.generation == message.generation else None
        is_repeated = (
            old is not None
            and old.is_connected
            and (old.generation, old.numbers.registration_index) == (message.generation, message.registration_index)
        )
        if is_repeated:  # our answer was slow: the node has not dropped anything since
            return Registration()
        if old is not None:
            lost = self.mark_down(old.node_id, "registered again")
            if old.generation != message.generation:
                self._superseded[message.node_id, old.generation] = None
                if len(self._superseded) > MAX_SUPERSEDED:
                    del self._superseded[next(iter(self._superseded))]
        self.model = message.model
        self._node_id_by_identity[identity] = message.node_id
        self.nodes[message.node_id] = NodeState(
            node_id=message.node_id,
            role=message.role,
            identity=identity,
            generation=message.generation,
            model=message.model,
            max_num_seqs=message.max_num_seqs,
            num_blocks=message.num_blocks,
            connector=message.connector,
            metrics_address=message.metrics_address,
            kv_address=message.kv_address,
            numbers=MessageNumbers(message.registration_index),
            registered_s=now_s,
            last_heartbeat_s=now_s,
            status=NodeStatus.UP if drain_deadline_s is None else NodeStatus.DRAINING,
            drain_deadline_s=drain_deadline_s,
        )
        return Registration(lost_request_ids=lost)

    def heartbeat(self, message: Heartbeat, identity: bytes, now_s: float) -> HeartbeatOutcome:
        """Take over load, stats and draining. STALLED and RECOVERED are reported once, at the change."""
        if (message.node_id, message.generation) in self._superseded:
            return HeartbeatOutcome.SUPERSEDED
        node = self.node_of(identity)
        if node is None or node.node_id != message.node_id or node.generation != message.generation:
            return HeartbeatOutcome.UNKNOWN
        node.last_heartbeat_s = now_s
        node.load = message.load
        node.stats = message.stats
        node.costs = message.costs
        node.known_snapshot = None
        before = node.status
        if message.load.step_age_s > self._step_stall_timeout_s:
            node.status = NodeStatus.STALLED
        elif message.is_draining or node.drain_deadline_s is not None:
            node.status = NodeStatus.DRAINING
        else:
            node.status = NodeStatus.UP
        if node.status is before:
            return HeartbeatOutcome.KNOWN
        if node.status is NodeStatus.STALLED:
            return HeartbeatOutcome.STALLED
        return HeartbeatOutcome.RECOVERED if node.status is NodeStatus.UP else HeartbeatOutcome.KNOWN

    def mark_down(self, node_id: str, reason: str) -> tuple[str, ...]:
        """Take a node out and return the wire ids of its dispatches. Safe to repeat."""
        node = self.nodes.get(node_id)
        if node is None or node.status is NodeStatus.DOWN:
            return ()
        node.status = NodeStatus.DOWN
        node.down_reason = reason
        if self._node_id_by_identity.get(node.identity) == node_id:
            del self._node_id_by_identity[node.identity]
        return tuple(node.in_flight)

    def start_drain(self, node_id: str, deadline_s: float) -> None:
        """From now on a connected node gets nothing new; after deadline_s what it still has may go elsewhere."""
        node = self.nodes[node_id]
        if node.drain_deadline_s is None:
            node.drain_deadline_s = deadline_s
        if node.status is NodeStatus.UP:
            node.status = NodeStatus.DRAINING

    def start_dispatch(
        self, node_id: str, wire_id: str, num_tokens: int, *, is_suspect: bool = False, prefill_ms: float = 0.0
    ) -> None:
        """Count a dispatch against the node's load. prefill_ms: predicted until its first token, without what is ahead of it."""
        node = self.nodes[node_id]
        assert wire_id not in node.in_flight, f"{wire_id} was dispatched twice to {node_id}"
        node.in_flight[wire_id] = num_tokens
        node.num_in_flight_tokens += num_tokens
        node.prefill_ms_by_wire_id[wire_id] = prefill_ms
        node.prefill_backlog_ms += prefill_ms
        node.known_snapshot = None
        if is_suspect:
            node.suspects.add(wire_id)

    def end_dispatch(self, node_id: str, wire_id: str) -> None:
        """The dispatch no longer counts. Safe to repeat, also after the node was replaced."""
        node = self.nodes.get(node_id)
        if node is not None:
            node.num_in_flight_tokens -= node.in_flight.pop(wire_id, 0)
            node.suspects.discard(wire_id)
            node.end_prefill(wire_id)
            node.known_snapshot = None

    def excuse_silence(self, now_s: float) -> None:
        """Start every connected node's heartbeat timeout anew."""
        for node in self.connected():
            node.last_heartbeat_s = now_s

    def forget_long_down(self, now_s: float) -> list[str]:
        """Drop nodes that have been down for long, oldest first when there are very many; the ids of those dropped."""
        forgotten = []
        down = [node for node in self.nodes.values() if not node.is_connected]
        down.sort(key=lambda node: node.last_heartbeat_s)
        num_too_many = max(0, len(down) - MAX_NODES_DOWN)
        for place, node in enumerate(down):
            if place < num_too_many or now_s - node.last_heartbeat_s > FORGET_AFTER_S:
                del self.nodes[node.node_id]
                forgotten.append(node.node_id)
        return forgotten

    # -- queries -------------------------------------------------------------------------------------------------------
    def node_of(self, identity: bytes) -> NodeState | None:
        """The connected node behind a socket identity."""
        node_id = self._node_id_by_identity.get(identity)
        return self.nodes[node_id] if node_id is not None else None

    def connected(self) -> list[NodeState]:
        """All nodes that are not down."""
        return [node for node in self.nodes.values() if node.is_connected]

    def kv_addresses(self, node_ids: Iterable[str]) -> tuple[str, ...]:
        """Where the KV that these nodes have saved can be had, of those that are connected and keep it themselves."""
        nodes = [self.nodes[node_id] for node_id in node_ids if node_id in self.nodes]
        return tuple(node.kv_address for node in nodes if node.is_connected and node.kv_address)

    def candidates(self, role: str) -> list[NodeSnapshot]:
        """Nodes of a role that may get new requests, in order of node_id."""
        up = [
            node.known_snapshot or node.snapshot()
            for node in self.nodes.values()
            if node.role == role and node.status is NodeStatus.UP
        ]
        return sorted(up, key=attrgetter("node_id"))

    def has_candidate(self, role: str) -> bool:
        """True when some node of the role may get new requests."""
        return any(node.role == role and node.status is NodeStatus.UP for node in self.nodes.values())

    def is_missing(self, role: str) -> bool:
        """True when some node of the role is known that should work and does not: it died or stalled, and may come back."""
        return any(
            node.role == role and node.status in (NodeStatus.DOWN, NodeStatus.STALLED) and node.drain_deadline_s is None
            for node in self.nodes.values()
        )

    def overdue_drains(self, now_s: float) -> list[NodeState]:
        """Draining nodes that still have requests although their time is over."""
        return [
            node
            for node in self.connected()
            if node.drain_deadline_s is not None and now_s >= node.drain_deadline_s and node.in_flight
        ]

    def expired_node_ids(self, now_s: float) -> list[str]:
        """Nodes whose last heartbeat is older than the timeout."""
        return [node.node_id for node in self.connected() if now_s - node.last_heartbeat_s > self._heartbeat_timeout_s]

    # -- inside --------------------------------------------------------------------------------------------------------
    def _refusal(self, message: Register, identity: bytes, old: NodeState | None) -> str:
        if message.protocol_version != PROTOCOL_VERSION:
            return f"protocol_version: got {message.protocol_version}; this router speaks {PROTOCOL_VERSION}"
        if message.role not in ROLES:
            return f"role: got {message.role!r}; allowed: {' or '.join(ROLES)}"
        if message.node_id in ("", ROUTER_NAME):
            return f"node_id: got {message.node_id!r}; allowed: a name, and another one than {ROUTER_NAME!r}"
        known = self.node_of(identity)
        if known is not None and known.node_id != message.node_id:
            return f"node_id: got {message.node_id}; this connection is {known.node_id} already"
        if (message.node_id, message.generation) in self._superseded:
            return f"node_id: {message.node_id} was taken over by a newer process"
        others = [node for node in self.connected() if node is not old]
        if len(others) >= MAX_NODES:
            return f"node_id: got one more; allowed: at most {MAX_NODES} nodes at a time"
        if others:
            return _model_difference(message.model, others[0].model)
        return ""


def _model_difference(got: ModelInfo, wanted: ModelInfo) -> str:
    for name in ModelInfo.__struct_fields__:
        ours, theirs = getattr(wanted, name), getattr(got, name)
        if ours != theirs:
            shown = [value.hex() if isinstance(value, bytes) else repr(value) for value in (theirs, ours)]
            return f"model.{name}: got {shown[0]}; the cluster's nodes have {shown[1]}"
    return ""
