"""A node's process in the simulation: production NodeCore and EngineCore, the fake model, a simulated link and connector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from core.config import EngineOptions
from core.engine import EngineCore
from core.kv.pool_memory import KVPoolMemory
from core.node_core import NodeCore, NodeIdentity, model_info
from core.node_session import NodeSession
from core.step import StepPlan, StepResult
from core.wire import messages
from tests.simulation.sim_store import SimConnector, SimStore
from tests.simulation.world import Link, World
from tests.support.fake_runner import FakeRunner, fake_layout, fake_model

MAX_MODEL_LEN = 96
HEARTBEAT_INTERVAL_S = 0.5
RECONNECT_S = 0.05
REGISTER_RETRY_S = 1.0
LINGER_S = 0.2  # as the real socket: what was sent before the end still leaves

# (node, to the node, its end is closed) -> a connection, or None while the router does not listen
Connect = Callable[["SimNode", Callable[[bytes], None], Callable[[], None]], Link | None]


class ProcessCrashError(BaseException):
    """Stands for a segmentation fault: no handler of the engine may catch it."""


@dataclass(frozen=True)
class Poison:
    """A prompt, and what follows it: no other request is this one, whatever prefix they share."""

    num_prompt_tokens: int
    token_ids: tuple[int, ...]

    def is_in(self, token_ids: Sequence[int]) -> bool:
        """Whether these are the known tokens of that request."""
        return len(token_ids) >= self.num_prompt_tokens and tuple(token_ids) == self.token_ids[: len(token_ids)]


class SimRunner(FakeRunner):
    """The fake model, with prompts that it does not survive."""

    def __init__(self, pool: KVPoolMemory, options: EngineOptions, poison: Collection[Poison]) -> None:
        super().__init__(pool)
        self._options = options
        self._poison = poison

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute the plan, or die. No plan may exceed what the engine was allowed."""
        assert plan.num_total_tokens <= self._options.max_num_batched_tokens, f"{plan.num_total_tokens} tokens in a step"
        assert len(plan.num_scheduled_tokens) <= self._options.max_num_seqs, f"{len(plan.num_scheduled_tokens)} requests"
        for new in plan.new_requests:
            if any(poison.is_in(new.token_ids) for poison in self._poison):
                raise ProcessCrashError
        result = super().execute(plan)
        assert self.most_adapters <= self._options.max_loras, f"{self.most_adapters} adapters in a step"
        assert len(self.adapters.here) <= self._options.max_cpu_loras, f"{len(self.adapters.here)} adapters in memory"
        return result


