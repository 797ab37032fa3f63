"""A real Ray node for tests: GCS, raylet and what belongs to them, with all files in a folder of its own and nothing at home."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from deploy.topology import find_free_ports

MIB = 1024**2
_ROOT = Path(__file__).parents[2]
_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


class RayNode:
    """Runs until end(), which is safe to repeat. start() after kill() is a restart under the same address, and empty.

    On another loopback address than 127.0.0.1, which Ray takes for the host's own. head: another node's address, to join it.
    """

    def __init__(self, object_store_bytes: int = 256 * MIB, ip: str = "127.0.0.2", head: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kvr", dir="/tmp"))  # short: a socket's path has 107 characters
        self.ip = ip
        self.address = head or f"{ip}:{find_free_ports(ip, 1)[0]}"
        self._is_head = not head
        self._object_store_bytes = object_store_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self.start_s = 0.0  # how long Ray took to start, the last time
        self.environment: dict[str, str] = {}  # of the next start, over what is set anyway
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    @property
    def options(self) -> dict[str, Any]:
        """Of a connector, so that it uses this node."""
        return {"address": self.address, "node_ip": self.ip}

    def start(self) -> None:
        """Start it and wait until it says that it runs."""
        place = ["--head", "--port", self.address.rpartition(":")[2]] if self._is_head else ["--address", self.address]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *place, "--node-ip-address", self.ip, "--block"]
        command += ["--object-store-memory", str(self._object_store_bytes), "--num-cpus", "1", "--disable-usage-stats"]
        if self._is_head:
            command += ["--temp-dir", str(self.folder), "--include-dashboard", "false", "--no-monitor"]
        command += ["--include-log-monitor", "false"]
        environment = os.environ | {"HOME": str(self.folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        environment |= self.environment
        log_path = self.folder / "start.log"
        started_s = time.monotonic()
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while b"Ray runtime started" not in log_path.read_bytes():
            assert self._process.poll() is None, f"Ray ended: {log_path.read_text()}"
            assert time.monotonic() < deadline_s, "Ray does not start"
            time.sleep(0.02)
        self.start_s = time.monotonic() - started_s

    def make_directory(self) -> None:
        """As a connector would, and wait until it is there; it stays for a while after its last user."""
        options = json.dumps({**self.options, "auth": "disabled", "linger_s": 10.0})
        command = [sys.executable, "-m", "connectors.ray.directory", options]
        with subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.PIPE) as process:
            assert process.wait(_START_TIMEOUT_S) == 0, "no directory could be made"

    def kill(self) -> None:
        """kill -9 to all of it, and wait until it is gone. Safe to repeat."""
        if self._process is None:
            return
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, _END_TIMEOUT_S)
        self._process.wait()
        self._process = None

    def kill_one(self, name: str) -> None:
        """kill -9 to the processes of this name: gcs_server, raylet, or "directory"."""
        found = self._find(name)
        for process in found:
            process.kill()
        psutil.wait_procs(found, _END_TIMEOUT_S)

    def pause(self, name: str) -> None:
        """SIGSTOP to the processes of this name."""
        for process in self._find(name):
            process.send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        for process in self._find(name):
            process.send_signal(signal.SIGCONT)

    def num_directories(self) -> int:
        """How many directory actors run."""
        return len(self._named("directory"))

    def end(self) -> None:
        """Kill it and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def open_object_store(self) -> int:
        """A descriptor of the object store's memory, for doing damage."""
        (raylet,) = self._find("raylet")
        for entry in Path(f"/proc/{raylet.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "plasma" in str(entry.readlink()) and entry.stat().st_size > MIB:
                    return os.open(entry, os.O_RDWR)
        raise AssertionError("the raylet has no object store")

    def _find(self, name: str) -> list[psutil.Process]:
        found = self._named(name)
        assert found, f"there is no {name}"
        return found

    def _named(self, name: str) -> list[psutil.Process]:
        return [process for process in self._processes() if _is_named(process, name)]

    def _processes(self) -> list[psutil.Process]:
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []


def _is_named(process: psutil.Process, name: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        command = process.cmdline()
        return "Directory" in command[0] if name == "directory" else Path(command[0]).name == name
    return False
