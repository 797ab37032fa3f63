"""A real Redis (or Valkey) server for tests: its own process on a port of its own, with files in a folder of the test's."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import redis

from deploy.topology import find_free_ports
from tests.support.server_process import ServerProcess

HOST = "127.0.0.1"
EXECUTABLE = shutil.which("redis-server") or shutil.which("valkey-server")
_START_TIMEOUT_S = 30.0


class RedisProcess(ServerProcess):
    """Runs until end(), which is safe to repeat. start() after kill() is a restart on the same port: empty, unless the server
    had saved its data (save_to_disk)."""

    def __init__(self, folder: Path, *flags: str, password: str = "", is_tls: bool = False) -> None:
        assert EXECUTABLE is not None, "there is no redis-server"
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.password = password
        self.flags: Sequence[str] = flags
        (self.port,) = find_free_ports(HOST, 1)
        self.is_tls = is_tls
        self.start()

    @property
    def url(self) -> str:
        """Without a password. With TLS it names the test's own certificate authority."""
        if self.is_tls:
            return f"rediss://{HOST}:{self.port}/0?ssl_ca_certs={self.folder / 'server.crt'}&ssl_check_hostname=false"
        return f"redis://{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Of the running server."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it and wait until it answers."""
        port = ["--port", "0", "--tls-port", str(self.port)] if self.is_tls else ["--port", str(self.port)]
        command = [str(EXECUTABLE), "--bind", HOST, *port, "--dir", str(self.folder), "--save", "", "--daemonize", "no"]
        command += [
            "--unixsocket",
            str(self.folder / "socket"),
            "--maxmemory-policy",
            "volatile-ttl",
        ]
        if self.password:
            command += ["--requirepass", self.password]
        if self.is_tls:
            certificate, key = make_certificate(self.folder)
            command += ["--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate]
            command += ["--tls-auth-clients", "no"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen([*command, *self.flags], stdout=log, stderr=log, start_new_session=True)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                    return
                except redis.BusyLoadingError:
                    time.sleep(0.005)
                except redis.ConnectionError:
                    assert self._process.poll() is None, f"the server ended: {(self.folder / 'log').read_text()}"
                    assert time.monotonic() < deadline_s, "the server does not answer"
                    time.sleep(0.005)

    def client(self) -> redis.Redis:
        """An ordinary client, for looking and for doing damage."""
        return redis.Redis.from_url(f"unix://{self.folder / 'socket'}", password=self.password or None)

    def save_to_disk(self) -> None:
        """Write all data to the folder, where the next start finds it."""
        with self.client() as client:
            client.save()

    def end(self) -> None:
        """Kill it and remove its files."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def make_certificate(folder: Path) -> tuple[str, str]:
    """A self-signed certificate for addresses of this host that tests use, and its key, made once in a folder; their paths."""
    certificate, key = folder / "server.crt", folder / "server.key"
    if not certificate.exists():
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1,IP:127.0.0.2", "-keyout", str(key), "-out", str(certificate)]
        subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


