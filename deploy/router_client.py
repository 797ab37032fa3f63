"""What the command line asks a running router over HTTP. The standard library is enough: no streaming, no retries."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from core.errors import InvalidInputError, KVRelayError


class RouterUnreachableError(KVRelayError):
    """Nothing answered at the URL, or not like a router."""


def get_json(url: str, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
    """GET url + path: the HTTP status, whatever it is, and the decoded JSON body (None when there is none).

    Raises RouterUnreachableError, and InvalidInputError when the URL is none.
    """
    return _ask("GET", url, path, timeout_s)


def post_json(url: str, path: str, timeout_s: float = 5.0) -> tuple[int, Any]:
    """POST without a body; otherwise as get_json."""
    return _ask("POST", url, path, timeout_s)


def _ask(method: str, url: str, path: str, timeout_s: float) -> tuple[int, Any]:
    if not url.startswith(("http://", "https://")):
        raise InvalidInputError("--url", url, "http://HOST:PORT")
    # The cluster is spoken to directly, whatever proxy the environment names for the outside.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        request = urllib.request.Request(url.rstrip("/") + urllib.parse.quote(path), method=method)  # noqa: S310 (checked)
        with opener.open(request, timeout=timeout_s) as response:
            status, body = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read()
    except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: a port that is no number
        raise RouterUnreachableError(f"no answer from {url}: {getattr(error, 'reason', error)}") from error
    try:
        return status, json.loads(body) if body else None
    except ValueError:
        return status, None
