"""What holds for every request: its id, who asks, errors in the API's shape, one log line and one count."""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from fleet.gateway.auth import ApiKeys
from fleet.gateway.errors import ApiError, internal
from fleet.gateway.log import log_request, logger
from fleet.gateway.metrics import GatewayMetrics

REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
OPEN_PATHS = ("/livez",)
CERTIFICATE_PATHS = ("/health", "/metrics")
"""A certificate of the site's CA opens these as well as an API key does: scrapes and `fleet status` have one."""
COUNTED_ROUTES = {
    ("POST", "/v1/chat/completions"): "chat",
    ("POST", "/v1/completions"): "completions",
    ("GET", "/v1/streams/{stream}"): "streams",
}


@dataclass
class RequestContext:
    """What the middleware keeps for a request.

    Attributes:
        request_id: the client's, or drawn here.
        log: fields of the request's log line; "outcome" is also the metric's label.
    """

    request_id: str
    log: dict[str, Any] = field(default_factory=lambda: {"outcome": "ok"})


_current: ContextVar[RequestContext] = ContextVar("fleet_gateway_request")


def current_request() -> RequestContext:
    """The context that the middleware made for the request of this task."""
    return _current.get()


def request_id_of(sent: str | None) -> str:
    """The client's request id if it is short and harmless, else one drawn here."""
    return sent if sent is not None and _REQUEST_ID.fullmatch(sent) else f"req-{secrets.token_hex(12)}"


def report_bug() -> ApiError:
    """Log the exception being handled with its traceback; the error to answer with."""
    logger.exception("bug", extra={"fields": {"request_id": current_request().request_id}})
    return internal("a bug of the gateway; its log has the traceback")


def make_middleware(keys: ApiKeys, metrics: GatewayMetrics) -> Middleware:
    """The gateway's only middleware.

    Args:
        keys: who may ask.
        metrics: where answered requests are counted.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        started = time.monotonic()
        context = RequestContext(request_id_of(request.headers.get(REQUEST_ID_HEADER)))
        token = _current.set(context)
        log = context.log
        status = 499  # as nginx logs a client that went away; never sent
        try:
            response = await _answer(request, handler, keys)
            status = response.status
            return response
        except (asyncio.CancelledError, ConnectionError):
            log["outcome"] = "cancelled"
            raise
        finally:
            _current.reset(token)
            resource = request.match_info.route.resource
            endpoint = COUNTED_ROUTES.get((request.method, resource.canonical)) if resource is not None else None
            if endpoint is not None:
                metrics.requests.labels(endpoint, log["outcome"]).inc()
                log_request(
                    {
                        "request_id": context.request_id,
                        "endpoint": endpoint,
                        "status": status,
                        "seconds": round(time.monotonic() - started, 6),
                        **log,
                    }
                )

    return middleware


async def _answer(request: web.Request, handler: Handler, keys: ApiKeys) -> web.StreamResponse:
    """Authorise and handle; whatever goes wrong before the first byte becomes an error of the API."""
    context = current_request()
    log = context.log
    try:
        _authorise(request, keys, log)
        response = await handler(request)
    except ApiError as error:
        response = _error_response(error, log)
    except web.HTTPException as error:
        shaped = ApiError(error.status, f"{request.method} {request.path[:200]}: {error.reason}", code="http_error")
        response = _error_response(shaped, log)
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
    except ConnectionError:
        raise
    except Exception:
        response = _error_response(report_bug(), log)
    if not response.prepared:
        response.headers[REQUEST_ID_HEADER] = context.request_id
    return response


def _authorise(request: web.Request, keys: ApiKeys, log: dict[str, Any]) -> None:
    """Let the request through, or raise 401."""
    if request.path in OPEN_PATHS:
        return
    certificate = request.transport.get_extra_info("peercert") if request.transport is not None else None
    if request.path in CERTIFICATE_PATHS and certificate:
        return
    log["client"] = keys.client(request.headers.get("Authorization"))


def _error_response(error: ApiError, log: dict[str, Any]) -> web.StreamResponse:
    log["outcome"] = error.outcome
    log["error"] = error.message
    response = web.json_response(error.body(), status=error.status, headers=error.headers())
    if error.status in (401, 413):
        response.force_close()  # what is left of the body is not read
    return response