class ClusterProcesses:
    """Three primaries that share the slots of one Redis Cluster, and the replicas that a test adds. Run until end()."""

    NODE_TIMEOUT_MS = 1000

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._replicas: list[RedisProcess] = []
        self.servers = [self._start(number, bus_port) for number, bus_port in enumerate(find_free_ports(HOST, 3))]
        for number, server in enumerate(self.servers):
            with server.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", 16384 * number // 3, 16384 * (number + 1) // 3 - 1)
                client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
                for other, bus_port in ((other, other.flags[3]) for other in self.servers[:number]):
                    client.execute_command("CLUSTER MEET", HOST, other.port, bus_port)
        self.wait_served()

    def _start(self, number: int, bus_port: int) -> RedisProcess:
        flags = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
        flags += ("--cluster-node-timeout", str(self.NODE_TIMEOUT_MS), "--repl-diskless-sync-delay", "0")
        return RedisProcess(self._folder / f"node-{number}", *flags)

    def add_replica(self, primary: RedisProcess) -> RedisProcess:
        """A server that has what a primary has, and takes its place when that one dies."""
        (bus_port,) = find_free_ports(HOST, 1)
        replica = self._start(len(self.servers) + len(self._replicas), bus_port)
        self._replicas.append(replica)
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        with primary.client() as at_primary, replica.client() as at_replica:
            at_replica.execute_command("CLUSTER MEET", HOST, primary.port, primary.flags[3])
            primary_id = at_primary.execute_command("CLUSTER MYID")
            while True:
                with contextlib.suppress(redis.ResponseError):  # it does not know that server yet
                    at_replica.execute_command("CLUSTER REPLICATE", primary_id)
                    break
                assert time.monotonic() < deadline_s, "the replica does not get to know its primary"
                time.sleep(0.02)
            while not at_primary.wait(1, 100):
                assert time.monotonic() < deadline_s, "the replica does not follow its primary"
        self._wait_known(deadline_s)
        return replica

    def _wait_known(self, deadline_s: float) -> None:
        """Until everybody knows everybody, and who is a replica: else a replica asks too few for their votes, or gets none."""
        everybody = (*self.servers, *self._replicas)
        for server in everybody:
            with server.client() as client:
                while True:
                    lines = client.execute_command("CLUSTER", "NODES").decode().splitlines()
                    flags = [line.split()[2] for line in lines]
                    num_replicas = sum("slave" in one for one in flags)
                    if len(flags) == len(everybody) and num_replicas == len(self._replicas) and "handshake" not in str(flags):
                        break
                    assert time.monotonic() < deadline_s, f"not all know each other: {lines}"
                    time.sleep(0.02)

    @property
    def addresses(self) -> str:
        """HOST:PORT of all that were primaries at first, with commas."""
        return ",".join(f"{HOST}:{server.port}" for server in self.servers)

    def wait_served(self) -> None:
        """Until all servers say that all slots are served."""
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        for server in self.servers:
            with server.client() as client:
                while b"cluster_state:ok" not in _bytes_of(client.execute_command("CLUSTER INFO")):
                    assert time.monotonic() < deadline_s, "the cluster does not come up"
                    time.sleep(0.02)

    def end(self) -> None:
        """Kill all, and remove their files."""
        for server in (*self.servers, *self._replicas):
            server.end()


def _bytes_of(reply: object) -> bytes:
    """CLUSTER INFO's reply, which redis-py may have parsed."""
    if isinstance(reply, dict):
        return b"".join(f"{name}:{value}\n".encode() for name, value in reply.items())
    return reply if isinstance(reply, bytes) else str(reply).encode()


class SentinelProcess:
    """One sentinel that watches a primary on this machine under the name mymaster. Runs until end()."""

    def __init__(self, folder: Path, primary_port: int) -> None:
        folder.mkdir(parents=True)
        (self.port,) = find_free_ports(HOST, 1)
        lines = [f"port {self.port}", f"bind {HOST}", f"dir {folder}", f"sentinel monitor mymaster {HOST} {primary_port} 1"]
        lines += ["sentinel down-after-milliseconds mymaster 200", "sentinel failover-timeout mymaster 1000"]
        configuration = folder / "sentinel.conf"
        configuration.write_text("\n".join(lines) + "\n")
        with (folder / "log").open("ab") as log:
            command = [str(EXECUTABLE), str(configuration), "--sentinel"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._client = redis.Redis(HOST, self.port)

    def num_replicas(self) -> int:
        """How many it knows of; 0 while it starts."""
        try:
            return len(self._client.sentinel_slaves("mymaster"))
        except redis.RedisError:
            return 0

    def end(self) -> None:
        """Kill it."""
        self._client.close()
        self._process.kill()
        self._process.wait()
