"""One simulated run: cluster shape, workload and faults from a seed; safety checked all along, progress demanded at the end."""

from __future__ import annotations

import logging
import random
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from core.adapter_files import Adapter
from core.clock import Clock
from core.config import EngineOptions, RouterOptions
from router.flow_actions import Deliver, Fail
from router.metrics import RouterMetrics
from router.registry import NodeRegistry
from router.router_core import RouterCore
from tests.simulation.faults import Faults
from tests.simulation.sim_node import MAX_MODEL_LEN, Poison, SimNode
from tests.simulation.sim_store import SimStore
from tests.simulation.workload import Clients, draw_requests
from tests.simulation.world import Link, Network, World

TICK_S = 0.05
PING_DELAYS_S = (0.0, 0.05, 0.2)
RESTART_DELAYS_S = (0.2, 1.0, 8.0)
FAULTS_END_S = 20.0
DRAIN_S = 100.0  # at most
SLICE_S = 3.0
MIN_QUIET_PREFILL_TIMEOUT_S = 0.2  # below, prefills are given up without any fault


class SimMetrics(RouterMetrics):
    """Counters that no check reads. They do not watch nodes: that would keep every run's cluster in memory."""

    def watch_nodes(self, nodes: NodeRegistry, clock: Clock) -> None:
        """Watch nothing."""


_shared_metrics = SimMetrics("simulated")  # building one costs more than a whole run


@dataclass(frozen=True)
class Report:
    """What a run measured. Hits and prompt tokens are of the nodes that live at the end, since their start."""

    seed: int
    num_requests: int
    num_right: int
    num_failed: int  # with an honest error, poison apart
    num_poison: int
    num_cancelled: int
    num_events: int
    num_messages: int
    num_steps: int
    num_kills: int
    num_preemptions: int
    num_prompt_tokens: int
    num_local_hit_tokens: int
    num_external_hit_tokens: int
    virtual_s: float
    longest_wait_s: float


