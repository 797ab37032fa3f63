"""Options of the `redis` connector, and which server they mean, before anything is opened."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from connectors.redis.cluster import CLUSTER_FIELD, RedisCluster
from connectors.redis.server import Credentials, RedisServer, SentinelService
from core.config import options_from_mapping
from core.errors import ConfigError

_NAMESPACE = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
_SECRET_NAME = re.compile("pas|pw|psw|user|auth|secret|token|key|cred|url", re.IGNORECASE)  # of what may be one, misspelled
_HARMLESS_NAME = re.compile("time|expir|num|size|bytes|level|codec|namespace|port|db", re.IGNORECASE)
_SECRETS = ("username", "password", "sentinel_password")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions:
    """url: redis://HOST:PORT/DB, rediss://… for TLS, unix:///PATH?db=DB; redis-py's query arguments (ssl_ca_certs=…) are fine.
    username, password: instead of those in the URL. sentinels: HOST:PORT,HOST:PORT of those that watch the primary called
    sentinel_service; the URL then only says scheme, database and query arguments. cluster_nodes: HOST:PORT,HOST:PORT of some
    servers of a Redis Cluster, of which the others are learned; the URL then only says scheme, user and query arguments.

    namespace separates stores on one server. A block expires expiry_s after its last use; one deeper in its prefix a little
    earlier. num_threads transfers move at the same time, over num_connections connections each (more for a server far away: one
    block is under way on each). op_timeout_s bounds every wait for the server, connect_timeout_s that for a connection.
    max_known_hashes bounds what a process remembers of the store, at about 150 bytes each; lookup_batch_size is how many blocks
    are asked about at once.

    codec: none, zstd (lossless; codec_level 1 to 19), or int8 or fp8, which are lossy: of 24 greedy answers of 32 tokens they
    changed 7 and 12 (bench/RESULTS.md). encryption_key_file: made by `kvrelay keys store FILE`; blocks at rest are encrypted
    with AES-256-GCM.
    """

    url: str = field(default="redis://127.0.0.1:6379/0", repr=False)
    username: str = ""
    password: str = field(default="", repr=False)
    sentinels: str = ""
    sentinel_service: str = "mymaster"
    sentinel_password: str = field(default="", repr=False)
    cluster_nodes: str = ""
    namespace: str = "kvrelay"
    expiry_s: float = 24 * 3600.0
    num_connections: int = 2
    num_threads: int = 2
    connect_timeout_s: float = 1.0
    op_timeout_s: float = 2.0
    max_known_hashes: int = 1_000_000
    lookup_batch_size: int = 512
    codec: str = "none"
    codec_level: int = 1
    encryption_key_file: str = ""

    def __post_init__(self) -> None:
        if not _NAMESPACE.fullmatch(self.namespace):
            raise ConfigError("connector.options.namespace", self.namespace, "1 to 64 letters, digits, or any of _.:-")
        for name, low, high in (
            ("expiry_s", 60, 365 * 24 * 3600),
            ("num_connections", 1, 64),
            ("num_threads", 1, 64),
            ("connect_timeout_s", 0.01, 60),
            ("op_timeout_s", 0.01, 60),
            ("max_known_hashes", 1024, 100_000_000),
            ("lookup_batch_size", 1, 8192),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"connector.options.{name}", getattr(self, name), f"{low} to {high}")


def server_of(options: RedisOptions) -> RedisServer:
    """The server, the primary that sentinels name, or the cluster. Raises ConfigError."""
    credentials, timeouts_s = Credentials(options.username, options.password), (options.connect_timeout_s, options.op_timeout_s)
    if options.cluster_nodes:
        if options.sentinels:
            raise ConfigError(CLUSTER_FIELD, options.cluster_nodes, "none, with sentinels: a cluster watches itself")
        return RedisCluster(options.url, credentials, *timeouts_s, options.cluster_nodes.split(","))
    return RedisServer(
        options.url,
        credentials,
        *timeouts_s,
        SentinelService(
            tuple(options.sentinels.split(",")) if options.sentinels else (),
            options.sentinel_service,
            options.sentinel_password,
        ),
    )


def parse_options(options: Mapping[str, Any]) -> RedisOptions:
    """From the free-form mapping. Raises ConfigError, in which no value that may be a secret is shown."""
    known = {option.name for option in fields(RedisOptions)}
    for name in options:
        if name not in known:
            value = options[name]
            is_harmless = isinstance(value, int | float) or _HARMLESS_NAME.search(name) is not None
            shown = value if is_harmless and not _SECRET_NAME.search(name) else "(not shown)"
            raise ConfigError(f"connector.options.{name}", shown, f"one of the options {', '.join(sorted(known))}")
    # A password like 1234 arrives as a number.
    texts = {name: str(options[name]) for name in ("url", *_SECRETS) if options.get(name) is not None}
    parsed: RedisOptions = options_from_mapping(RedisOptions, {**options, **texts}, "connector.options")
    return parsed
