"""`kvrelay drain` and `kvrelay restart`: let a process of a running cluster leave, and wait until it has, or is back.

Everything goes through the router's HTTP endpoints. Whoever supervises the processes starts them again; this only waits for it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from core.errors import InvalidInputError, KVRelayError
from deploy.router_client import RouterRefusalError, RouterUnreachableError, get_json, post_json

ROUTER = "router"
DRAINED = "drained"  # the router's word for a node that left as it was asked to
POLL_INTERVAL_S = 0.2
PROGRESS_INTERVAL_S = 5.0


def drain(url: str, name: str, timeout_s: float) -> None:
    """Ask a node, or "router", to leave, and return when it is gone. Raises KVRelayError when it is not in time."""
    before = _generation(url, name)
    _ask_to_drain(url, name)
    _wait(lambda: _generation(url, name) != before, f"{name} has finished what it has", timeout_s)
    if name != ROUTER:
        found = next((node for node in _nodes(url) if node["node_id"] == name), {})
        if found.get("status") == "down" and found["down_reason"] != DRAINED:
            raise KVRelayError(f"{name} did not leave by itself: {found['down_reason']}")


def restart(url: str, names: Sequence[str], timeout_s: float) -> None:
    """Drain one process after the other, each when the one before is back; no names: all nodes, then the router.

    Raises KVRelayError when one is not back in timeout_s: it is not supervised, or cannot start.
    """
    nodes = {str(node["node_id"]): node for node in _nodes(url) if node["status"] == "up"}
    if unknown := [name for name in names if name != ROUTER and name not in nodes]:
        raise InvalidInputError("NAME", unknown[0], f"{', '.join([*nodes, ROUTER])}")
    for name in names or [*nodes, ROUTER]:
        role = nodes[name]["role"] if name in nodes else ""
        if role == "decode" and sum(node["role"] == "decode" for node in nodes.values()) == 1:
            print(
                f"{name} is the only decode node: requests wait until it is back, or fail when that takes long", file=sys.stderr
            )
        waits_for = f"{name} has finished what it has, and is back"
        before = _generation(url, name)
        _ask_to_drain(url, name)
        _wait(lambda name=name, before=before: _is_back(url, name, before, set(nodes)), waits_for, timeout_s)  # type: ignore[misc]
        print(f"{name} was restarted", file=sys.stderr)


def _ask_to_drain(url: str, name: str) -> None:
    status, body = post_json(url, f"/drain/{name}")
    if status == 404:
        connected = [str(node["node_id"]) for node in _nodes(url) if node["status"] != "down"]
        raise InvalidInputError("NAME", name, f"{', '.join([*connected, ROUTER])}")
    if status != 202:
        raise RouterRefusalError(url, f"/drain/{name}", status, body)


def _is_back(url: str, name: str, before: str, node_names: set[str]) -> bool:
    """Another process has its place. After the router's own restart, all nodes must have found it, too."""
    if _generation(url, name) in ("", before):
        return False
    if name != ROUTER:
        return True
    return node_names <= {str(node["node_id"]) for node in _nodes(url) if node["status"] == "up"}


def _generation(url: str, name: str) -> str:
    """Which process has the name now; "" when none that is reachable and working has."""
    try:
        status, body = get_json(url, "/nodes", timeout_s=10.0)
    except RouterUnreachableError:
        return ""
    if status != 200 or not isinstance(body, dict):
        return ""
    if name == ROUTER:
        return str(body["router_generation"])
    return next((str(n["generation"]) for n in body["nodes"] if n["node_id"] == name and n["status"] in ("up", "draining")), "")


def _nodes(url: str) -> list[dict[str, Any]]:
    status, body = get_json(url, "/nodes", timeout_s=10.0)
    if status != 200 or not isinstance(body, dict):
        raise RouterRefusalError(url, "/nodes", status, body)
    return list(body["nodes"])


def _wait(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    began_s = said_at_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - began_s > timeout_s:
            raise KVRelayError(f"waited {timeout_s:.0f} s until {what}, in vain")
        if now_s - said_at_s >= PROGRESS_INTERVAL_S:
            print(f"waiting, {now_s - began_s:3.0f} s: {what}", file=sys.stderr)
            said_at_s = now_s
        time.sleep(POLL_INTERVAL_S)
