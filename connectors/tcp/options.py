"""Options of the `tcp` connector, and what follows from them before anything is opened."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connectors.byte_sizes import check_capacity, with_parsed_sizes
from core.addresses import host_of
from core.config import options_from_mapping
from core.errors import ConfigError

_EVERYWHERE = ("0.0.0.0", "::", "*", "")
_MIN_KEY_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpOptions:
    """host, port: where this node serves its blocks (port 0: any); beyond loopback only with a secret. advertise: HOST or
    HOST:PORT under which others reach it, if not host. peers: HOST:PORT of nodes that are asked about every request, beside those
    that the router names; a list, or one text with commas. key_file: a file that all nodes have and nobody else can read, instead
    of what follows from security.keys.

    capacity_bytes is allocated at once. num_threads transfers move at the same time, over num_streams connections to each source
    (more on a far link: 1 MiB or a block is under way on each). A request waits lookup_wait_s for sources to answer; op_timeout_s
    bounds every other wait for one. A source keeps what another node is about to pull for lease_s after that node's last
    heartbeat. serve_pulled: what a node has pulled it serves to others.
    """

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""
    peers: tuple[str, ...] = ()
    key_file: str = ""
    capacity_bytes: int = 1024**3
    num_streams: int = 2
    num_threads: int = 2
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 2.0
    lookup_wait_s: float = 0.5
    lease_s: float = 10.0
    serve_pulled: bool = True
    max_connections: int = 256

    def __post_init__(self) -> None:
        check_capacity(self.capacity_bytes)
        for name, low, high in (
            ("port", 0, 65535),
            ("num_streams", 1, 64),
            ("num_threads", 1, 64),
            ("connect_timeout_s", 0.01, 60),
            ("op_timeout_s", 0.01, 60),
            ("lookup_wait_s", 0.01, 60),
            ("lease_s", 1, 60),
            ("max_connections", 1, 10_000),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"connector.options.{name}", getattr(self, name), f"{low} to {high}")
        if self.host in _EVERYWHERE and not self.advertise:
            allowed = "the address under which other nodes reach this one, when host stands for all addresses"
            raise ConfigError("connector.options.advertise", self.advertise, allowed)
        for peer in self.peers:
            host, port = host_of(peer), peer.rpartition(":")[2]
            if not (host and port.isdigit() and 1 <= int(port) <= 65535):
                raise ConfigError("connector.options.peers", peer, "HOST:PORT, with a port from 1 to 65535")


def advertised_address(options: TcpOptions, port: int) -> str:
    """HOST:PORT for other nodes."""
    host = options.advertise or options.host
    has_port = bool(host_of(host)) and host.rpartition(":")[2].isdigit() and (host.count(":") == 1 or "]:" in host)
    if has_port:
        return host
    host = host.removeprefix("[").removesuffix("]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_secret(key_file: str) -> bytes:
    """What follows from the key file's content. Raises ConfigError when it is missing, short, or open to others."""
    path = Path(key_file)
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
    except OSError as error:
        raise ConfigError("connector.options.key_file", key_file, f"a readable file ({error.strerror})") from error
    if mode & 0o077:
        allowed = f"a file that its owner alone can read; it has mode {mode & 0o777:04o}: chmod go-rwx {key_file}"
        raise ConfigError("connector.options.key_file", key_file, allowed)
    if len(content.strip()) < _MIN_KEY_BYTES:
        raise ConfigError("connector.options.key_file", key_file, "a file of at least 32 bytes: openssl rand -hex 32")
    return hashlib.sha256(b"kvrelay tcp key|" + content).digest()


def tcp_options(options: Mapping[str, Any]) -> TcpOptions:
    """From the free-form mapping. Raises ConfigError."""
    values = with_parsed_sizes(options, ("capacity_bytes",), "connector.options")
    peers = values.get("peers")
    if isinstance(peers, str):
        values["peers"] = [peer.strip() for peer in peers.split(",") if peer.strip()]
    result: TcpOptions = options_from_mapping(TcpOptions, values, "connector.options")
    return result
