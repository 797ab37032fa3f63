"""The HTTP application: routes, body limits, error bodies, and the endpoints that tell about the cluster.

Generation is in http_generation.py. Every error has OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import http
import importlib.metadata
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from core.clock import Clock
from core.config import RouterOptions
from core.errors import InvalidInputError, OverloadedError
from core.wire.messages import ModelInfo
from router.answer_formats import token_text
from router.api_key_file import ApiKeyFile
from router.api_keys import ApiKeyGate
from router.chat_template import ChatTemplate
from router.dispatcher import Dispatcher
from router.generation import GenerationFailedError
from router.http_adapters import AdapterEndpoints
from router.http_cluster import ClusterEndpoints
from router.http_generation import HTTP_CLIENT_CLOSED, GenerationEndpoints, json_response, tool_support
from router.metrics import RouterMetrics
from router.openai_protocol import DetokenizeRequest, ErrorBody, ErrorResponse, TokenizeRequest, decode_body
from router.request_validation import ModelLimits, UnknownModelError, check_model_name
from router.tokenizer import Tokenizer

logger = logging.getLogger("kvrelay.router")

SHUTDOWN_RETRY_AFTER_S = 5.0
MAX_BODIES = 8  # of the largest size, being received at the same time
BODIES_RETRY_AFTER_S = 1.0
MAX_SHOWN_CHARS = 200  # of what a client sent, in an answer
REQUEST_ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")


class BodyTooLargeError(Exception):
    """The body exceeds max_body_bytes."""


class BodyTooSlowError(Exception):
    """The body did not arrive within body_timeout_s."""


class ShuttingDownError(Exception):
    """The router takes no new requests."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served, as far as the model's folder tells: limits before the first node has registered.

    names: the first is what answers carry; requests may use any.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


Handler = Callable[[Request, bytes], Awaitable[Response]]


