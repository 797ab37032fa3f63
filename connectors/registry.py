"""Connectors by name. A connector is a module with create_connector(options, clock); the built-in ones stand below.

Others register the same function under the entry-point group `kvrelay.connectors`. Nothing is imported before it is asked for,
so that one connector's client library is not another one's need.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from connectors.staging.connector import StagedConnector
from connectors.store_browser import StoreBrowser
from core.clock import Clock
from core.errors import ConfigError
from core.kv.connector import KVConnector
from core.kv.device_copies import OpenCopies

ENTRY_POINT_GROUP = "kvrelay.connectors"
_MODULE_BY_NAME = {
    "lmcache": "connectors.lmcache.connector",
    "none": "connectors.none",
    "nvme": "connectors.slots.nvme",
    "ray": "connectors.ray.connector",
    "redis": "connectors.redis.connector",
    "shm": "connectors.slots.shm",
    "tcp": "connectors.tcp.connector",
    "tiered": "connectors.tiered.connector",
}
BUILT_IN_CONNECTORS = tuple(_MODULE_BY_NAME)
# Where open_browser is not in the connector's own module, so that the store can be looked into without the client library.
_BROWSER_MODULE_BY_NAME = {
    "lmcache": "connectors.lmcache.browser",
    "ray": "connectors.ray.browser",
    "tcp": "connectors.tcp.browser",
}

ConnectorFactory = Callable[[Mapping[str, Any], Clock], KVConnector]


def create_connector(name: str, options: Mapping[str, Any], clock: Clock, open_copies: OpenCopies | None = None) -> KVConnector:
    """A connector that has not touched its store yet: register_kv_cache does that. open_copies: for an engine whose KV is not in
    host memory; see StagedConnector.

    Raises ConfigError for an unknown name (listing what exists), a missing client library, or an option that is not allowed.
    """
    connector = _find_factory(name)(options, clock)
    return connector if open_copies is None else StagedConnector(connector, open_copies, clock)


def open_browser(name: str, options: Mapping[str, Any], read_secret: Callable[[], bytes] = bytes) -> StoreBrowser:
    """The store of these options, to be looked into apart from an engine: open_browser(options) of the connector's module.

    read_secret: KVConnector.cluster_secret, for those whose open_browser has a parameter of this name. Raises as create_connector
    does, ConfigError where the connector has no such function, and ConnectorError where the store cannot be reached.
    """
    own_module = _BROWSER_MODULE_BY_NAME.get(name)
    module = importlib.import_module(own_module) if own_module else sys.modules[_find_factory(name).__module__]
    open_one = getattr(module, "open_browser", None)
    if open_one is None:
        allowed = "a connector whose store can be looked into: lmcache, nvme, ray, redis, shm, tcp, tiered, or one of your own"
        why = "" if name in BUILT_IN_CONNECTORS else f"; {name} is installed, and its module {module.__name__} has none"
        raise ConfigError("connector.name", name, f"{allowed} with open_browser(options) beside create_connector{why}")
    takes_secret = "read_secret" in inspect.signature(open_one).parameters
    browser: StoreBrowser = open_one(options, read_secret=read_secret) if takes_secret else open_one(options)
    return browser


def connector_names() -> list[str]:
    """Everything that create_connector knows, in order."""
    return sorted({*BUILT_IN_CONNECTORS, *_third_party()})


def _find_factory(name: str) -> ConnectorFactory:
    third_party = _third_party()
    try:
        if name in BUILT_IN_CONNECTORS:
            factory: ConnectorFactory = importlib.import_module(_MODULE_BY_NAME[name]).create_connector
        elif name in third_party:
            factory = third_party[name].load()
        else:
            raise ConfigError("connector.name", name, f"one of {', '.join(connector_names())}")
    except ImportError as error:
        raise ConfigError("connector.name", name, f"a connector whose libraries are installed ({error})") from error
    return factory


def _third_party() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}
