"""How a Redis or Valkey server is reached: addresses, TLS, users and databases are redis-py's, which is imported here alone.

A connection is set up by redis-py and then used as a RespStream on the same socket: redis-py has read every reply of the
set-up by then, so that nothing is left in its buffer.
"""

from __future__ import annotations

import itertools
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, parse_cluster_slots
from redis.connection import Connection, SSLConnection, parse_url
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as NUM_SLOTS
from redis.crc import key_slot
from redis.retry import Retry
from redis.sentinel import Sentinel

from connectors.redis.resp_stream import RespError, RespStream
from core.addresses import host_of
from core.errors import ConfigError, ConnectorError

Node = tuple[str, int]  # host and port of a cluster's server
SOLE_NODE: Node = ("", 0)  # where there is no cluster
_CLIENT_FAULTS = (redis.RedisError, redis.RedisClusterException, OSError)  # the second is not one of the first
URL_FIELD = "connector.options.url"
_URL_FORMS = "redis://HOST:PORT/DB, rediss://… (TLS) or unix:///PATH?db=DB, with redis-py's query arguments (ssl_ca_certs=PATH)"
_SHOWABLE_URL = re.compile(  # an @ that is not the only one, or comes after a slash, is one of a password that was not quoted
    r"(rediss?|unix|valkeys?|https?|tcp)://(?:[^@/?#]*@)?([\w.-]*|\[[0-9A-Fa-f:.]*\])(:[^@/?#:]*)?(/[0-9]*)?(?:\?([^@#]*))?"
)
_NUMBER = re.compile(r"(:-?[0-9]*)?")  # a port that is none may be a password without its host
# What is ours to decide, and what would need redis-py's own reader.
_RESERVED = ("protocol", "decode_responses", "socket_timeout", "socket_connect_timeout", "retry", "parser_class")


@dataclass(frozen=True, slots=True)
class Credentials:
    """Over those of the URL where not empty. Never shown."""

    username: str
    password: str


@dataclass(frozen=True, slots=True)
class SentinelService:
    """Who knows which server is the primary now. addresses: HOST:PORT of each sentinel; empty: the URL says it all."""

    addresses: tuple[str, ...] = ()
    name: str = ""
    password: str = ""