class HttpApi:
    """All handlers and the application that routes to them."""

    def __init__(
        self,
        options: RouterOptions,
        clock: Clock,
        model: ServedModel,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        dispatcher: Dispatcher,
        metrics: RouterMetrics,
        drain: Callable[[], None] = lambda: None,
        api_keys: ApiKeyFile | None = None,
    ) -> None:
        """drain: what POST /drain asks of the process."""
        self.is_shutting_down = False
        self.is_draining = False  # new connections are another router's; what arrives on the old ones is still answered
        self._options = options
        self._clock = clock
        self._model = model
        self._tokenizer = tokenizer
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._created = int(time.time())
        self._num_body_bytes = 0  # of requests whose bodies have not arrived whole
        self._generation = GenerationEndpoints(
            dispatcher.core, tokenizer, chat_template, self.limits, tool_support(chat_template, options.tool_call_parser)
        )
        self._cluster = ClusterEndpoints(dispatcher, clock, drain)
        self._adapters = AdapterEndpoints(dispatcher, model.names)
        gate = ApiKeyGate(self._routes(), api_keys, metrics, has_salt_per_key=options.cache_salt_per_key)
        self.app: ASGIApp = self._with_request_id(gate)

    def limits(self) -> ModelLimits:
        """What requests are checked against: the nodes' word once there was one, else the model folder's."""
        served: ServedModel | ModelInfo = self._dispatcher.core.registry.model or self._model
        options, eos_token_ids = self._options, self._model.eos_token_ids
        adapter_names = self._dispatcher.core.adapters.names
        return ModelLimits(
            self._model.names, served.max_model_len, served.vocab_size, options.max_choices, eos_token_ids, adapter_names
        )

    # -- endpoints -----------------------------------------------------------------------------------------------------
    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        names = self._dispatcher.core.adapters.names
        return json_response({"object": "list", "data": [self._model_card(), *(self._model_card(name) for name in names)]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        name: str = request.path_params["name"]
        check_model_name(name, self.limits())
        return json_response(self._model_card(name if name in self._dispatcher.core.adapters.names else ""))

    async def health(self, _request: Request) -> Response:
        """GET /health: 200 while some decode node takes requests."""
        registry = self._dispatcher.core.registry
        if self.is_shutting_down or self.is_draining:
            what = "shutting down" if self.is_shutting_down else "draining"
            return json_response({"status": "unavailable", "reasons": [f"the router is {what}"]}, 503)
        warnings = [] if registry.has_candidate("prefill") else ["no prefill node: decode nodes prefill"]
        for node in registry.connected():
            complaint = node.stats.store_complaint
            if not node.stats.store_is_reachable or node.stats.circuit_is_open:
                what = "fails again and again" if node.stats.store_is_reachable else "cannot be reached"
                why = f" ({complaint})" if complaint else ""
                warnings.append(f"{node.node_id}: its store {node.connector} {what}{why}: prompts are computed anew")
            elif complaint:
                warnings.append(f"{node.node_id}: its store {node.connector}: {complaint}")
            lost_tiers = [name for name, is_reachable in node.stats.tier_is_reachable.items() if not is_reachable]
            if lost_tiers and node.stats.store_is_reachable:
                warnings.append(f"{node.node_id}: its store {node.connector} goes without {', '.join(lost_tiers)} for now")
        names_by_store: dict[str, list[str]] = {}
        for node in registry.connected():
            names_by_store.setdefault(node.connector, []).append(node.node_id)
        if len(names_by_store) > 1:
            stores = "; ".join(f"{store}: {', '.join(sorted(names))}" for store, names in sorted(names_by_store.items()))
            warnings.append(f"nodes have different stores, and compute again what is in another one ({stores})")
        if registry.has_candidate("decode"):
            return json_response({"status": "ok", "warnings": warnings})
        decode_nodes = [node for node in registry.nodes.values() if node.role == "decode"]
        reasons = [f"{node.node_id} is {node.status.value}: {node.down_reason}".rstrip(": ") for node in decode_nodes]
        return json_response({"status": "unavailable", "reasons": reasons or ["no decode node has registered"]}, 503)

    async def version(self, _request: Request) -> Response:
        """GET /version."""
        try:
            version = importlib.metadata.version("kvrelay")
        except importlib.metadata.PackageNotFoundError:
            version = "unknown"
        return json_response({"version": version})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, _request: Request, body: bytes) -> Response:
        """POST /tokenize."""
        parsed = decode_body(body, TokenizeRequest)
        limits = self.limits()
        check_model_name(parsed.model, limits)
        if (parsed.prompt is None) == (parsed.messages is None):
            raise InvalidInputError("prompt", parsed.prompt, "either prompt or messages")
        if parsed.prompt is not None:
            token_ids = await self._generation.encode(parsed.prompt, parsed.add_special_tokens is not False)
        else:
            token_ids = await self._generation.chat_token_ids(
                parsed.messages or [],
                add_generation_prompt=parsed.add_generation_prompt is not False,
                add_special_tokens=bool(parsed.add_special_tokens),
                extra=parsed.chat_template_kwargs,
                tools=parsed.tools,
            )
        strings = None
        if parsed.return_token_strs:
            strings = await asyncio.to_thread(lambda: [token_text(token_id, self._tokenizer) for token_id in token_ids])
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": limits.max_model_len,
                "tokens": token_ids,
                "token_strs": strings,
            }
        )

    async def detokenize(self, _request: Request, body: bytes) -> Response:
        """POST /detokenize."""
        parsed = decode_body(body, DetokenizeRequest)
        check_model_name(parsed.model, self.limits())
        if len(parsed.tokens) > self.limits().max_model_len:
            raise InvalidInputError("tokens", f"{len(parsed.tokens)} tokens", f"at most {self.limits().max_model_len} tokens")
        for token_id in parsed.tokens:
            if not 0 <= token_id < self._tokenizer.vocab_size:
                raise InvalidInputError("tokens", token_id, f"token ids from 0 to {self._tokenizer.vocab_size - 1}")
        return json_response({"prompt": self._tokenizer.decode(parsed.tokens, skip_special_tokens=False)})

    # -- plumbing ------------------------------------------------------------------------------------------------------
    def _routes(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/completions", self._with_body(self._generation.completions), methods=["POST"]),
                Route("/v1/chat/completions", self._with_body(self._generation.chat_completions), methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/tokenize", self._with_body(self.tokenize), methods=["POST"]),
                Route("/cached", self._with_body(self._cluster.cached), methods=["POST"]),
                Route("/detokenize", self._with_body(self.detokenize), methods=["POST"]),
                Route("/health", self.health),
                Route("/version", self.version),
                Route("/metrics", self.metrics),
                *self._cluster.routes(),
                *(self._adapter_routes() if self._options.allow_runtime_lora_updating else ()),
            ],
            exception_handlers={
                InvalidInputError: self._on_invalid_input,
                UnknownModelError: self._on_unknown_model,
                OverloadedError: self._on_overloaded,
                GenerationFailedError: self._on_generation_failed,
                BodyTooLargeError: self._on_body_too_large,
                BodyTooSlowError: self._on_body_too_slow,
                ShuttingDownError: self._on_shutting_down,
                ClientDisconnect: self._on_client_disconnect,
                HTTPException: self._on_http_exception,
                Exception: self._on_bug,
            },
        )

    def _adapter_routes(self) -> list[Route]:
        return [
            Route("/v1/load_lora_adapter", self._with_body(self._adapters.load), methods=["POST"]),
            Route("/v1/unload_lora_adapter", self._with_body(self._adapters.unload), methods=["POST"]),
        ]

    def _with_body(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if self.is_shutting_down:
                raise ShuttingDownError
            return await handler(request, await self._read_body(request))

        return endpoint

    async def _read_body(self, request: Request) -> bytes:
        content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if content_type != "application/json" and not content_type.endswith("+json"):
            raise HTTPException(415, f"content-type: got {content_type[:MAX_SHOWN_CHARS]!r}; allowed: application/json")
        limit = self._options.max_body_bytes
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared) > limit:
            raise BodyTooLargeError
        body = bytearray()
        try:
            async with asyncio.timeout(self._options.body_timeout_s):
                async for chunk in request.stream():
                    body += chunk
                    self._num_body_bytes += len(chunk)
                    if len(body) > limit:
                        raise BodyTooLargeError
                    if self._num_body_bytes > MAX_BODIES * limit:
                        raise OverloadedError("too many large bodies at a time", BODIES_RETRY_AFTER_S)
        except TimeoutError:
            raise BodyTooSlowError from None
        finally:
            self._num_body_bytes -= len(body)
        return bytes(body)

    def _error(
        self, kind: str, status: int, message: str, *, error_type: str, param: str | None = None, retry_after_s: float = 0.0
    ) -> Response:
        self._metrics.request_errors.labels(kind).inc()
        response = json_response(ErrorResponse(ErrorBody(message, error_type, param, status)), status)
        if retry_after_s:
            response.headers["retry-after"] = str(max(1, round(retry_after_s)))
        return response

    async def _on_invalid_input(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidInputError)
        return self._error("invalid_request", 400, str(error), error_type="invalid_request_error", param=error.field)

    async def _on_unknown_model(self, _request: Request, error: Exception) -> Response:
        return self._error("unknown_model", 404, str(error), error_type="not_found_error", param="model")

    async def _on_overloaded(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, OverloadedError)
        return self._error("overloaded", 429, str(error), error_type="overloaded_error", retry_after_s=error.retry_after_s)

    async def _on_generation_failed(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, GenerationFailedError)  # counted where the flow failed
        response = json_response(ErrorResponse(ErrorBody(str(error), error.kind, None, error.http_status)), error.http_status)
        if error.retry_after_s:
            response.headers["retry-after"] = str(max(1, round(error.retry_after_s)))
        return response

    async def _on_body_too_large(self, _request: Request, _error: Exception) -> Response:
        message = f"body: larger than {self._options.max_body_bytes} bytes (router.max_body_bytes)"
        response = self._error("body_too_large", 413, message, error_type="invalid_request_error", param="body")
        response.headers["connection"] = "close"  # the rest of the body is not read
        return response

    async def _on_body_too_slow(self, _request: Request, _error: Exception) -> Response:
        message = f"body: did not arrive within {self._options.body_timeout_s:g} s (router.body_timeout_s)"
        response = self._error("body_too_slow", 408, message, error_type="invalid_request_error", param="body")
        response.headers["connection"] = "close"
        return response

    async def _on_shutting_down(self, _request: Request, _error: Exception) -> Response:
        self._metrics.admission_rejections.labels("shutting_down").inc()
        message = "the router is shutting down"
        return self._error("shutdown", 503, message, error_type="unavailable_error", retry_after_s=SHUTDOWN_RETRY_AFTER_S)

    async def _on_client_disconnect(self, _request: Request, _error: Exception) -> Response:
        return Response(status_code=HTTP_CLIENT_CLOSED)

    async def _on_http_exception(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if message == http.HTTPStatus(error.status_code).phrase:  # the router's own; ours say more
            path = request.url.path[:MAX_SHOWN_CHARS]
            texts = {404: f"no such path: {path}", 405: f"{request.method} is not allowed at {path}"}
            message = texts.get(error.status_code, message)
        response = self._error("http", error.status_code, message, error_type="invalid_request_error")
        response.headers.update(error.headers or {})
        return response

    async def _on_bug(self, _request: Request, error: Exception) -> Response:
        return self._error("internal", 500, f"internal error of the router: {type(error).__name__}", error_type="internal_error")

    def _with_request_id(self, app: ASGIApp) -> ASGIApp:
        """Honour X-Request-Id, or make one, and send it back with every answer."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
            request_id = given if REQUEST_ID_PATTERN.fullmatch(given) else secrets.token_hex(16)
            scope.setdefault("state", {})["request_id"] = request_id

            async def send_with_id(message: Message) -> None:
                if message["type"] == "http.response.start":
                    headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                    if self.is_draining:
                        headers.append((b"connection", b"close"))
                    message["headers"] = headers
                await send(message)

            await app(scope, receive, send_with_id)

        return wrapped

    def _model_card(self, adapter_name: str = "") -> dict[str, object]:
        """Of the model, or of an adapter, whose parent it is."""
        return {
            "id": adapter_name or self._model.names[0],
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "root": self._model.names[0],
            "parent": self._model.names[0] if adapter_name else None,
            "max_model_len": self.limits().max_model_len,
        }
