"""One simulated run: cluster shape, workload and faults from a seed; safety checked all along, progress demanded at the end."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from core.config import EngineOptions, RouterOptions
from core.sampling_params import SamplingParams
from router.metrics import RouterMetrics
from router.request_flow import Deliver, Fail, RequestSpec
from router.router_core import RouterCore
from tests.simulation.sim_node import MAX_MODEL_LEN, SimNode
from tests.simulation.sim_store import SimStore
from tests.simulation.world import Link, World
from tests.support.fake_runner import oracle_tokens

TICK_S = 0.05
PING_DELAYS_S = (0.0, 0.05, 0.2)
FAULTS_END_S = 20.0
DRAIN_S = 100.0
# Not among them: deadline. Whatever happened, 40 seconds without faults are enough.
ALLOWED_FAILURES = ("no_decode_node", "max_attempts", "node_down", "node_error", "node_abort")

_shared_metrics = RouterMetrics("simulated")  # building one costs more than a whole run, and no check reads it


@dataclass
class SimRequest:
    """A client's request, what it has received so far, and how it ended."""

    spec: RequestSpec
    expected: list[int]
    arrival_s: float
    is_cancelled: bool = False
    received: list[int] = field(default_factory=list)
    end: Deliver | Fail | None = None
    longest_wait_s: float = 0.0
    last_news_s: float = 0.0


@dataclass(frozen=True)
class Report:
    """What a run measured."""

    seed: int
    num_requests: int
    num_right: int
    num_failed: int
    num_cancelled: int
    num_events: int
    num_steps: int
    num_kills: int
    virtual_s: float
    longest_wait_s: float
    external_hit_tokens: int
    preemptions: int


