"""What `kvrelay serve` runs: the effective configuration and one ChildSpec per process, as plain functions of the user's.

Nothing here starts a process or opens a socket, except the two functions that look whether ports are free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from connectors.tiered.options import parse_tiered_options
from core.config import Config, user_cache_dir
from core.cores import format_cores
from core.errors import ConfigError
from deploy.child_process import ChildSpec

HTTP_BACKLOG = 2048
ANY_ADDRESS_TO_LOOPBACK = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}


def with_connector_defaults(config: Config) -> Config:
    """Where the store is, unless the user has said it. config.router.port is known.

    shm: a pool named after the port, so that two clusters on one host do not share one. nvme: in the user's cache directory, so
    that the next start finds it again. Tiers get the same.
    """
    return _with_defaults(config, {"shm": {"name": f"serve-{config.router.port}"}, "nvme": _default_folder()})


def with_default_folder(config: Config) -> Config:
    """The folder of nvme alone, for `kvrelay cache`, which looks into a store and does not know a cluster's port."""
    return _with_defaults(config, {"nvme": _default_folder()})


def _default_folder() -> dict[str, str]:
    return {"path": str(user_cache_dir() / "kv")}


def _with_defaults(config: Config, defaults: Mapping[str, Mapping[str, str]]) -> Config:
    options = dict(defaults.get(config.connector.name, {})) | config.connector.options
    if config.connector.name == "tiered":
        by_tier = {tier.name: dict(defaults.get(tier.connector, {})) for tier in parse_tiered_options(options)[1]}
        for name, tier_defaults in by_tier.items():
            given = options.get(name, {})
            by_tier[name] = {**tier_defaults, **given}
        options = by_tier | {name: value for name, value in options.items() if name not in by_tier}
    return dataclasses.replace(config, connector=dataclasses.replace(config.connector, options=options))


def effective_config(config: Config, model_folder: Path, num_cores: int) -> Config:
    """The configuration that router and nodes get: every default that depends on the whole cluster is filled in."""
    num_nodes = config.cluster.prefill + config.cluster.decode
    num_threads = config.engine.num_threads or max(1, num_cores // (num_nodes * config.engine.tensor_parallel_size))
    router, security = config.router, config.security
    control_host, control_port = connect_host(router.control_host), router.control_port or router.port + 1
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, path=str(model_folder), served_name=config.model.name),
        engine=dataclasses.replace(config.engine, num_threads=num_threads),
        router=dataclasses.replace(
            router,
            control_port=control_port,
            api_keys_file=absolute(router.api_keys_file),
            lora_modules={name: absolute(path) for name, path in router.lora_modules.items()},
        ),
        node=dataclasses.replace(config.node, router=join_host_port(control_host, control_port), node_id=""),
        security=dataclasses.replace(security, keys=absolute(security.keys)),
    )


def absolute(path: str) -> str:
    """A path that another process means the same by, wherever it runs; "" stays."""
    return str(Path(path).absolute()) if path else ""


def child_specs(config: Config, config_file: Path, http_fd: int, cores: Sequence[int] = ()) -> list[ChildSpec]:
    """Router first, then the nodes, all with config_file. A node gets its name, and a metrics port and cores of its own.

    http_fd: the listening HTTP socket, which every router in turn inherits. cores: to be divided among the nodes, where they are
    enough for the threads of all (config.engine.num_threads).
    """
    router = process_spec("router", config_file, "--router.http_fd", str(http_fd))
    specs = [dataclasses.replace(router, inherited_fds=(http_fd,))]
    for position, name in enumerate(node_names(config)):
        flags = ["--metrics-port", str(config.node.metrics_port + position)] if config.node.metrics_port > 0 else []
        if own := _own_cores(config, position, cores):
            flags += ["--cpus", format_cores(own)]
        specs.append(process_spec(name, config_file, "--node-id", name, *flags))
    return specs


def _own_cores(config: Config, position: int, cores: Sequence[int]) -> Sequence[int]:
    """Those of one node: neighbours, as many for each node. None where nodes have more threads than cores."""
    per_node = len(cores) // (config.cluster.prefill + config.cluster.decode)
    if per_node < max(config.engine.num_threads, 1):
        return ()
    return cores[position * per_node : (position + 1) * per_node]


def node_names(config: Config) -> list[str]:
    """The names of the nodes that are started: prefill-0, prefill-1, …, decode-0, …"""
    return [f"prefill-{i}" for i in range(config.cluster.prefill)] + [f"decode-{i}" for i in range(config.cluster.decode)]


def process_spec(name: str, config_file: Path, *flags: str) -> ChildSpec:
    """One process: "router", or a node whose name begins with its role ("prefill-…", "decode-…")."""
    module = "router" if name == "router" else f"{name.partition('-')[0]}_node"
    # -P and PYTHONPATH: the modules are this installation's, not ones of the same name in the user's current folder.
    root = str(Path(__file__).resolve().parent.parent)
    python_path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-P", "-m", module, "--config", str(config_file), *flags),
        environment=(("PYTHONPATH", python_path), ("PYTHONUNBUFFERED", "1")),
    )


def connect_host(host: str) -> str:
    """The address under which a server bound to `host` is reached from this machine."""
    return ANY_ADDRESS_TO_LOOPBACK.get(host, host)


def join_host_port(host: str, port: int) -> str:
    """HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def choose_ports(config: Config) -> Config:
    """The same configuration with router.port 0 replaced by a free port and control_port by the next one (or as given).

    Raises ConfigError when a port is taken or the host is not ours: better one line now than a failure of a child later.
    """
    router = config.router
    port = router.port or find_free_ports(router.host, 1)[0]
    free_control_port = next(free for free in find_free_ports(router.control_host, 2, "--control-host") if free != port)
    control_port = router.control_port or (port + 1 if router.port else free_control_port)
    if control_port == port:
        raise ConfigError("router.control_port", control_port, f"another port than router.port ({port})")
    check_port_free("--port", router.host, port)
    check_port_free("--control-port", router.control_host, control_port, "--control-host")
    return dataclasses.replace(config, router=dataclasses.replace(router, port=port, control_port=control_port))


def open_http_listener(config: Config) -> socket.socket:
    """The HTTP socket, listening already: connections wait in it while no router runs. Raises ConfigError."""
    listener = _bound_socket("--port", config.router.host, config.router.port, "--host")
    listener.listen(HTTP_BACKLOG)
    return listener


def find_free_ports(host: str, count: int, host_flag: str = "--host") -> list[int]:
    """Different ports on which nobody listens now."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(_bound_socket(host_flag, host, 0, host_flag)) for _ in range(count)]
        return [int(bound.getsockname()[1]) for bound in sockets]


def check_port_free(flag: str, host: str, port: int, host_flag: str = "--host") -> None:
    """Raise ConfigError when nothing could listen on host:port."""
    _bound_socket(flag, host, port, host_flag).close()


def _bound_socket(flag: str, host: str, port: int, host_flag: str) -> socket.socket:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, OverflowError) as error:
        raise ConfigError(host_flag, host, f"an address or name of this machine ({error})") from error
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a socket in TIME_WAIT is no obstacle
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(host_flag, host, "an address of this machine") from error
        raise ConfigError(flag, port, f"a port that is free on {host or 'this machine'} ({error.strerror})") from error
    return listener
