"""A real `lmcache server` on free ports, with its memory under a name of its own."""

from __future__ import annotations

import http.client
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

from deploy.topology import find_free_ports
from tests.support.server_process import ServerProcess

HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
_START_TIMEOUT_S = 90.0


class LMCacheServerProcess(ServerProcess):
    """Runs until end(). Each start is on the same ports, and empty."""

    def __init__(self, folder: Path, size_gb: float = 1.0, *flags: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "lmcache-server.log"
        self._shm_name = f"kvrtest{uuid.uuid4().hex[:12]}"
        self._size_gb, self._flags = size_gb, flags
        port, http_port = find_free_ports(HOST, 2)
        self.address, self.http_address = f"{HOST}:{port}", f"{HOST}:{http_port}"
        self.start()

    def start(self) -> None:
        """Start it and wait until it answers."""
        self.start_without_waiting()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._is_up():
            assert self._process is not None
            assert self._process.poll() is None, f"the server ended: {self._log.read_text()}"
            assert time.monotonic() < deadline_s, "the server does not answer"
            time.sleep(0.02)

    def start_without_waiting(self) -> None:
        """It takes seconds."""
        host, port = self.address.split(":")
        command = [str(Path(sys.executable).with_name("lmcache")), "server", "--host", host, "--port", port]
        command += ["--http-port", self.http_address.split(":")[1], "--prometheus-port", "0"]
        command += ["--supported-transfer-mode", "engine_driven", "--shm-name", self._shm_name, "--no-l1-use-lazy"]
        command += ["--l1-size-gb", str(self._size_gb), "--eviction-policy", "LRU", *self._flags]
        environment = {**os.environ, "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def end(self) -> None:
        """Kill it, and remove its memory and the index of it."""
        self.kill()
        for path in SHARED_MEMORY.glob(f"*lmcache_l1_pool_{self._shm_name}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _is_up(self) -> bool:
        connection = http.client.HTTPConnection(self.http_address, timeout=5.0)
        try:
            connection.request("GET", "/status")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()