class RedisServer:
    """Opens connections to one server. Any thread; close() ends waits on all that are open or being opened.

    With sentinels each connection goes to the server that they call the primary at that moment. They end the connections of one
    that they demote.
    """

    def __init__(
        self,
        url: str,
        credentials: Credentials,
        connect_timeout_s: float,
        op_timeout_s: float,
        sentinels: SentinelService = SentinelService(),
    ) -> None:
        """Raises ConfigError, which does not show what may be a password in the URL."""
        try:
            settings: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
        except ValueError:
            raise ConfigError(URL_FIELD, url_without_secrets(url), f"{_URL_FORMS}; ports are 1 to 65535") from None
        for name in _RESERVED:
            if name in settings:
                raise ConfigError(URL_FIELD, f"…{name}=…", f"a URL without {name}")
        if credentials.username:
            settings["username"] = credentials.username
        if credentials.password:
            settings["password"] = credentials.password
        if sentinels.addresses:
            if "path" in settings:
                raise ConfigError("connector.options.sentinels", ",".join(sentinels.addresses), "none, with a unix:// URL")
            settings = {name: value for name, value in settings.items() if name not in ("host", "port")}
        self._connection_type = settings.pop("connection_class", Connection)
        self._settings = {
            **settings,
            "socket_connect_timeout": connect_timeout_s,
            "socket_timeout": op_timeout_s,
            "protocol": 2,
            "driver_info": None,  # spares two round trips
        }
        try:
            self._connection_type(**self._settings)
        except (TypeError, ValueError, redis.RedisError):
            shown = url_without_secrets(url)
            raise ConfigError(URL_FIELD, shown, f"{_URL_FORMS}; a query argument is unknown or wrong") from None
        self._op_timeout_s = op_timeout_s
        self._service_name = sentinels.name
        self._sentinels = _sentinels(sentinels, connect_timeout_s) if sentinels.addresses else None
        self._on_redirect: Callable[[RespError], None] | None = None
        self._mutex = threading.Lock()  # of the two below
        self._connections: set[Connection] = set()
        self._is_closed = False

    @property
    def address(self) -> str:
        """Where the server is, for messages: no user, no password."""
        settings = self._settings
        if self._sentinels is not None:
            return f"primary of {self._service_name} db {settings.get('db', 0)}"
        where = settings.get("path") or f"{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"
        return f"{where} db {settings.get('db', 0)}"

    # -- which server has what; see cluster ----------------------------------------------------------------------------
    @property
    def is_cluster(self) -> bool:
        """Whether a block's keys must have one hash tag."""
        return False

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Those that have blocks. Raises ConnectorError before locate() has told."""
        return (SOLE_NODE,)

    def node_of(self, block_hash: bytes) -> Node:
        """The one that has this block, if any has. Raises as nodes does."""
        return SOLE_NODE

    @property
    def has_moved(self) -> bool:
        """Whether a server has said that some of its blocks are another's now: locate() again."""
        return False

    def locate(self) -> None:
        """Find out which servers there are. Raises ConnectorError."""

    # -- connections ---------------------------------------------------------------------------------------------------
    def open_stream(self, node: Node = SOLE_NODE) -> RespStream:
        """A connection on which nothing is outstanding. Takes connect_timeout_s and one op_timeout_s per step of the set-up at
        most. Raises ConnectorError."""
        connection, connected = self._open(self._place_of(node))
        return RespStream(connected, self._op_timeout_s, lambda: self._disconnect(connection), self._on_redirect)

    def _open(self, place: dict[str, Any]) -> tuple[Connection, socket.socket]:
        """A connection that is set up, and shut down by close(). Raises ConnectorError."""
        connection: Connection = self._connection_type(**self._settings, **place)
        with self._mutex:
            if self._is_closed:
                raise ConnectorError("the connector is closed")
            self._connections.add(connection)
        try:
            connection.connect()  # type: ignore[no-untyped-call]
            with self._mutex:
                connected = connection._get_socket()
                if self._is_closed or connected is None:
                    raise ConnectorError("the connector is closed")
            return connection, connected
        except (redis.RedisError, OSError, ConnectorError) as error:
            self._disconnect(connection)
            where = f"{place['host']}:{place['port']}" if "host" in place else self.address
            raise ConnectorError(f"no connection to {where}: {error}") from error

    def _ask_once(self, place: dict[str, Any], commands: Sequence[tuple[str, ...]]) -> list[Any]:
        """Over a connection of its own. Raises ConnectorError."""
        connection, _socket = self._open(place)
        try:
            for command in commands:
                connection.send_command(*command)  # type: ignore[no-untyped-call]
            return [connection.read_response() for _command in commands]
        except (redis.RedisError, OSError) as error:
            raise ConnectorError(str(error)) from error
        finally:
            self._disconnect(connection)

    def open_client(self) -> RedisClient:
        """An ordinary client with a connection of its own, for what is small and rare. Raises ConnectorError."""
        settings = {**self._settings, **self._place_of(SOLE_NODE)}
        pool = redis.ConnectionPool(connection_class=self._connection_type, **settings)
        return RedisClient(redis.Redis(connection_pool=pool), self.address)

    def _open_cluster_client(self, nodes: Sequence[Node]) -> RedisClient:
        settings = {name: value for name, value in self._settings.items() if name != "driver_info"}
        is_tls = issubclass(self._connection_type, SSLConnection)
        startup_nodes = [ClusterNode(host, port) for host, port in nodes]  # type: ignore[no-untyped-call]
        try:
            client = redis.RedisCluster(startup_nodes=startup_nodes, ssl=is_tls, **settings)
        except _CLIENT_FAULTS as error:
            raise ConnectorError(f"no connection to the {self.address}: {error}") from error
        return RedisClient(client, self.address)

    def _place_of(self, node: Node) -> dict[str, Any]:
        """Settings beyond those of the URL: what the sentinels say, asked in turn until one answers. Raises ConnectorError."""
        if self._sentinels is None:
            return {}
        try:
            host, port = self._sentinels.discover_master(self._service_name)  # type: ignore[no-untyped-call]
        except _CLIENT_FAULTS as error:
            raise ConnectorError(f"no sentinel knows the {self.address}: {error}") from error
        return {"host": host, "port": port}

    def close(self) -> None:
        """Make every wait on every connection fail, now and later. Whoever uses a connection closes it. Safe to repeat."""
        with self._mutex:
            self._is_closed = True
            connections = list(self._connections)
        for connection in connections:
            _shut_down(connection)

    def _disconnect(self, connection: Connection) -> None:
        with self._mutex:
            self._connections.discard(connection)
        connection.disconnect()  # type: ignore[no-untyped-call]


