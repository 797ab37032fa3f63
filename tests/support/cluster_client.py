"""What a test asks a running cluster over HTTP: completions, and what router and nodes say of themselves. No processes here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

SETTLED_S = 2.0  # four heartbeats without a change
Labels = tuple[tuple[str, str], ...]


class ClusterClient:
    """Safe from several threads. `http` is the plain httpx client, for everything that has no method here."""

    def __init__(self, url: str, model_name: str, timeout_s: float, api_key: str = "") -> None:
        self.http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=timeout_s,
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=32),
        )
        self._model_name = model_name

    def complete(self, prompt: str | list[int], **parameters: Any) -> dict[str, Any]:
        """POST /v1/completions, greedy unless told otherwise; the decoded answer. Raises httpx.HTTPStatusError."""
        response = self.http.post("/v1/completions", json=self._body(prompt, parameters))
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

    def complete_many(self, bodies: list[dict[str, Any]], max_concurrent: int = 256) -> list[dict[str, Any]]:
        """complete(**body) for all at once; answers in order."""
        with ThreadPoolExecutor(min(max_concurrent, max(1, len(bodies)))) as threads:
            return list(threads.map(lambda body: self.complete(**body), bodies))

    def stream(self, prompt: str | list[int], **parameters: Any) -> Iterator[dict[str, Any]]:
        """POST /v1/completions with stream: the events up to [DONE]. Fails when the stream ends without it."""
        with self.http.stream("POST", "/v1/completions", json=self._body(prompt, {"stream": True} | parameters)) as response:
            if response.status_code != 200:
                response.read()
                response.raise_for_status()
            for line in response.iter_lines():
                payload = line.removeprefix("data:").strip()
                if payload == "[DONE]":
                    return
                if line.startswith("data:"):
                    yield json.loads(payload)
        raise AssertionError("the stream ended without [DONE]")

    def is_healthy(self) -> bool:
        """Whether /health says 200; False also when nobody answers."""
        try:
            return self.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def nodes(self) -> list[dict[str, Any]]:
        """What GET /nodes lists."""
        listed: list[dict[str, Any]] = self.http.get("/nodes").json()["nodes"]
        return listed

    def node_status(self, name: str) -> str:
        """up, draining, stalled, down; "" when nobody answers or the router does not know the node."""
        try:
            return next((str(node["status"]) for node in self.nodes() if node["node_id"] == name), "")
        except httpx.TransportError:
            return ""

    def requests(self) -> list[dict[str, Any]]:
        """What GET /requests lists."""
        listed: list[dict[str, Any]] = self.http.get("/requests").json()["requests"]
        return listed

    def audit(self) -> dict[str, Any]:
        """What GET /audit answers."""
        answer: dict[str, Any] = self.http.get("/audit").json()
        return answer

    def metrics(self) -> dict[str, dict[Labels, float]]:
        """GET /metrics: {sample name: {labels, sorted: value}}. Samples of nodes are as old as their last heartbeat."""
        samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(self.http.get("/metrics").text):
            for sample in family.samples:
                samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return samples

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels; 0 when there is none."""
        wanted = set(labels.items())
        return sum(value for found, value in self.metrics().get(name, {}).items() if wanted <= set(found))

    def settled_metric(self, name: str, **labels: str) -> float:
        """The same, when what nodes have done before has arrived: their news comes with heartbeats, behind answers."""
        value, since_s = self.metric(name, **labels), time.monotonic()
        while time.monotonic() - since_s < SETTLED_S:
            time.sleep(0.2)
            if (now := self.metric(name, **labels)) != value:
                value, since_s = now, time.monotonic()
        return value

    def close(self) -> None:
        """Close all connections."""
        self.http.close()

    def _body(self, prompt: str | list[int], parameters: dict[str, Any]) -> dict[str, Any]:
        return {"model": self._model_name, "prompt": prompt, "temperature": 0} | parameters
