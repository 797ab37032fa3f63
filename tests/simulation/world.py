"""Virtual time, the order of events, and a network that delays, loses, repeats, reorders and breaks. All from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.simulation.timeline import describe

Event = Callable[[], None]


class World:
    """Runs events in order of time; equal times in order of creation. core.clock.Clock is this object."""

    def __init__(self, seed: int, *, is_traced: bool = False) -> None:
        self.rng = random.Random(seed)
        self.trace: list[str] = []
        self.num_events = 0
        self.is_traced = is_traced
        self.is_stopped = False  # nothing happens any more: what broke is the last line of the timeline
        self._now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._order = itertools.count()

    def now_s(self) -> float:
        """Virtual seconds since the start."""
        return self._now_s

    def after(self, delay_s: float, event: Event) -> None:
        """Run an event later."""
        self.at(self._now_s + delay_s, event)

    def at(self, when_s: float, event: Event) -> None:
        """Run an event at a time; those of the same time come in the order in which they were asked for."""
        heapq.heappush(self._events, (when_s, next(self._order), event))

    def run_until(self, end_s: float) -> None:
        """Run everything that is due up to end_s."""
        while self._events and self._events[0][0] <= end_s and not self.is_stopped:
            self._now_s, _, event = heapq.heappop(self._events)
            self.num_events += 1
            event()
        self._now_s = max(self._now_s, end_s)

    def log(self, text: str) -> None:
        """A line of the timeline, kept only when traced."""
        if self.is_traced:
            self.trace.append(f"{self._now_s:9.4f}  {text}")


@dataclass
class Network:
    """How likely a message is lost, repeated or overtaken at present, on every link."""

    loss: float = 0.0
    repetition: float = 0.0
    reordering: float = 0.0
    num_messages: int = 0

    def heal(self) -> None:
        """From now on everything arrives once and in order."""
        self.loss = self.repetition = self.reordering = 0.0


@dataclass(eq=False)
class Link:
    """One connection between a node and the router, in both directions at once.

    In order and reliable while the network is well. Messages in flight are lost when it breaks, and each side learns of that on
    its own time.
    """

    world: World
    network: Network
    node_name: str
    to_router: Callable[[bytes], None]
    to_node: Callable[[bytes], None]
    on_router_end_closed: Event
    on_node_end_closed: Event
    is_open: bool = True
    is_known_closed_to_router: bool = False
    stalled_until_s: float = 0.0
    _last_arrival_s: dict[str, float] = field(default_factory=dict)

    def send(self, direction: str, frame: bytes) -> None:
        """Deliver after a delay, behind what was sent before; nothing when the connection breaks first."""
        rng, network = self.world.rng, self.network
        network.num_messages += 1
        delay_s = rng.choice((0.0001, 0.0005, 0.002, 0.02))
        if network.loss and rng.random() < network.loss:
            self._log("lost: ", direction, frame)
            return
        if network.repetition and rng.random() < network.repetition:
            self._deliver(direction, frame, self.world.now_s() + delay_s + rng.random() * 0.1)
        if network.reordering and rng.random() < network.reordering:
            self._deliver(direction, frame, self.world.now_s() + delay_s + rng.random() * 0.1)
            return
        earliest_s = max(self._last_arrival_s.get(direction, 0.0), self.stalled_until_s)
        arrival_s = max(self.world.now_s() + delay_s, earliest_s)
        self._last_arrival_s[direction] = arrival_s
        self._deliver(direction, frame, arrival_s)  # to the bit: a rounding would let one overtake the other

    def _deliver(self, direction: str, frame: bytes, arrival_s: float) -> None:
        deliver = self.to_router if direction == "to_router" else self.to_node

        def arrive() -> None:
            if self.is_open:
                self._log("", direction, frame)
                deliver(frame)

        self.world.at(arrival_s, arrive)

    def _log(self, prefix: str, direction: str, frame: bytes) -> None:
        if self.world.is_traced and (text := describe(self.node_name, direction, frame)):
            self.world.log(prefix + text)

    def stall(self, seconds: float) -> None:
        """A partition that heals: what is sent meanwhile arrives late."""
        self.stalled_until_s = max(self.stalled_until_s, self.world.now_s() + seconds)

    def close(self) -> None:
        """Break it. Safe to repeat."""
        if not self.is_open:
            return
        self.is_open = False

        def tell_router() -> None:
            self.is_known_closed_to_router = True
            self.on_router_end_closed()

        self.world.after(self.world.rng.choice((0.0, 0.001, 0.05)), tell_router)
        self.world.after(self.world.rng.choice((0.0, 0.001, 0.05)), self.on_node_end_closed)