class RedisClient:
    """redis-py's client; one thread. Its faults are ConnectorErrors, a refused command's stands in its place."""

    def __init__(self, client: redis.Redis | redis.RedisCluster, address: str) -> None:
        self._address = address
        self._client: Any = client

    def ask(self, commands: Sequence[tuple[bytes, ...]]) -> list[Any]:
        """The replies of a pipeline."""
        if not commands:
            return []
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            # By the general way: the named methods reshape replies, and differ from version to version.
            pipeline.execute_command(command[0].decode(), *command[1:])
        try:
            return list(pipeline.execute(raise_on_error=False))
        except _CLIENT_FAULTS as error:
            raise ConnectorError(f"{self._address}: {error}") from error

    def scan(self, pattern: bytes, count: int) -> Iterator[list[bytes]]:
        """The names of all keys that match, `count` at a time."""
        found = self._client.scan_iter(match=pattern, count=count)
        while True:
            try:
                keys = list(itertools.islice(found, count))
            except _CLIENT_FAULTS as error:
                raise ConnectorError(f"{self._address}: {error}") from error
            if not keys:
                return
            yield [key for key in keys if isinstance(key, bytes)]

    def max_memory_bytes(self) -> int:
        """The limit of all servers; 0: one has none, or does not say."""
        try:
            if isinstance(self._client, redis.RedisCluster):
                found = list(self._client.info("memory", target_nodes=redis.RedisCluster.PRIMARIES).values())
            else:
                found = [self._client.info("memory")]
        except _CLIENT_FAULTS as error:
            raise ConnectorError(f"{self._address}: {error}") from error
        limits = [int(fields.get("maxmemory", 0)) for fields in found]
        return sum(limits) if all(limits) else 0

    def close(self) -> None:
        """Close its connection."""
        self._client.close()


def slot_of(block_hash: bytes) -> int:
    """Of a block's keys in a cluster, whose hash tag is the block's hash."""
    return int(key_slot(block_hash.hex().encode()))


def read_slots(reply: Any, asked_host: str) -> list[Node | None]:
    """The primary of each slot, from the reply of CLUSTER SLOTS by a server at asked_host."""
    primaries: list[Node | None] = [None] * NUM_SLOTS
    # A server that does not know its own address leaves it out.
    for (first, last), servers in parse_cluster_slots(reply, current_host=asked_host).items():
        primaries[first : last + 1] = [servers["primary"]] * (last + 1 - first)
    return primaries


def parse_addresses(field: str, addresses: Sequence[str]) -> list[Node]:
    """HOST:PORT each. Raises ConfigError."""
    nodes = []
    for address in addresses:
        host, port = host_of(address), address.rpartition(":")[2]
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(field, address, "HOST:PORT, and commas between several")
        nodes.append((host, int(port)))
    return nodes


def url_without_secrets(url: str) -> str:
    """Scheme, host, port and database of a URL that may be wrong, and the names of its query arguments; nothing where it is not
    clear what is a part of a password."""
    found = _SHOWABLE_URL.fullmatch(url)
    if found is None:
        return "(not shown)"
    scheme, host, port, path, query = found.groups(default="")
    names = ",".join(re.findall(r"(?:^|&)([a-z_]{1,40})=", query))
    return f"{scheme}://{host}{port if _NUMBER.fullmatch(port) else ':…'}{path}" + (f"?{names}" if names else "")


def _shut_down(connection: Connection) -> None:
    connected = connection._get_socket()
    if connected is not None:
        try:
            connected.shutdown(socket.SHUT_RDWR)
        except OSError:  # is closed already
            return


def _sentinels(service: SentinelService, timeout_s: float) -> Sentinel:
    """Clients of a service's sentinels. Raises ConfigError."""
    addresses = parse_addresses("connector.options.sentinels", service.addresses)
    settings: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    settings |= {"retry": Retry(NoBackoff(), 0), "password": service.password or None}
    return Sentinel(addresses, sentinel_kwargs=settings)  # type: ignore[no-untyped-call]
