"""A whole cluster of real processes for e2e and fault tests: start, break, and prove that nothing is left.

Every wait has a deadline. Processes log to files, whose ends are shown when a test fails. Questions go through cluster_client.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.config import (
    ClusterOptions,
    Config,
    ConnectorOptions,
    EngineOptions,
    ModelOptions,
    NodeOptions,
    RouterOptions,
    SecurityOptions,
    config_to_yaml,
)
from core.errors import ConfigError
from deploy.child_process import ChildProcess
from deploy.topology import check_port_free, find_free_ports, process_spec
from tests.support.cluster_client import ClusterClient, Labels
from tests.support.memory_pools import pool_holders

HOST = "127.0.0.1"
MODEL_NAME = "test-model"
POLL_INTERVAL_S = 0.05
STOP_TIMEOUT_S = 20.0
NUM_LOG_LINES_SHOWN = 40


# Of the engine: plain torch takes so long that prompts and streams have a middle, in which something can be killed.
SLOW_KERNELS = {"cpu_kernels": "torch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """What to start. engine, router and connector_options are keys of the configuration's sections, over small defaults.

    host: where everything listens; beyond loopback it takes keys. control_host: where nodes register, if elsewhere. api_key: an
    administrator's, where the router asks for one.
    pool_name: of the shared-memory pool; "" makes one up that no other test uses. flags go to every node's command line,
    environment to every process. node_module: what nodes run instead of their own main; it is given the role first.
    """

    model: str
    prefill: int = 1
    decode: int = 1
    dtype: str = "float32"
    connector: str = "shm"
    connector_options: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    router: Mapping[str, Any] = field(default_factory=dict)
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    node_module: str = ""
    pool_name: str = ""
    host: str = HOST
    control_host: str = ""
    keys: str = ""
    api_key: str = ""
    start_timeout_s: float = 180.0
    request_timeout_s: float = 300.0


class Cluster:
    """A running cluster, as a context manager. Node names are prefill-0, decode-0 and so on, in order of their start.

    Start nodes from the main thread only: the kernel ends a child when the thread that started it ends. Leaving the context stops
    everything and, unless a test has already failed, fails when a process does not end by itself, or a process, a port, a
    shared memory of this cluster's pool or a temporary file is left.
    """

    def __init__(self, spec: ClusterSpec) -> None:
        self.spec = spec
        self.folder = Path(tempfile.mkdtemp(prefix="kvrelay-test-"))
        self.pool_name = spec.pool_name or self.folder.name
        self.children: dict[str, ChildProcess] = {}
        self._num_started = {"prefill": 0, "decode": 0}
        self._temporary_files = self.folder / "tmp"
        self._temporary_files.mkdir()
        self._port, self._control_port = find_free_ports(spec.host, 2)
        self._config_file = self.folder / "config.yaml"
        self._config_file.write_text(config_to_yaml(self._config()))
        self.client = ClusterClient(self.url, MODEL_NAME, spec.request_timeout_s, spec.api_key)

    def __enter__(self) -> Cluster:
        try:
            self.start_router()
            for role, count in (("prefill", self.spec.prefill), ("decode", self.spec.decode)):
                for _ in range(count):
                    self.start_node(role, wait=False)
            self.wait_ready()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        try:
            left = self.stop()
            if left or error_type is not None:
                self.show_logs()
            if left and error_type is None:
                raise AssertionError(f"the cluster left something behind: {left}")
        finally:
            self.client.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def stop(self) -> list[str]:
        """End all processes in order; what had to be killed, and what find_leftovers finds. Safe to repeat."""
        return self._stop_all() + self.find_leftovers()

    @property
    def url(self) -> str:
        """Of the router's HTTP server."""
        return f"http://{self.spec.host}:{self._port}"

    @property
    def router_address(self) -> str:
        """HOST:PORT at which nodes register."""
        return f"{self.spec.control_host or self.spec.host}:{self._control_port}"

    # -- processes -----------------------------------------------------------------------------------------------------
    def start_router(self) -> None:
        """Start the router, for the first time or after kill("router")."""
        self._start("router")

    def start_node(self, role: str, *flags: str, wait: bool = True, inside: Sequence[str] = ()) -> str:
        """Start another node and return its name; wait: until the router has it. inside: a command that runs its command line."""
        name = f"{role}-{self._num_started[role]}"
        self._num_started[role] += 1
        self._start(name, "--node-id", name, *self.spec.flags, *flags, inside=inside)
        if wait:
            self.wait_until(lambda: self.client.node_status(name) == "up", f"{name} is up", self.spec.start_timeout_s)
        return name

    def restart_node(self, name: str, *flags: str, wait: bool = True) -> None:
        """Start a node again under its old name, as a supervisor does after kill(); wait: until the router has it."""
        self._start(name, "--node-id", name, *self.spec.flags, *flags)
        if wait:
            self.wait_until(lambda: self.client.node_status(name) == "up", f"{name} is up again", self.spec.start_timeout_s)

    def kill(self, name: str) -> None:
        """kill -9, and wait until the process is gone."""
        child = self.children.pop(name)
        child.kill_group()
        assert child.wait(STOP_TIMEOUT_S), f"{name} survived SIGKILL"

    def stop_node(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM; the exit code. Fails when the process does not end in time."""
        child = self.children[name]
        child.send(signal.SIGTERM)
        assert child.wait(timeout_s), f"{name} did not end within {timeout_s} s of SIGTERM"
        del self.children[name]
        code = child.poll_exit_code()
        assert code is not None
        return code

    def pause(self, name: str) -> None:
        """SIGSTOP: the process is there and does nothing, as when its machine hangs."""
        self.children[name].send(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.children[name].send(signal.SIGCONT)

    # -- waiting and looking -------------------------------------------------------------------------------------------
    def wait_ready(self) -> None:
        """Until /health is 200 and every started node is up."""
        names = [name for name in self.children if name != "router"]

        def is_ready() -> bool:
            return all(self.client.node_status(name) == "up" for name in names) and self.client.is_healthy()

        self.wait_until(is_ready, "the cluster is ready", self.spec.start_timeout_s)

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        """Poll a condition. Fails at the deadline, or when one of our processes has ended by itself."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            for name, child in self.children.items():
                assert child.poll_exit_code() is None, f"{name} {child.describe_exit()} while waiting until {what}"
            assert time.monotonic() < deadline_s, f"waited {timeout_s:.0f} s until {what}"
            time.sleep(POLL_INTERVAL_S)

    def audit(self) -> dict[str, Any]:
        """What the cluster still holds; see GET /audit."""
        return self.client.audit()

    def wait_clean(self, timeout_s: float = 30.0) -> None:
        """Until the audit finds no problem and nobody holds anything; its last answer is part of the failure."""
        deadline_s = time.monotonic() + timeout_s
        while not holds_nothing(last := self.audit()):
            assert time.monotonic() < deadline_s, f"the audit is not clean after {timeout_s:.0f} s: {json.dumps(last)}"
            time.sleep(POLL_INTERVAL_S)

    def metrics(self) -> dict[str, dict[Labels, float]]:
        """{sample name: {labels, sorted: value}} of router and nodes."""
        return self.client.metrics()

    def log(self, name: str) -> str:
        """All that a process has printed."""
        path = self._log_path(name)
        return path.read_text() if path.exists() else ""

    def show_logs(self) -> None:
        """Print the end of every process's log (pytest shows it with the failure)."""
        for path in sorted(self.folder.glob("*.log")):
            print(f"--- {path.stem} ---", *path.read_text().splitlines()[-NUM_LOG_LINES_SHOWN:], sep="\n")

    def find_leftovers(self) -> list[str]:
        """What should be gone once all processes have ended: processes, pools, temporary files, ports in use."""
        left = [f"process {pid}" for pid in running_processes_of(self.folder)]
        left += pool_holders(self.pool_name)
        left += [str(path) for path in self._temporary_files.rglob("*")]
        for port in (self._port, self._control_port):
            try:
                check_port_free("port", self.spec.host, port)
            except ConfigError as error:
                left.append(str(error))
        return left

    # -- inside --------------------------------------------------------------------------------------------------------
    def _config(self) -> Config:
        spec, options = self.spec, dict(self.spec.connector_options)
        if spec.connector == "shm":
            options.setdefault("name", self.pool_name)
        return Config(
            model=ModelOptions(path=spec.model, dtype=spec.dtype, served_name=MODEL_NAME),
            engine=EngineOptions(**{"num_threads": 1, "kv_pool_mib": 128, **spec.engine}),
            connector=ConnectorOptions(name=spec.connector, options=options),
            router=RouterOptions(
                **{
                    "host": spec.host,
                    "port": self._port,
                    "control_host": spec.control_host or spec.host,
                    "control_port": self._control_port,
                    **spec.router,
                }
            ),
            node=NodeOptions(router=self.router_address),
            cluster=ClusterOptions(prefill=spec.prefill, decode=max(1, spec.decode)),
            security=SecurityOptions(keys=spec.keys),
        )

    def _start(self, name: str, *flags: str, inside: Sequence[str] = ()) -> None:
        assert threading.current_thread() is threading.main_thread(), "start processes from the main thread"
        assert name not in self.children, f"{name} runs already"
        spec = process_spec(name, self._config_file, *flags)
        if self.spec.node_module and name != "router":
            module = spec.argv.index("-m") + 1
            replaced = (*spec.argv[:module], self.spec.node_module, name.partition("-")[0], *spec.argv[module + 1 :])
            spec = dataclasses.replace(spec, argv=replaced)
        spec = dataclasses.replace(spec, argv=(*inside, *spec.argv))
        added = {"TMPDIR": str(self._temporary_files), **self.spec.environment}
        spec = dataclasses.replace(spec, environment=(*spec.environment, *added.items()))
        log_path = self._log_path(name)

        def append_to_log(_: str, line: str) -> None:
            with contextlib.suppress(FileNotFoundError), log_path.open("a") as log:
                log.write(f"{line}\n")

        self.children[name] = ChildProcess(spec, append_to_log)

    def _stop_all(self) -> list[str]:
        """Router first, as the supervisor does it, so that no node sees requests while it ends. Returns what had to be killed."""
        router = [child for name, child in self.children.items() if name == "router"]
        nodes = [child for name, child in self.children.items() if name != "router"]
        for children in (router, nodes):
            for child in children:
                child.send(signal.SIGTERM)
                child.send(signal.SIGCONT)  # a paused one ends, too
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            for child in children:
                child.wait(max(0.0, deadline_s - time.monotonic()))
        stubborn = [f"{name} had to be killed" for name, child in self.children.items() if child.poll_exit_code() is None]
        for child in (*router, *nodes):
            child.kill_group()
            child.wait(STOP_TIMEOUT_S)
        self.children.clear()
        return stubborn

    def _log_path(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def holds_nothing(audit: dict[str, Any]) -> bool:
    """Whether an audit found no problem, and every count of router and nodes is 0."""
    counts = [audit["router"], *(node["counts"] for node in audit["nodes"].values())]
    return audit["is_clean"] and not any(value for held in counts for value in held.values())


def running_processes_of(folder: Path) -> list[int]:
    """Ids of processes whose command line names `folder`: each process of a cluster is given its configuration there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended since it was listed
                if os.fsencode(folder) in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
    return found
