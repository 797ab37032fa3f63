"""Endpoints that tell about the cluster and change it: nodes, requests in flight, audit, cached blocks, drain.

They are for operators and their tools, not for tenants.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.clock import Clock
from core.wire.messages import LEADING_BLOCKS
from router.dispatcher import Dispatcher
from router.http_generation import json_response
from router.openai_protocol import CachedRequest, decode_body
from router.registry import ROUTER_NAME, NodeState, NodeStatus

AUDIT_TIMEOUT_S = 5.0


class ClusterEndpoints:
    """Handlers; everything they show is RouterCore's. drain_router is called when this process itself is to leave."""

    def __init__(self, dispatcher: Dispatcher, clock: Clock, drain_router: Callable[[], None]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock
        self._drain_router = drain_router
        self._generation = secrets.token_hex(8)  # differs for every start of a router

    def routes(self) -> list[Route]:
        """What HttpApi adds to its own."""
        return [
            Route("/nodes", self.nodes),
            Route("/requests", self.requests),
            Route("/audit", self.audit),
            Route("/drain/{name:path}", self.drain, methods=["POST"]),
        ]

    async def nodes(self, _request: Request) -> Response:
        """GET /nodes."""
        now_s = self._clock.now_s()
        nodes = sorted(self._dispatcher.core.registry.nodes.values(), key=lambda node: node.node_id)
        return json_response({"router_generation": self._generation, "nodes": [node_body(node, now_s) for node in nodes]})

    async def requests(self, _request: Request) -> Response:
        """GET /requests: what is in flight, oldest first."""
        return json_response({"requests": self._dispatcher.core.list_requests()})

    async def drain(self, request: Request) -> Response:
        """POST /drain/{node_id}: 202, and the node leaves once it has finished or handed over what it has.

        POST /drain/router: the same for this process, which leaves once it has answered what it has accepted.
        """
        node_id: str = request.path_params["name"]
        if node_id == ROUTER_NAME:
            return self._drain_this_router()
        if not self._dispatcher.core.drain(node_id):
            connected = ", ".join(sorted(node.node_id for node in self._dispatcher.core.registry.connected()))
            raise HTTPException(404, f"node_id: got {node_id!r}; connected nodes: {connected or 'none'}")
        node = self._dispatcher.core.registry.nodes[node_id]
        return json_response({"node_id": node_id, "status": node.status.value, "num_in_flight": len(node.in_flight)}, 202)

    def _drain_this_router(self) -> Response:
        self._drain_router()
        num_in_flight = self._dispatcher.core.num_in_flight
        body = {"router_generation": self._generation, "status": "draining", "num_in_flight": num_in_flight}
        return json_response(body, 202)

    async def cached(self, _request: Request, body: bytes) -> Response:
        """POST /cached: how many of a prompt's leading blocks each node has in its own cache."""
        names = tuple(bytes.fromhex(name) for name in decode_body(body, CachedRequest).block_hashes)
        replies, missing = await self._dispatcher.audit(AUDIT_TIMEOUT_S, names)
        counts = {node_id: reply.counts.get(LEADING_BLOCKS, 0) for node_id, reply in sorted(replies.items())}
        return json_response({"num_leading_blocks": counts, "missing": missing})

    async def audit(self, _request: Request) -> Response:
        """GET /audit: 200 when nothing is held that should not be, else 503."""
        num_in_flight = self._dispatcher.core.num_in_flight
        replies, missing = await self._dispatcher.audit(AUDIT_TIMEOUT_S)
        problems = [f"{node_id}: no answer within {AUDIT_TIMEOUT_S:g} s" for node_id in missing]
        for node_id, reply in sorted(replies.items()):
            problems += [f"{node_id}: {problem}" for problem in reply.problems]
            num_held = reply.counts.get("requests", 0)
            if num_held and not num_in_flight and not self._dispatcher.core.num_in_flight:
                problems.append(f"{node_id}: holds {num_held} requests while the router has none")
        body = {
            "is_clean": not problems,
            "problems": problems,
            "router": {"requests_in_flight": self._dispatcher.core.num_in_flight},
            "nodes": {node_id: {"counts": reply.counts, "problems": reply.problems} for node_id, reply in replies.items()},
        }
        return json_response(body, 503 if problems else 200)


def node_body(node: NodeState, now_s: float) -> dict[str, object]:
    """A node as GET /nodes lists it."""
    return {
        "node_id": node.node_id,
        "role": node.role,
        "status": node.status.value,
        "is_draining": node.status is NodeStatus.DRAINING,
        "down_reason": node.down_reason,
        "uptime_s": round(now_s - node.registered_s, 3),
        "heartbeat_age_s": round(now_s - node.last_heartbeat_s, 3),
        "num_in_flight": len(node.in_flight) if node.is_connected else 0,
        **{name: getattr(node.load, name) for name in node.load.__struct_fields__},
        "max_num_seqs": node.max_num_seqs,
        "num_blocks": node.num_blocks,
        "connector": node.connector,
        "kv_address": node.kv_address,
        "model_name": node.model.model_name,
        "dtype": node.model.dtype,
        "model_fingerprint": node.model.model_fingerprint.hex(),
        "layout_fingerprint": node.model.layout_fingerprint.hex(),
        "block_size": node.model.block_size,
        "generation": str(node.generation),
        "metrics_address": node.metrics_address,
    }
