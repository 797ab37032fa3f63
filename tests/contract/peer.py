"""Another process that uses the same store: run as a program it obeys commands, JSON by line; Peer is the tests' end of it."""

from __future__ import annotations

import dataclasses
import itertools
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from connectors.registry import create_connector
from tests.contract.node import NUM_POOL_BLOCKS, Node, SteppedClock, chain


class Peer:
    """A process with one node. kill() is SIGKILL."""

    def __init__(self, connector_name: str, options: Mapping[str, Any], max_file_bytes: int = 0) -> None:
        command = [sys.executable, "-m", "tests.contract.peer", connector_name, json.dumps(dict(options)), str(max_file_bytes)]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    def send(self, do: str, **arguments: Any) -> None:
        """Give a command without waiting."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the peer died"
        return json.loads(line)

    def ask(self, do: str, **arguments: Any) -> Any:
        """A command and its answer."""
        self.send(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """End it without any chance to clean up. Safe to repeat."""
        self._process.kill()
        self._process.communicate()


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
