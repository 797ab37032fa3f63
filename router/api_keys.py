"""Who may ask for which path: the table, the middleware that asks for API keys, and what keeps the caches of two keys apart.

Plain ASGI around the application of http_api.py. The keys themselves are api_key_file.py's. A key is never logged, counted by
name, or part of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import Enum

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from core.addresses import is_loopback
from router.api_key_file import ApiKey, ApiKeyFile
from router.metrics import RouterMetrics
from router.openai_protocol import ErrorBody, ErrorResponse

_SALT_TAG = b"kvrelay tenant salt 1"
# A request that carries one of these was not made by someone at this machine, although it comes from here: a proxy hands it on,
# or a web page in a browser sends it.
_NOT_LOCAL_HEADERS = frozenset({b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"forwarded", b"via", b"origin"})


class Access(Enum):
    """Who may ask. With API keys, KEY and ADMIN need a key; without, KEY is open and ADMIN is for loopback peers."""

    OPEN = "open"
    KEY = "key"
    ADMIN = "admin"


# A path belongs to the first part that it equals or lies below. One that is not here is an administrator's: an endpoint that
# somebody forgot to add is closed.
ACCESS_BY_PATH: tuple[tuple[str, Access], ...] = (
    ("/health", Access.OPEN),
    ("/version", Access.OPEN),
    ("/metrics", Access.OPEN),
    ("/v1/load_lora_adapter", Access.ADMIN),
    ("/v1/unload_lora_adapter", Access.ADMIN),
    ("/v1", Access.KEY),
    ("/tokenize", Access.KEY),
    ("/detokenize", Access.KEY),
    ("/nodes", Access.ADMIN),
    ("/audit", Access.ADMIN),
    ("/cached", Access.ADMIN),
    ("/drain", Access.ADMIN),
    ("/requests", Access.ADMIN),
    ("/admin", Access.ADMIN),
)


def access_of(path: str) -> Access:
    """Who may ask for a path, as the application will see it (decoded)."""
    for part, access in ACCESS_BY_PATH:
        if path == part or path.startswith(f"{part}/"):
            return access
    return Access.ADMIN


def tenant_cache_salt(tenant: str, cache_salt: str) -> str:
    """The salt that nodes are told: the client's own without a tenant, else a digest of both.

    Parts are length-tagged, so that no two pairs can give the same. The tenant is the key's name, so that a new key under the
    old name finds what the old one has cached.
    """
    if not tenant:
        return cache_salt
    digest = hashlib.sha256(_SALT_TAG)
    for part in (tenant.encode(), cache_salt.encode()):
        digest.update(b"%d:" % len(part))
        digest.update(part)
    return digest.hexdigest()


class ApiKeyGate:
    """The middleware. Sets scope["state"]["tenant"]: the key's name, "" when requests are not kept apart."""

    def __init__(self, app: ASGIApp, keys: ApiKeyFile | None, metrics: RouterMetrics, *, has_salt_per_key: bool) -> None:
        """keys None: no key is asked for, and administrators' paths answer to loopback peers alone."""
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._has_salt_per_key = has_salt_per_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand the request on, or answer 401 or 403 without having read its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        found = self._judge(scope)
        if isinstance(found, Response):
            await found(scope, receive, send)
            return
        scope.setdefault("state", {})["tenant"] = found.name if found is not None and self._has_salt_per_key else ""
        await self._app(scope, receive, send)

    def _judge(self, scope: Scope) -> ApiKey | Response | None:
        path = scope["path"]
        access = access_of(path)
        if access is Access.OPEN:
            return None
        if self._keys is None:
            if access is Access.ADMIN and not is_local(scope):
                return self._refuse(
                    403,
                    "forbidden",
                    f"{path} is for administrators: without API keys (router.api_keys_file) it answers only to this machine's "
                    "loopback address, asked directly",
                )
            return None
        key = bearer_key(scope["headers"])
        found = self._keys.find(key) if key else None
        if found is None:
            wrong = "that API key is not valid" if key else "no API key was sent"
            return self._refuse(401, "unauthorized", f"{wrong}; {path} needs the header Authorization: Bearer KEY")
        if access is Access.ADMIN and not found.is_admin:
            return self._refuse(403, "forbidden", f"{path} is for administrators: it needs the API key of one")
        return found

    def _refuse(self, status: int, kind: str, message: str) -> Response:
        self._metrics.request_errors.labels(kind).inc()
        error_type = "authentication_error" if status == 401 else "permission_error"
        body = ErrorResponse(ErrorBody(message, error_type, None, status))
        headers = {"www-authenticate": 'Bearer realm="kvrelay"'} if status == 401 else {}
        return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def bearer_key(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The key of the one Authorization header with scheme Bearer; b"" when there is none, or more than one."""
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1:
        return b""
    scheme, _, key = values[0].strip().partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def is_local(scope: Scope) -> bool:
    """Whether a request comes over loopback, and from there: not through a proxy or a web page."""
    client = scope.get("client")
    return client is not None and is_loopback(client[0]) and not any(name in _NOT_LOCAL_HEADERS for name, _ in scope["headers"])
