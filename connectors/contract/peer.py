"""Another process that uses the same store: run as a program it obeys commands, JSON by line; Peer is the tests' end of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import sys
from collections.abc import Callable, Mapping
from typing import Any

from connectors.contract.commanded_process import CommandedProcess
from connectors.contract.node import NUM_POOL_BLOCKS, Node, SteppedClock, chain
from connectors.registry import create_connector


class Peer(CommandedProcess):
    """A process with one node. kill() is SIGKILL."""

    def __init__(self, connector_name: str, options: Mapping[str, Any], max_file_bytes: int = 0) -> None:
        super().__init__("connectors.contract.peer", connector_name, json.dumps(dict(options)), str(max_file_bytes))


def _save_for_ever(node: Node, first_seed: int) -> None:
    for seed in itertools.count(first_seed):
        node.results([node.start_save(chain(seed, NUM_POOL_BLOCKS // 2)), node.start_load(chain(seed - 1, 16), first_block=48)])
        print(json.dumps(seed), flush=True)


def _commands(node: Node) -> dict[str, Callable[..., Any]]:
    def saved(seed: int, num_blocks: int) -> Any:
        result = node.save(chain(seed, num_blocks))
        return [result.num_blocks_ok, result.outcome.value]

    def loaded(seed: int, num_blocks: int) -> Any:
        result = node.load(chain(seed, num_blocks))
        return [result.num_blocks_ok, result.outcome.value]

    return {
        "ready": lambda: True,
        "save": saved,
        "load": loaded,
        "lookup": lambda seed, num_blocks: node.lookup(chain(seed, num_blocks)),
        "save_for_ever": lambda first_seed: _save_for_ever(node, first_seed),
        "stats": lambda: dataclasses.asdict(node.stats()),
        "close": node.connector.close,
    }


def main() -> None:
    """Arguments: connector name, options as JSON, the largest file this process may write (0: no limit)."""
    connector_name, options, max_file_bytes = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3])
    if max_file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    clock = SteppedClock()
    commands = _commands(Node(create_connector(connector_name, options, clock), clock))
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command.pop("do")](**command)), flush=True)


if __name__ == "__main__":
    main()
