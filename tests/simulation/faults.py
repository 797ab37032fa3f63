"""What goes wrong in a simulated cluster: which faults, when and to whom, drawn from the run's seed."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from router.router_core import RouterCore
from tests.simulation.sim_node import SimNode
from tests.simulation.sim_store import SimStore
from tests.simulation.workload import Clients
from tests.simulation.world import Network, World

MAX_FAULTS = 12
PAUSES_S = (0.3, 1.5, 4.0)
STORE_MOODS = ("failing", "hanging", "slow", "full", "away", "restarted empty")


class Breakable(Protocol):
    """What can be broken: a SimCluster, as far as faults know it."""

    world: World
    network: Network
    store: SimStore
    clients: Clients
    nodes: dict[str, SimNode]
    router: RouterCore | None

    def start_router(self) -> None:
        """Unless one runs."""

    def kill_router(self) -> None:
        """If one runs."""


class Faults:
    """Draws up to a dozen faults over the run's first part; `only` keeps those of these numbers, to shrink a failing seed."""

    def __init__(self, cluster: Breakable, end_s: float, only: Collection[int] | None) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._rng = cluster.world.rng
        self.num_kills = 0
        kinds = (
            *(self._kill, self._kill, self._stop, self._break, self._stall, self._disturb_network, self._drain),
            *(self._damage_store, self._upset_store, self._upset_store, self._cut_off_from_store, self._kill_router),
        )
        for number in range(self._rng.randrange(0, MAX_FAULTS)):
            fault, at_s = self._rng.choice(kinds), self._rng.random() * end_s
            if only is None or number in only:
                self._world.after(at_s, lambda fault=fault: self._inject(fault))  # type: ignore[misc]

    def _inject(self, fault: Callable[[], None]) -> None:
        self._cluster.clients.num_disturbances += 1
        fault()

    def _any_node(self) -> SimNode:
        return self._rng.choice(list(self._cluster.nodes.values()))

    # -- processes -----------------------------------------------------------------------------------------------------
    def _kill(self) -> None:
        node = self._any_node()
        if node.is_alive:
            self.num_kills += 1
            node.kill()

    def _stop(self) -> None:
        self._any_node().stop_for(self._rng.choice(PAUSES_S))

    def _drain(self) -> None:
        if self._cluster.router is not None:
            name = self._any_node().name
            self._world.log(f"{name} is to drain")
            self._cluster.router.drain(name)

    def _kill_router(self) -> None:
        self.num_kills += self._cluster.router is not None
        self._cluster.kill_router()
        self._world.after(self._rng.choice((0.2, 1.0)), self._cluster.start_router)

    # -- network -------------------------------------------------------------------------------------------------------
    def _break(self) -> None:
        self._any_node().break_connection()

    def _stall(self) -> None:
        node, seconds = self._any_node(), self._rng.choice(PAUSES_S)
        if node.link is not None:
            self._world.log(f"the link of {node.name} holds everything back for {seconds} s")
            node.link.stall(seconds)

    def _disturb_network(self) -> None:
        network, share = self._cluster.network, self._rng.choice((0.01, 0.2))
        kind = self._rng.choice(("loss", "repetition", "reordering"))
        setattr(network, kind, share)
        self._world.log(f"the network: {kind} of {share:.0%}")
        self._world.after(self._rng.choice((0.5, 3.0)), network.heal)

    # -- store ---------------------------------------------------------------------------------------------------------
    def _damage_store(self) -> None:
        blocks = self._cluster.store.blocks
        self._world.log(f"a third of the store's {len(blocks)} blocks is damaged or lost")
        for block_hash in self._rng.sample(list(blocks), len(blocks) // 3):
            payload, checksum = blocks[block_hash]
            if self._rng.random() < 0.5:
                blocks[block_hash] = (bytes([payload[0] ^ 1]) + payload[1:], checksum)
            else:
                del blocks[block_hash]

    def _upset_store(self) -> None:
        store, mood = self._cluster.store, self._rng.choice(STORE_MOODS)
        self._world.log(f"the store is {mood}")
        if mood == "restarted empty":
            store.blocks.clear()
            return
        store.is_failing, store.is_hanging, store.is_full, store.is_away = (
            mood == name for name in ("failing", "hanging", "full", "away")
        )
        store.max_delay_s = 0.5 if mood == "slow" else store.max_delay_s
        self._world.after(self._rng.choice((0.5, 3.0)), store.calm)

    def _cut_off_from_store(self) -> None:
        node = self._any_node()
        node.connector.is_cut_off = True
        self._world.log(f"{node.name} does not reach the store")

        def reconnect() -> None:
            node.connector.is_cut_off = False

        self._world.after(self._rng.choice((0.5, 3.0)), reconnect)