class SimCluster:
    """Everything of one run. To shrink a failing seed, only some requests, some faults and max_nodes of a role take part."""

    def __init__(
        self,
        seed: int,
        *,
        only_requests: Collection[int] | None = None,
        only_faults: Collection[int] | None = None,
        max_nodes: int = 1000,
        has_faults: bool = True,
        is_traced: bool = False,
    ) -> None:
        self.seed = seed
        self.world = world = World(seed, is_traced=is_traced)
        rng = world.rng
        self.block_size = rng.choice((1, 2, 4, 8))
        self.options = EngineOptions(
            block_size=self.block_size,
            max_num_seqs=rng.choice((2, 4, 16)),
            max_num_batched_tokens=rng.choice((16, 32, 128)),
            enable_chunked_prefill=rng.random() < 0.9,
            policy=rng.choice(("fcfs", "priority")),
            kv_load_timeout_s=rng.choice((0.05, 2.0)),
            kv_save_timeout_s=rng.choice((0.05, 2.0)),
            lookup_timeout_s=0.1,
            save_decode_blocks=rng.random() < 0.8,
            kv_load_policy=rng.choice(("auto", "always")),
            overlap_steps="on" if seed % 2 else "off",
            max_loras=1 + seed % 2,
            max_cpu_loras=2,
        )
        self.num_blocks = rng.choice((4, 5, 6, 16)) * MAX_MODEL_LEN // 4 // self.block_size
        self.store = SimStore(capacity_blocks=rng.choice((20, 200, 5000)), max_delay_s=rng.choice((0.0005, 0.02, 0.3)))
        self.router_options = RouterOptions(
            request_timeout_s=60.0,
            prefill_timeout_s=rng.choice((0.05, 0.5, 5.0)),
            node_wait_s=5.0,
            heartbeat_timeout_s=2.0,
            max_attempts=rng.choice((3, 6)),
            drain_timeout_s=rng.choice((0.2, 3.0)),
            **_routing(seed, rng.choice(("least_loaded", "round_robin"))),
            kv_events="on" if seed // 2 % 2 else "off",  # beside the steps' overlap, which follows seed % 2
        )
        self.network = Network()
        self._links: dict[bytes, Link] = {}
        self.router: RouterCore | None = None
        self._num_routers = 0
        self._adapters = {name: Adapter(name, name.encode() * 16, f"/{name}") for name in ("x", "y", "z")}
        self.start_router()
        arrivals_end_s = rng.choice((0.5, 3.0, 0.9 * FAULTS_END_S))  # all at once, or spread
        drawn = enumerate(draw_requests(rng, arrivals_end_s))
        requests = [request for place, request in drawn if only_requests is None or place in only_requests]
        if seed % 3 == 2:
            chooser = random.Random(seed)  # of its own, so that other runs are what they were without adapters
            for request in requests:
                request.adapter_name = "" if request.is_poison else chooser.choice(("", *self._adapters))
            world.after(chooser.random() * FAULTS_END_S, lambda: self._load_adapter(Adapter("x", b"new content of x", "/x")))
        self._poison = [
            Poison(len(request.spec.prompt_token_ids), (*request.spec.prompt_token_ids, *request.expected))
            for request in requests
            if request.is_poison
        ]
        self.nodes: dict[str, SimNode] = {}
        self._num_poisonings = 0
        for role, count in (("prefill", rng.randrange(0, 3)), ("decode", rng.randrange(1, 4))):
            for index in range(min(count, max_nodes)):
                self._start_node(f"{role}-{index}", role)
        self._tick()
        self.clients = Clients(world, requests, lambda: self.router)
        if self.router_options.prefill_timeout_s < MIN_QUIET_PREFILL_TIMEOUT_S:
            self.clients.num_disturbances += 1
        self.faults = Faults(self, FAULTS_END_S, only_faults) if has_faults else None

    # -- run -----------------------------------------------------------------------------------------------------------
    def run(self) -> Report:
        """Run it to the end; any broken promise is an AssertionError that names the seed."""
        logging.disable(logging.CRITICAL)
        try:
            self.world.run_until(FAULTS_END_S)
            if not self.world.is_stopped:
                self._heal()
            while not self.world.is_stopped and not self._is_drained() and self.world.now_s() < FAULTS_END_S + DRAIN_S:
                self.world.run_until(self.world.now_s() + SLICE_S)
            self.world.run_until(self.world.now_s() + SLICE_S)
            self._check_drained()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
        stats = [node.core.engine.stats for node in self.nodes.values()]
        requests = self.clients.requests
        right = [request for request in requests if isinstance(request.end, Deliver)]
        return Report(
            seed=self.seed,
            num_requests=len(requests),
            num_right=len(right),
            num_failed=sum(isinstance(request.end, Fail) and not request.is_poison for request in requests),
            num_poison=sum(request.is_poison for request in requests),
            num_cancelled=sum(request.is_cancelled for request in requests),
            num_events=self.world.num_events,
            num_messages=self.network.num_messages,
            num_steps=sum(node.num_steps for node in self.nodes.values()),
            num_kills=self.faults.num_kills if self.faults else 0,
            num_preemptions=sum(stat.num_preemptions for stat in stats),
            num_prompt_tokens=sum(stat.prefix_cache_query_tokens for stat in stats),
            num_local_hit_tokens=sum(stat.prefix_cache_hit_tokens for stat in stats),
            num_external_hit_tokens=sum(stat.external_hit_tokens for stat in stats),
            virtual_s=self.world.now_s(),
            longest_wait_s=max((request.longest_wait_s for request in right), default=0.0),
        )

    def _is_drained(self) -> bool:
        """Whether it looks as if nothing more would happen."""
        audits = (node.core.engine.audit() for node in self.nodes.values())
        return self.clients.are_answered and not any(any(audit.counts.values()) for audit in audits)

    def _check_drained(self) -> None:
        self.clients.check_ends()
        assert self.router is not None
        assert self.router.num_in_flight == 0, f"{self.router.num_in_flight} requests never ended"
        for node in self.nodes.values():
            audit = node.core.engine.audit()
            assert not audit.problems and not any(audit.counts.values()), f"{node.name} still holds {audit}"
            gate = node.core.engine.adapters
            assert not gate.num_parked and not gate.has_news, f"{node.name} still waits for adapters"
        assert self.router.adapters.known() == list(self._adapters.values()), f"adapters: {self.router.adapters.known()}"
        self._check_index()
        for state in self.router.registry.nodes.values():
            assert not state.in_flight, f"the router counts {state.in_flight} against {state.node_id}"
        # A prefill that was given up for its slowness does not count when its node dies a moment later.
        num_uncounted = self.router_options.prefill_timeout_s < MIN_QUIET_PREFILL_TIMEOUT_S
        num_allowed = (self.router_options.max_node_deaths + num_uncounted) * len(self._poison) * self._num_routers
        assert self._num_poisonings <= num_allowed, f"{self._num_poisonings} nodes died of {len(self._poison)} requests"

    def _check_index(self) -> None:
        """The router believes of every connected node's cache exactly what is in it, and nothing of others: a living one may have
        been silent for too long, and have yet to register again."""
        assert self.router is not None
        index = self.router.index
        pools = {name: set(node.core.engine.cached_hashes()) for name, node in self.nodes.items() if node.is_alive}
        connected = {state.node_id for state in self.router.registry.connected()}
        wants_events = self.router_options.wants_kv_events
        pools = {name: hashes if wants_events and name in connected else set() for name, hashes in pools.items()}
        for name, hashes in pools.items():
            num_known = index.num_blocks(name)
            assert num_known == len(hashes), f"{name} holds {len(hashes)} blocks, and the router believes {num_known}"
        for block_hash in set().union(*pools.values()):
            holders = {name for name, hashes in pools.items() if block_hash in hashes}
            known = set(index.match([block_hash]))
            assert known == holders, f"block {block_hash.hex()} is at {holders}, and the router believes at {known}"

    # -- router --------------------------------------------------------------------------------------------------------
    def start_router(self) -> None:
        """A router's process begins to listen; at first, or after kill_router."""
        if self.router is None:
            self._num_routers += 1
            self.world.log("the router starts")
            self.router = RouterCore(self.router_options, self.world, self._send, _shared_metrics, f"sim{self._num_routers}")
            for adapter in self._adapters.values():
                self._load_adapter(adapter)

    def _load_adapter(self, adapter: Adapter) -> None:
        """As its configuration or an administrator would; a name that exists gets new content."""
        self._adapters = {name: kept for name, kept in self._adapters.items() if name != adapter.name} | {adapter.name: adapter}
        if self.router is not None:
            adapters = self.router.adapters
            adapters.end_load(adapters.start_load(adapter), is_accepted=True)

    def kill_router(self) -> None:
        """kill -9: its clients' and its nodes' connections break, and with them what was in flight."""
        if self.router is not None:
            self.world.log("the router is killed")
            self.router = None
            for link in list(self._links.values()):
                link.close()
            self._links.clear()
            self.clients.router_died()

    def _tick(self) -> None:
        if self.router is not None:
            self.router.on_time()
        self.world.after(TICK_S, self._tick)

    # -- network -------------------------------------------------------------------------------------------------------
    def _connect(self, node: SimNode, to_node: object, on_node_end_closed: object) -> Link | None:
        identity = f"{node.name}:{node.generation:x}".encode()
        if self.router is None:
            return None

        def receive(frame: bytes) -> None:
            if self.router is not None:
                self.router.receive(identity, frame)

        def ping_all() -> None:
            if self.router is not None:
                self.router.ping_all()

        def closed() -> None:
            if self._links.get(identity) is link:
                del self._links[identity]
            for delay_s in PING_DELAYS_S:
                self.world.after(delay_s, ping_all)

        link = Link(self.world, self.network, node.name, receive, to_node, closed, on_node_end_closed)  # type: ignore[arg-type]
        self._links[identity] = link
        return link

    def _send(self, identity: bytes, frame: bytes) -> bool:
        link = self._links.get(identity)
        if link is None or link.is_known_closed_to_router:
            return False
        link.send("to_node", frame)
        return True

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _start_node(self, name: str, role: str) -> None:
        old = self.nodes.get(name)
        if old is not None and old.is_alive:
            return
        self.nodes[name] = SimNode(
            self.world, name, role, self.options, self.num_blocks, self.store, self._poison, self._connect, self._node_ended
        )
        self.world.log(f"{name} starts")

    def _node_ended(self, node: SimNode) -> None:
        """Whoever supervises it starts it again, sooner or later."""
        self._num_poisonings += node.num_poisonings
        self.clients.num_disturbances += 1
        role = node.core.identity.role
        self.world.after(self.world.rng.choice(RESTART_DELAYS_S), lambda: self._start_node(node.name, role))

    def _heal(self) -> None:
        """The faults stop: everybody is started again, nothing is slow any more."""
        self.store.calm()
        self.network.heal()
        self.start_router()
        for name, node in list(self.nodes.items()):
            node.connector.is_cut_off = False
            self._start_node(name, node.core.identity.role)
        self.world.log("the faults stop")


def _routing(seed: int, policy: str) -> dict[str, Any]:
    """Options of routing: half of the runs have `policy`, the others any, by a chooser of its own so that all else stays."""
    chooser = random.Random(f"routing {seed}")
    if chooser.random() < 0.5:
        return {"policy": policy}
    return {
        "policy": chooser.choice(("kv_aware", "kv_aware", "power_of_two_choices", "session_sticky")),
        "policy_temperature": chooser.choice((0.0, 0.0, 0.5)),
        "itl_target_ms": chooser.choice((0.0, 5.0, 50.0)),
    }
