"""The options of the lmcache connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connectors.byte_sizes import check_capacity, with_parsed_sizes
from core.config import options_from_mapping
from core.errors import ConfigError

IN_PROCESS, SERVER = "in_process", "server"
_FILES_CAPACITY_BYTES = 8 * 1024**3


@dataclass(frozen=True, slots=True)
class LMCacheOptions:
    """mode "in_process": LMCache in this process, over its file tier. "server": a running `lmcache server`, which other processes
    of this host use, too.

    capacity_bytes bounds what one KV layout takes; 0 is 8 GiB of files, or 70 % of the server's memory. op_timeout_s: how long
    one step of LMCache's may take. In process: path: a directory for LMCache's files, a folder per KV layout. memory_bytes:
    LMCache's memory, which all data passes. cache_in_memory: what was used last stays there, so that a load of it reads no file.
    With a server: server: its HOST:PORT. http: the HOST:PORT of its HTTP API. namespace: keeps stores in one server apart.
    """

    path: str = ""
    mode: str = IN_PROCESS
    capacity_bytes: int = 0
    memory_bytes: int = 1024**3
    cache_in_memory: bool = True
    num_threads: int = 2
    op_timeout_s: float = 5.0
    server: str = "127.0.0.1:5555"
    http: str = "127.0.0.1:8080"
    namespace: str = "default"

    def __post_init__(self) -> None:
        if self.capacity_bytes:
            check_capacity(self.capacity_bytes)
        if self.mode not in (IN_PROCESS, SERVER):
            raise ConfigError("connector.options.mode", self.mode, f"{IN_PROCESS} or {SERVER}")
        if self.mode == IN_PROCESS and not self.path:
            raise ConfigError("connector.options.path", self.path, "a directory for the blocks")
        if not 1 <= self.num_threads <= 64:
            raise ConfigError("connector.options.num_threads", self.num_threads, "1 to 64")
        if not 0.01 <= self.op_timeout_s <= 60:
            raise ConfigError("connector.options.op_timeout_s", self.op_timeout_s, "0.01 to 60")
        for name in ("server", "http"):
            host, _colon, port = str(getattr(self, name)).rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"connector.options.{name}", getattr(self, name), "HOST:PORT")
        if not self.namespace.isascii() or not self.namespace.isalnum() or len(self.namespace) > 64:
            raise ConfigError("connector.options.namespace", self.namespace, "1 to 64 letters and digits")

    @property
    def file_capacity_bytes(self) -> int:
        """In process."""
        return self.capacity_bytes or _FILES_CAPACITY_BYTES


def parse_options(options: Mapping[str, Any]) -> LMCacheOptions:
    """Options from configuration. Raises ConfigError."""
    sized = with_parsed_sizes(options, ("capacity_bytes", "memory_bytes"), "connector.options")
    parsed: LMCacheOptions = options_from_mapping(LMCacheOptions, sized, "connector.options")
    return parsed
