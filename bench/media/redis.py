"""The medium of the redis connector: redis-server, as redis-benchmark drives it."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.media.medium import BYTES_PER_ROUND, HOST, Medium
from connectors.redis.connector import RedisConnector
from connectors.stored_block import BLOCK_HEADER_BYTES
from core.kv.connector import KVConnector, TransferDirection
from deploy.topology import find_free_ports

_LIMIT_ROUNDS = 4  # a run of redis-benchmark that is too short measures its own start


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """A server of its own."""
    return RedisMedium(folder, block_bytes)


class RedisMedium(Medium):
    """A server of its own; its limit is what redis-benchmark reaches over four connections, with keys that exist."""

    # Until the server is full, as a store in use is: before, each save is into memory that the system has to clear first, while
    # redis-benchmark has its own from the second round on.
    num_warmup_rounds = 8

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._num_keys = BYTES_PER_ROUND // block_bytes  # as much memory as ours: the first touch of fresh memory is slow
        self._value_bytes = block_bytes + BLOCK_HEADER_BYTES
        (self._port,) = find_free_ports(HOST, 1)
        command = ["redis-server", "--port", str(self._port), "--bind", HOST, "--save", "", "--dir", str(folder)]
        # What is new takes the memory of what is oldest.
        command += ["--maxmemory", str(8 * BYTES_PER_ROUND), "--maxmemory-policy", "volatile-ttl"]
        command += ["--maxmemory-samples", "10"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while self._ask("ping") != b"PONG\n":
            time.sleep(0.05)

    def options(self) -> dict[str, Any]:
        return {"url": f"redis://{HOST}:{self._port}/0"}

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        num_requests = _LIMIT_ROUNDS * num_bytes // self._value_bytes
        if direction is TransferDirection.LOAD:
            self._benchmark("set", 8 * self._num_keys)  # so that hardly any key is missing
        return self._benchmark("get" if direction is TransferDirection.LOAD else "set", num_requests) * self._value_bytes / 1e9

    def _benchmark(self, command: str, num_requests: int) -> float:
        arguments = ["-t", command, "-c", "4", "-n", str(num_requests), "-d", str(self._value_bytes), "-r", str(self._num_keys)]
        ran = subprocess.run(
            ["redis-benchmark", "-p", str(self._port), *arguments, "--csv"], capture_output=True, text=True, check=True
        )
        return float(ran.stdout.splitlines()[-1].split(",")[1].strip('"'))

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        assert isinstance(connector, RedisConnector)
        connector._known.add(block_hashes, connector._known.epoch)

    def hang(self, connector: KVConnector) -> bool:
        self._process.send_signal(signal.SIGSTOP)
        return True

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Nothing is removed: flushed memory would go back to the system, and its first touch be all that is measured."""

    def _ask(self, *command: str) -> bytes:
        return subprocess.run(["redis-cli", "-p", str(self._port), *command], capture_output=True).stdout

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
