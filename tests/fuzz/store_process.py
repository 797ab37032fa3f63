"""A process that uses a store while its files are damaged: commands as JSON lines, one answer each.

A wrong byte, a result that never comes and an exception all end it with a traceback; so does a signal. The parent then fails.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from typing import Any

from connectors.contract.node import NUM_POOL_BLOCKS, Node, SteppedClock, chain
from connectors.registry import create_connector
from core.kv.connector import TransferOutcome

NUM_CHAINS = 8
CHAIN_BLOCKS = 12
MAX_ROUNDS = 12


class _User:
    """The child's end: one node at a time, whose pool holds a pattern wherever no transfer may write."""

    def __init__(self) -> None:
        self._node: Node | None = None

    @property
    def node(self) -> Node:
        assert self._node is not None
        return self._node

    def open(self, connector_name: str, options: dict[str, Any]) -> None:
        clock = SteppedClock()
        self._node = Node(create_connector(connector_name, options, clock), clock)

    def close(self) -> None:
        self.node.connector.close()
        assert self.node.stats().num_open_references == 0
        self._node = None

    def work(self, seed: int, num_operations: int) -> int:
        """Random use; how many blocks were loaded right."""
        rng = random.Random(seed)
        num_loaded = 0
        for _ in range(num_operations):
            hashes = chain(rng.randrange(NUM_CHAINS), rng.randrange(1, CHAIN_BLOCKS + 1))
            roll = rng.random()
            if roll < 0.4:
                self.node.save(hashes)
            elif roll < 0.9:
                num_loaded += self._load(hashes, rng.randrange(NUM_POOL_BLOCKS - CHAIN_BLOCKS))
            else:
                self.node.lookup(hashes)
        return num_loaded

    def heal(self, seed: int) -> int:
        """Rounds until a new chain can be saved and loaded; a lost store is opened again after a pause, which is skipped."""
        hashes = chain(1000 + seed, CHAIN_BLOCKS)
        for number in range(1, MAX_ROUNDS + 1):
            self.node.clock.offset_s += 5.0
            is_saved = self.node.save(hashes).outcome is TransferOutcome.OK
            if is_saved and self.node.lookup(hashes) == CHAIN_BLOCKS and self._load(hashes, 3) == CHAIN_BLOCKS:
                return number
        raise AssertionError(f"no block can be stored after {MAX_ROUNDS} rounds: {self.node.stats()}")

    def _load(self, hashes: list[bytes], first_block: int) -> int:
        """Load, compare what is called good, and see that nothing else in the pool has changed."""
        node = self.node
        pattern = bytes(range(1, 252))
        node.pool.buffer[:] = (pattern * (len(node.pool.buffer) // len(pattern) + 1))[: len(node.pool.buffer)]
        before = bytes(node.pool.buffer)
        (result,) = node.results([node.start_load(hashes, first_block=first_block)])
        after = bytes(node.pool.buffer)
        stride = node.layout.block_stride_bytes
        start, end = first_block * stride, (first_block + len(hashes)) * stride
        assert after[:start] == before[:start] and after[end:] == before[end:], "a load wrote outside its blocks"
        return result.num_blocks_ok


def main() -> None:
    """Serve commands until stdin ends."""
    user = _User()
    commands: dict[str, Callable[..., Any]] = {"open": user.open, "close": user.close, "work": user.work, "heal": user.heal}
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command.pop("do")](**command)), flush=True)


if __name__ == "__main__":
    main()
