"""`kvrelay serve` as a user runs it, for tests: its output in a file, its children found by name, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from deploy.topology import check_port_free, find_free_ports
from tests.support.cluster import HOST, MODEL_NAME
from tests.support.cluster_client import ClusterClient
from tests.support.memory_pools import pool_holders

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 120.0


class ServeProcess:
    """A running `kvrelay serve`, its output in a file and its temporary files in a folder of the test."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.port, self.control_port = find_free_ports(HOST, 2)
        self.temporary_files = folder / "tmp"
        self.temporary_files.mkdir()
        self._output = folder / "output"
        ports = ("--port", str(self.port), "--control-port", str(self.control_port))
        sizes = (
            "--engine.kv_pool_mib",
            "64",
            "--max-model-len",
            "1024",
            "--connector-option",
            "capacity_bytes=64MiB",
            "--served-model-name",
            MODEL_NAME,
        )
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "deploy.cli", "serve", *ports, *sizes, *flags],
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(self.temporary_files)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.client = ClusterClient(f"http://{HOST}:{self.port}", MODEL_NAME, timeout_s=60.0)

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"waited until {what}:\n{self.output}"
            time.sleep(0.1)

    def wait_ready(self) -> None:
        self.wait_until(lambda: "Ctrl-C ends everything" in self.output or self.process.poll() is not None, "it is ready")
        assert self.process.poll() is None, self.output

    def child_pids(self) -> dict[str, int]:
        """Node name to process id, of this cluster only."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError, ValueError):
                arguments = (entry / "cmdline").read_bytes().decode().split("\0")
                if str(self.temporary_files) in "".join(arguments) and int(entry.name) != os.getpid():
                    name = arguments[arguments.index("--node-id") + 1] if "--node-id" in arguments else "router"
                    found[name] = int(entry.name)
        return found

    def leftovers(self) -> list[str]:
        left = [f"process {name} {pid}" for name, pid in self.child_pids().items()]
        left += pool_holders(f"serve-{self.port}")
        for port in (self.port, self.control_port):
            check_port_free("port", HOST, port)
        return left

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30.0)
            self.process.kill()
            self.process.wait()
