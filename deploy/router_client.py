"""What the command line asks a running router over HTTP. The standard library is enough: no streaming, no retries.

Every question carries the API key in KVRELAY_API_KEY, if there is one.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from core.config import router_api_key
from core.errors import InvalidInputError, KVRelayError

_NODE_UP = re.compile(r'^kvrelay_node_up\{[^}]*\bnode_id="([^"]*)"[^}]*\} 1\.0$', re.MULTILINE)


class RouterUnreachableError(KVRelayError):
    """Nothing answered at the URL, or not like a router."""


class RouterRefusalError(KVRelayError):
    """The router answered, but not with what was asked for."""

    def __init__(self, url: str, path: str, status: int, body: Any) -> None:
        error = body.get("error") if isinstance(body, dict) else None
        said = error.get("message") if isinstance(error, dict) else body
        hint = "; KVRELAY_API_KEY must hold an administrator's API key" if status in (401, 403) else ""
        super().__init__(f"{url}{path} answered with status {status}: {said}{hint}")


def get_json(url: str, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
    """GET url + path: the HTTP status, whatever it is, and the decoded JSON body (None when there is none).

    Raises RouterUnreachableError, and InvalidInputError when the URL is none.
    """
    status, body = _ask("GET", url, path, timeout_s)
    return status, _decode(body)


def post_json(url: str, path: str, timeout_s: float = 5.0, content: object = None) -> tuple[int, Any]:
    """POST `content` as JSON, None: without a body; otherwise as get_json."""
    sent = None if content is None else json.dumps(content).encode()
    status, body = _ask("POST", url, path, timeout_s, sent)
    return status, _decode(body)


def nodes_up(url: str, timeout_s: float = 5.0) -> set[str]:
    """The names of the nodes that are up, from /metrics, which needs no API key. Raises RouterUnreachableError."""
    _, body = _ask("GET", url, "/metrics", timeout_s)
    return set(_NODE_UP.findall(body.decode(errors="replace")))


def _decode(body: bytes) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        return None


def _ask(method: str, url: str, path: str, timeout_s: float, content: bytes | None = None) -> tuple[int, bytes]:
    if not url.startswith(("http://", "https://")):
        raise InvalidInputError("--url", url, "http://HOST:PORT")
    api_key = router_api_key()
    # The cluster is spoken to directly, whatever proxy the environment names for the outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        where = url.rstrip("/") + urllib.parse.quote(path)
        request = urllib.request.Request(where, data=content, method=method)  # noqa: S310 (checked)
        if content is not None:
            request.add_header("Content-Type", "application/json")
        if api_key:
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")  # for this router alone
        with opener.open(request, timeout=timeout_s) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a port that is no number
        raise RouterUnreachableError(f"no answer from {url}: {getattr(error, 'reason', error)}") from error
    return status, body