class SimNode:
    """One process, from start to kill. A new start is a new object with a new generation."""

    def __init__(
        self,
        world: World,
        name: str,
        role: str,
        options: EngineOptions,
        num_blocks: int,
        store: SimStore,
        poison: Collection[Poison],
        connect: Connect,
        on_end: Callable[[SimNode], None],
    ) -> None:
        """poison: prompts whose computation kills the process. on_end: the process is gone, by itself or by force."""
        self.world = world
        self.generation = world.rng.getrandbits(60)
        self.name = name
        self.is_alive = True
        self.num_steps = 0
        self.num_poisonings = 0
        self._dispatches: set[str] = set()
        self._on_end = on_end
        self.connector = SimConnector(world, store, name)
        self._connect_to_router = connect
        self._link: Link | None = None
        self._is_step_scheduled = False
        self._stalled_until_s = 0.0
        self._inbox: list[messages.RouterMessage] = []
        pool = KVPoolMemory(fake_layout(options.block_size), num_blocks)
        self.connector.register_kv_cache(pool)
        self.runner = SimRunner(pool, options, poison)
        self._model = fake_model(options.block_size, MAX_MODEL_LEN)
        engine = EngineCore(options, self._model, num_blocks, self.runner, self.connector, world, adapters=self.runner.adapters)
        self.core = NodeCore(NodeIdentity(name, role, self.generation), engine)
        registration = messages.Register(
            node_id=name,
            role=role,
            generation=self.generation,
            model=model_info("fake", self._model),
            max_num_seqs=options.max_num_seqs,
            num_blocks=num_blocks,
            connector="simulated",
            kv_address=self.connector.kv_address,
        )
        self._session = NodeSession(registration)
        self._connect()
        self._beat()

    # -- faults --------------------------------------------------------------------------------------------------------
    def kill(self) -> None:
        """kill -9: the kernel closes the connection, everything else simply stops."""
        self.world.log(f"{self.name} is killed")
        self._end()

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP and, later, SIGCONT: the connection stays open."""
        self._stalled_until_s = self.world.now_s() + seconds
        self.world.log(f"{self.name} is stopped for {seconds:.2f} s")

    def break_connection(self) -> None:
        """The network resets the connection; both processes live."""
        if self._link is not None:
            self._link.close()
            self.world.log(f"{self.name} loses its connection")

    @property
    def link(self) -> Link | None:
        """The present connection."""
        return self._link

    def _end(self) -> None:
        self.is_alive = False
        self.connector.die()
        if self._link is not None:
            self._link.close()
        self._on_end(self)

    # -- the process ---------------------------------------------------------------------------------------------------
    def _later(self, delay_s: float, event: Callable[[], None]) -> None:
        """Run an event if the process still lives then, and not before it is continued."""

        def run() -> None:
            if not self.is_alive:
                return
            if self.world.now_s() < self._stalled_until_s:
                self.world.after(self._stalled_until_s - self.world.now_s(), run)
            else:
                event()

        self.world.after(delay_s, run)

    def _connect(self) -> None:
        link = self._link = self._connect_to_router(self, self._receive, self._connection_closed)
        if link is None:
            self._later(RECONNECT_S, self._connect)
        else:
            self._register(link)

    def _connection_closed(self) -> None:
        def notice() -> None:
            self._command(self._session.start_over())
            self._later(RECONNECT_S, self._connect)

        self._later(0.0, notice)

    def _register(self, link: Link) -> None:
        if self._session.is_registered or link is not self._link or not link.is_open:
            return
        link.send("to_router", self._session.register())
        self._later(REGISTER_RETRY_S, lambda: self._register(link))

    def _beat(self) -> None:
        self._send(self.core.heartbeat())
        self._later(HEARTBEAT_INTERVAL_S, self._beat)

    def _send(self, message: messages.NodeMessage) -> None:
        if self._link is not None and (frame := self._session.pack(message)) is not None:
            self._link.send("to_router", frame)

    def _receive(self, frame: bytes) -> None:
        self._later(0.0, lambda: self._handle(frame))

    def _handle(self, frame: bytes) -> None:
        was_registered = self._session.is_registered
        self._command(self._session.receive(frame))
        assert not self._session.refusal, self._session.refusal
        if was_registered and not self._session.is_registered and self._link is not None:
            self._register(self._link)

    def _command(self, commands: list[messages.RouterMessage]) -> None:
        self._inbox += commands
        if commands:
            self._schedule_step(0.0)

    def _schedule_step(self, delay_s: float) -> None:
        if not self._is_step_scheduled:
            self._is_step_scheduled = True
            self._later(delay_s, self._step)

    def _step(self) -> None:
        """Commands, then one engine step; its news leave when its time is over."""
        self._is_step_scheduled = False
        news: list[messages.NodeMessage] = []
        inbox, self._inbox = self._inbox, []
        for command in inbox:
            if isinstance(command, messages.Generate):
                assert command.request_id not in self._dispatches, f"{self.name} is given {command.request_id} twice"
                self._dispatches.add(command.request_id)
            news += self.core.handle(command)
            if isinstance(command, messages.RegisterAgain):
                num_held = self.core.engine.audit().counts["requests"]
                assert num_held == 0, f"{self.name} registers anew and keeps {num_held} requests that nobody waits for"
        duration_s = 0.001
        if self.core.engine.has_work():
            try:
                step_news, num_tokens = self.core.step()
            except ProcessCrashError:
                self.num_poisonings += 1
                self.world.log(f"{self.name} crashes")
                self._end()
                return
            self.num_steps += 1
            news += step_news
            duration_s = 0.002 + 0.0003 * num_tokens
            self._check_references()
        for message in news:
            self._later(duration_s, lambda message=message: self._send(message))  # type: ignore[misc]
        if self.core.engine.has_work() or self._inbox:
            self._schedule_step(duration_s)
        elif self.core.is_draining:
            self._is_step_scheduled = True  # nothing is done any more; what was said still leaves
            self._later(duration_s + LINGER_S, self._leave)

    def _leave(self) -> None:
        self.world.log(f"{self.name} leaves")
        self._end()

    def _check_references(self) -> None:
        counts = self.core.engine.audit().counts
        held = counts["request_references"] + counts["transfer_pins"] + counts["fenced_references"]
        assert counts["block_references"] == held, f"{self.name}: {counts}"