class SimCluster:
    """Everything of one run. `num_requests` and `has_faults` can be lowered to shrink a failing seed."""

    def __init__(
        self, seed: int, *, max_requests: int = 1000, max_faults: int = 1000, has_faults: bool = True, is_traced: bool = False
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
        )
        self.num_blocks = rng.choice((4, 5, 6, 16)) * MAX_MODEL_LEN // 4 // self.block_size
        self.store = SimStore(capacity_blocks=rng.choice((20, 200, 5000)), max_delay_s=rng.choice((0.0005, 0.02, 0.3)))
        self.router_options = RouterOptions(
            request_timeout_s=60.0,
            prefill_timeout_s=rng.choice((0.5, 5.0)),
            node_wait_s=5.0,
            heartbeat_timeout_s=2.0,
            max_attempts=rng.choice((3, 6)),
            policy=rng.choice(("least_loaded", "round_robin")),
        )
        self._links: dict[bytes, Link] = {}
        self.router = RouterCore(self.router_options, world, self._send, _shared_metrics, "sim")
        self.requests: list[SimRequest] = []
        self.num_kills = 0
        self.broken_promises: list[str] = []
        self.num_disturbances = 0  # faults so far: any of them may have made a request start over
        self._max_requests, self._max_faults, self._num_faults = max_requests, max_faults, 0
        self.nodes: dict[str, SimNode] = {}
        for role, count in (("prefill", rng.randrange(0, 3)), ("decode", rng.randrange(1, 4))):
            for index in range(count):
                self._start_node(f"{role}-{index}", role)
        self._tick()
        self._plan_workload()
        if has_faults:
            self._plan_faults()

    # -- run -----------------------------------------------------------------------------------------------------------
    def run(self) -> Report:
        """Run it to the end; any broken promise is an AssertionError that names the seed."""
        logging.disable(logging.CRITICAL)
        try:
            self.world.run_until(FAULTS_END_S)
            self._heal()
            self.world.run_until(FAULTS_END_S + DRAIN_S)
            self._check_drained()
        except AssertionError as error:
            raise AssertionError(f"seed {self.seed}: {error}") from error
        finally:
            logging.disable(logging.NOTSET)
        stats = [node.core.engine.stats for node in self.nodes.values()]
        right = [request for request in self.requests if isinstance(request.end, Deliver)]
        return Report(
            seed=self.seed,
            num_requests=len(self.requests),
            num_right=len(right),
            num_failed=sum(isinstance(request.end, Fail) for request in self.requests),
            num_cancelled=sum(request.is_cancelled for request in self.requests),
            num_events=self.world.num_events,
            num_steps=sum(node.num_steps for node in self.nodes.values()),
            num_kills=self.num_kills,
            virtual_s=self.world.now_s(),
            longest_wait_s=max((request.longest_wait_s for request in right), default=0.0),
            external_hit_tokens=sum(stat.external_hit_tokens for stat in stats),
            preemptions=sum(stat.num_preemptions for stat in stats),
        )

    def _check_drained(self) -> None:
        assert not self.broken_promises, "; ".join(self.broken_promises)
        assert self.router.num_in_flight == 0, f"{self.router.num_in_flight} requests never ended"
        for request in self.requests:
            name = request.spec.request_id
            if request.is_cancelled:
                continue
            assert request.end is not None, f"{name} was never answered"
            if isinstance(request.end, Fail):
                assert request.end.kind in ALLOWED_FAILURES, f"{name} failed with {request.end.kind}: {request.end.message}"
            else:
                assert request.received == request.expected, f"{name} got {request.received}, right is {request.expected}"
        for node in self.nodes.values():
            audit = node.core.engine.audit()
            assert not audit.problems and not any(audit.counts.values()), f"{node.name} still holds {audit}"
        for state in self.router.registry.nodes.values():
            assert not state.in_flight, f"the router counts {state.in_flight} against {state.node_id}"

    # -- network -------------------------------------------------------------------------------------------------------
    def _connect(self, node: SimNode, to_node: object, on_node_end_closed: object) -> Link:
        identity = f"{node.name}:{node.generation:x}".encode()

        def receive(frame: bytes) -> None:
            self.router.receive(identity, frame)

        def closed() -> None:
            if self._links.get(identity) is link:
                del self._links[identity]
            for delay_s in PING_DELAYS_S:
                self.world.after(delay_s, self.router.ping_all)

        link = Link(self.world, identity, receive, to_node, closed, on_node_end_closed)  # type: ignore[arg-type]
        self._links[identity] = link
        return link

    def _send(self, identity: bytes, frame: bytes) -> bool:
        link = self._links.get(identity)
        if link is None or link.is_known_closed_to_router:
            return False
        link.send("to_node", frame)
        return True

    def _tick(self) -> None:
        self.router.on_time()
        self.world.after(TICK_S, self._tick)

    # -- workload ------------------------------------------------------------------------------------------------------
    def _plan_workload(self) -> None:
        rng = self.world.rng
        prefixes = [[rng.randrange(1, 1000) for _ in range(rng.randrange(4, 25))] for _ in range(3)]
        arrivals_end_s = rng.choice((0.5, 3.0, 0.9 * FAULTS_END_S))  # all at once, or spread
        for index in range(min(self._max_requests, rng.randrange(4, 24))):
            prompt = (rng.choice(prefixes) if rng.random() < 0.6 else []) + [
                rng.randrange(1, 1000) for _ in range(rng.randrange(1, 20))
            ]
            max_tokens = rng.randrange(1, min(rng.choice((8, 60)), MAX_MODEL_LEN - len(prompt)))
            spec = RequestSpec(
                request_id=f"r{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=1),
                priority=rng.randrange(3),
                cache_salt=rng.choice(("", "", "salt")),
            )
            arrival_s = rng.random() * arrivals_end_s
            request = SimRequest(spec, oracle_tokens(prompt, max_tokens), arrival_s)
            self.requests.append(request)
            self.world.after(arrival_s, lambda request=request: self._submit(request))  # type: ignore[misc]
            if rng.random() < 0.1:
                self.world.after(arrival_s + rng.random(), lambda request=request: self._cancel(request))  # type: ignore[misc]

    def _submit(self, request: SimRequest) -> None:
        request.last_news_s = self.world.now_s()
        self.world.log(f"{request.spec.request_id} arrives: {len(request.spec.prompt_token_ids)} tokens")
        self.router.submit(request.spec, lambda news: self._check_news(request, news))

    def _cancel(self, request: SimRequest) -> None:
        if request.end is None:
            request.is_cancelled = True
            self.router.cancel(request.spec.request_id, "abort")

    def _check_news(self, request: SimRequest, news: Deliver | Fail) -> None:
        """The router would turn a broken promise into an error for the client; it is kept for us."""
        try:
            self._receive(request, news)
        except AssertionError as error:
            self.broken_promises.append(str(error))

    def _receive(self, request: SimRequest, news: Deliver | Fail) -> None:
        name = request.spec.request_id
        assert request.end is None, f"{name} got news after its end"
        assert not request.is_cancelled, f"{name} got news after it was cancelled"
        now_s = self.world.now_s()
        request.longest_wait_s = max(request.longest_wait_s, now_s - request.last_news_s)
        request.last_news_s = now_s
        if isinstance(news, Fail):
            request.end = news
            self.world.log(f"{name} fails: {news.message}")
            return
        assert news.first_index == len(request.received), f"{name}: token {news.first_index} after {len(request.received)}"
        request.received += news.token_ids
        right = request.expected[: len(request.received)]
        assert request.received == right, f"{name} got wrong tokens: {request.received}, right is {right}"
        assert news.num_cached_tokens <= self._max_cached_tokens(request), f"{name} hit {news.num_cached_tokens} foreign tokens"
        if news.finish_reason:
            request.end = news
            self.world.log(f"{name} ends: {news.finish_reason}")

    def _max_cached_tokens(self, request: SimRequest) -> int:
        """The most that an honest prefix cache can have: what others with the same salt share with it."""
        known = request.spec.prompt_token_ids + request.expected
        most = 0
        for other in self.requests:
            if other.spec.cache_salt == request.spec.cache_salt and other.arrival_s <= self.world.now_s():
                theirs = other.spec.prompt_token_ids + other.expected
                if other is request:  # its own blocks, saved by an attempt that was lost
                    most = max(most, len(theirs) if self.num_disturbances else 0)
                else:
                    pairs = zip(known, theirs, strict=False)
                    most = max(most, next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(theirs))))
        return most

    # -- faults --------------------------------------------------------------------------------------------------------
    def _start_node(self, name: str, role: str) -> None:
        old = self.nodes.get(name)
        if old is not None and old.is_alive:
            return
        self.nodes[name] = SimNode(self.world, name, role, self.options, self.num_blocks, self.store, self._connect)
        self.world.log(f"{name} starts")

    def _plan_faults(self) -> None:
        rng = self.world.rng
        for _ in range(rng.randrange(0, 12)):
            fault = rng.choice(
                (self._kill, self._kill, self._stop, self._break, self._stall, self._damage_store, self._upset_store)
            )
            self.world.after(rng.random() * FAULTS_END_S, lambda fault=fault: self._inject(fault))  # type: ignore[misc]

    def _inject(self, fault: object) -> None:
        self._num_faults += 1
        if self._num_faults <= self._max_faults:
            self.num_disturbances += 1
            fault()  # type: ignore[operator]

    def _any_node(self) -> SimNode:
        return self.world.rng.choice(list(self.nodes.values()))

    def _kill(self) -> None:
        node = self._any_node()
        if node.is_alive:
            self.num_kills += 1
            node.kill()
            role = node.core.identity.role
            self.world.after(self.world.rng.choice((0.2, 1.0, 8.0)), lambda: self._start_node(node.name, role))

    def _stop(self) -> None:
        self._any_node().stop_for(self.world.rng.choice((0.3, 1.5, 4.0)))

    def _break(self) -> None:
        self._any_node().break_connection()

    def _stall(self) -> None:
        link = self._any_node().link
        if link is not None:
            link.stall(self.world.rng.choice((0.3, 1.5, 4.0)))

    def _damage_store(self) -> None:
        for block_hash in self.world.rng.sample(list(self.store.blocks), len(self.store.blocks) // 3):
            payload, checksum = self.store.blocks[block_hash]
            if self.world.rng.random() < 0.5:
                self.store.blocks[block_hash] = (bytes([payload[0] ^ 1]) + payload[1:], checksum)
            else:
                del self.store.blocks[block_hash]

    def _upset_store(self) -> None:
        rng, store = self.world.rng, self.store
        mood = rng.choice(("failing", "hanging", "slow"))
        self.world.log(f"the store is {mood}")
        store.is_failing, store.is_hanging = mood == "failing", mood == "hanging"
        store.max_delay_s = 0.5 if mood == "slow" else store.max_delay_s
        self.world.after(rng.choice((0.5, 3.0)), self._calm_store)

    def _calm_store(self) -> None:
        self.store.is_failing = self.store.is_hanging = False
        self.store.max_delay_s = 0.005

    def _heal(self) -> None:
        """The faults stop: everybody is started again, nothing is slow any more."""
        self._calm_store()
        for name, node in list(self.nodes.items()):
            self._start_node(name, node.core.identity.role)
        self.world.log("the faults stop")
