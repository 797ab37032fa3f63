"""The medium of the tcp connector: another process on this host that has the blocks, and a plain socket between the two.

Loads come from that process. Saves go into memory of this one, so their limit is a copy.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.media.medium import BYTES_PER_ROUND, HOST, Medium
from connectors.registry import create_connector
from connectors.stored_block import BLOCK_HEADER_BYTES
from connectors.tcp.block_memory import slot_bytes
from connectors.tcp.connector import TcpConnector
from core.clock import MonotonicClock
from core.kv.connector import KVConnector, Transfer, TransferDirection
from core.kv.layout import KVLayout
from core.kv.pool_memory import KVPoolMemory

_POOL_BYTES = 24 * 1024 * 1024


def create_medium(folder: Path, block_bytes: int) -> Medium:
    """A source process of its own."""
    return TcpMedium(block_bytes)


def _layout(block_bytes: int) -> KVLayout:
    return KVLayout(num_layers=block_bytes // 1024, block_size=16, num_kv_heads=1, head_dim=16, dtype="bfloat16")


def _options(layout: KVLayout) -> dict[str, Any]:
    return {"capacity_bytes": (BYTES_PER_ROUND // layout.block_bytes + 1) * slot_bytes(layout)}


class TcpMedium(Medium):
    """The limit of loads is one sendmsg and one recvmsg_into per block over one connection, from memory like the source's to a
    pool like the engine's."""

    def __init__(self, block_bytes: int) -> None:
        self._layout = _layout(block_bytes)
        command = [sys.executable, "-m", "bench.media.tcp", str(block_bytes)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._address = self._ask("address")
        self._pool = KVPoolMemory(self._layout, max(2, _POOL_BYTES // block_bytes))
        self._copies = KVPoolMemory(self._layout, BYTES_PER_ROUND // block_bytes)

    def options(self) -> dict[str, Any]:
        return {**_options(self._layout), "peers": [self._address]}

    def before_load(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        """The other process has the blocks, this one does not."""
        assert isinstance(connector, TcpConnector)
        self._ask("save", names=[name.hex() for name in block_hashes])
        for name in block_hashes:
            connector._memory.forget(name)

    def limit_gbps(self, direction: TransferDirection, num_bytes: int) -> float:
        num_blocks = num_bytes // self._layout.block_bytes
        slots = [self._pool.block(number % self._pool.num_blocks) for number in range(num_blocks)]
        if direction is TransferDirection.SAVE:
            started_s = time.perf_counter()
            for number, slot in enumerate(slots):
                np.copyto(np.frombuffer(self._copies.block(number), np.uint8), np.frombuffer(slot, np.uint8))
            return num_bytes / (time.perf_counter() - started_s) / 1e9
        with socket.create_server((HOST, 0)) as listener:
            self._tell("send", port=listener.getsockname()[1], num_blocks=num_blocks)
            connection, _peer = listener.accept()
        with connection:
            header = bytearray(BLOCK_HEADER_BYTES)
            started_s = time.perf_counter()
            for slot in slots:
                num_received = connection.recvmsg_into([header, slot], 0, socket.MSG_WAITALL)[0]
                assert num_received == len(header) + len(slot)
            seconds = time.perf_counter() - started_s
        self._answer()
        return num_bytes / seconds / 1e9

    def make_known(self, connector: KVConnector, block_hashes: Sequence[bytes]) -> None:
        """As if they were in this node's memory; what is not is asked about at the other process."""
        assert isinstance(connector, TcpConnector)
        connector._memory._slot_by_hash.update(dict.fromkeys(block_hashes, 0))

    def hang(self, connector: KVConnector) -> bool:
        self._process.send_signal(signal.SIGSTOP)
        return True

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def empty(self) -> None:
        """Nothing: memory of both is recycled, as in a full store."""

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, do: str, **arguments: Any) -> Any:
        self._tell(do, **arguments)
        return self._answer()

    def _tell(self, do: str, **arguments: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


class _SourceProcess:
    """The other process."""

    def __init__(self, block_bytes: int) -> None:
        layout = _layout(block_bytes)
        self._pool = KVPoolMemory(layout, BYTES_PER_ROUND // block_bytes)
        self._pool.buffer[:] = os.urandom(1024) * (len(self._pool.buffer) // 1024)
        self._connector = create_connector("tcp", _options(layout), MonotonicClock())
        self._connector.register_kv_cache(self._pool)
        self._num_transfers = 0

    def address(self) -> str:
        return self._connector.kv_address

    def save(self, names: Sequence[str]) -> bool:
        hashes = tuple(bytes.fromhex(name) for name in names)
        self._num_transfers += 1
        request_id, block_ids, deadline_s = f"save-{self._num_transfers}", tuple(range(len(hashes))), time.monotonic() + 60.0
        transfer = Transfer(self._num_transfers, TransferDirection.SAVE, request_id, block_ids, hashes, deadline_s)
        self._connector.start_save(transfer)
        while not (results := self._connector.poll_transfers()):
            time.sleep(0.0005)
        return results[0].num_blocks_ok == len(hashes)

    def send(self, port: int, num_blocks: int) -> bool:
        header = bytes(BLOCK_HEADER_BYTES)
        with socket.create_connection((HOST, port)) as connection:
            for number in range(num_blocks):
                views = [memoryview(header), self._pool.block(number % self._pool.num_blocks)]
                sent = connection.sendmsg(views)
                assert sent == len(header) + len(views[1])
        return True


def main() -> None:
    """Argument: bytes of a block. A command per line, as JSON, until stdin ends."""
    source = _SourceProcess(int(sys.argv[1]))
    commands = {"address": source.address, "save": source.save, "send": source.send}
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(commands[command.pop("do")](**command)), flush=True)


if __name__ == "__main__":
    main()
